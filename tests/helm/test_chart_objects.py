"""Every rendered object has the fields of its kind, and no others: an API server drops what it doesn't know."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from chart_rendering import CHART, SHAPES, Object, Rendered

FIELDS = json.loads((Path(__file__).parent / "kuberay_fields.json").read_text())
VERSIONS = [pytest.param("1.27", marks=pytest.mark.more), pytest.param("1.33", marks=pytest.mark.more), "1.37"]
NATIVE_SIDECARS = "1.29"
"""Version of Kubernetes from which on the chart makes the same objects."""
CUSTOM = {"RayCluster", "PodMonitor", "PrometheusRule", "HTTPRoute", "GRPCRoute"}
EVERYTHING: dict[str, Any] = {
    "model": {"path": "hf:org/name", "hub": {"tokenSecret": "hub"}},
    "router": {"tlsSecret": "public", "apiKeysSecret": "keys", "replicas": 2},
    "helmTest": {"apiKeySecret": "key", "tlsHost": "llm.example.com"},
    "decode": {"replicas": 2},
    "gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379", "redisPasswordSecret": "redis"},
    "autoscaling": {"enabled": True},
    "networkPolicy": {
        "defaultDeny": True,
        "grpcFrom": [{"namespaceSelector": {}}],
        "dashboardFrom": [{"podSelector": {}}],
    },
    "ingress": {"enabled": True, "className": "nginx", "hosts": ["a.b"], "grpcHosts": ["g.b"], "tlsSecret": "outside"},
    "gateway": {"enabled": True, "parentRefs": [{"name": "public"}], "grpcHostnames": ["g.b"]},
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboards": {"enabled": True},
    "service": {"type": "LoadBalancer"},
}


@pytest.fixture(params=[*SHAPES, "everything"])
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    return EVERYTHING if request.param == "everything" else {"values": request.param}


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(render, values: dict[str, Any], version: str) -> None:
    rendered: Rendered = render(kubernetes=min(version, NATIVE_SIDECARS), **values)
    pods: list[Object] = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": group, **template["metadata"]},
            "spec": template["spec"],
        }
        for group, template in rendered.templates.items()
    ]
    for item in [*(item for item in rendered.objects if item["kind"] not in CUSTOM), *pods]:
        kubernetes_validate.validate(item, version, strict=True)


def test_kuberay_knows_every_field(render, values: dict[str, Any]) -> None:
    assert list(unknown(render(**values).cluster["spec"], FIELDS, "spec")) == []


def unknown(value: Any, fields: dict[str, Any], path: str) -> list[str]:
    """The paths of what isn't among the fields."""
    if isinstance(value, list):
        return [found for child in value for found in unknown(child, fields, path)]
    if not fields or not isinstance(value, dict):
        return []
    return [
        found
        for name, child in value.items()
        for found in (unknown(child, fields[name], f"{path}.{name}") if name in fields else [f"{path}.{name}"])
    ]


def test_an_unknown_field_would_be_found(render) -> None:
    spec = json.loads(json.dumps(render().cluster["spec"]))
    spec["workerGroupSpecs"][0]["gpus"] = 1
    spec["gcsFaultTolerance"] = {}
    assert sorted(unknown(spec, FIELDS, "spec")) == ["spec.gcsFaultTolerance", "spec.workerGroupSpecs.gpus"]


def test_routes_and_ingresses_lead_to_ports_of_the_service(render) -> None:
    rendered = render(**EVERYTHING)
    ports = {port["name"]: port["port"] for port in rendered.one("Service")["spec"]["ports"]}
    for kind, name in (("HTTPRoute", "http"), ("GRPCRoute", "grpc")):
        (backend,) = rendered.one(kind)["spec"]["rules"][0]["backendRefs"]
        assert backend == {"name": rendered.name, "port": ports[name]}
    for ingress in rendered.all("Ingress"):
        (rule,) = ingress["spec"]["rules"]
        service = rule["http"]["paths"][0]["backend"]["service"]
        assert (service["name"], service["port"]["name"] in ports) == (rendered.name, True)
    assert {rule["metadata"]["name"] for rule in rendered.all("Ingress")} == {"demo-kvrelay-http", "demo-kvrelay-grpc"}


def test_dashboards_and_rules_of_the_chart_are_installed(render) -> None:
    rendered = render(**EVERYTHING)
    dashboards = [item for item in rendered.all("ConfigMap") if item["metadata"]["labels"].get("grafana_dashboard")]
    files = {path.name: path.read_text() for path in (CHART / "dashboards").glob("*.json")}
    assert {name: json.loads(text) for item in dashboards for name, text in item["data"].items()} == {
        name: json.loads(text) for name, text in files.items()
    }
    rules = list((CHART / "rules").glob("*.yaml"))
    assert len(rendered.all("PrometheusRule")) == len(rules)
    assert all(rule["spec"]["groups"] for rule in rendered.all("PrometheusRule"))


def test_routers_are_spread_unless_values_say_how(render) -> None:
    def spread(**router: Any) -> list[Object]:
        template = render(router=router).templates["router"]
        found: list[Object] = template["spec"]["topologySpreadConstraints"]
        for constraint in found:
            assert constraint["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        return found

    assert {each["topologyKey"] for each in spread(replicas=3)} == {
        "topology.kubernetes.io/zone",
        "kubernetes.io/hostname",
    }
    assert {each["whenUnsatisfiable"] for each in spread(replicas=3)} == {"ScheduleAnyway"}
    own = {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
    own["labelSelector"] = {"matchLabels": {"app.kubernetes.io/component": "router"}}
    assert spread(topologySpreadConstraints=[own]) == [own]


def test_a_container_of_rays_has_its_time_to_start(render) -> None:
    rendered: Rendered = render(startupSeconds=123)
    for template in rendered.templates.values():
        ray = template["spec"]["containers"][0]
        probe = ray["startupProbe"]
        assert probe["httpGet"] == ray["livenessProbe"]["httpGet"]
        assert 123 <= probe["periodSeconds"] * probe["failureThreshold"] < 123 + probe["periodSeconds"]


def test_the_charts_page_says_what_its_values_are() -> None:
    found = runpy.run_path(str(CHART.parents[1] / "docs" / "generate.py"))["chart_readme"]()
    assert (CHART / "README.md").read_text() == found, "run `make docs`"
    listed = set(re.findall(r"^\| ([\w.]+)\S* \|", found, re.MULTILINE))
    assert {"router.replicas", "prefill.gpus", "startupSeconds"} <= listed
