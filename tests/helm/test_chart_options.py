"""The effect of single values of the chart."""

import base64
import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
from chart_rendering import (
    CHART,
    EVERYTHING,
    EXAMPLES,
    Object,
    Rendered,
    container,
    containers,
    custom_resources,
    environment,
    preparing,
    worker_configs,
)
from kuberay_fields import unknown

pytestmark = pytest.mark.more


def worker(rendered: Rendered, group: str) -> Object:
    return container(rendered.templates[group], "ray-worker")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"prefill": (1, 0, 2, 2), "decode": (1, 0, 2, 2)}),
        ({"prefill": {"replicas": 2, "gpus": 4, "resources": {"cpu": "16"}}}, {"prefill": (8, 1, 4, 4)}),
        ({"prefill": {"gpus": 1, "workersPerPod": 3}}, {"prefill": (3, 0.3333, 0.6666, 1)}),
        ({"decode": {"workersPerPod": 2}}, {"decode": (2, 0, 1, 1)}),
        # Workers of several ranks: GPUs are for each rank, CPUs and threads for all of them together.
        (
            {
                "engine": {"tensor_parallel": 2},
                "prefill": {"replicas": 3, "gpus": 8, "engine": {"tensor_parallel": 4}, "resources": {"cpu": "16"}},
                "decode": {"gpus": 8, "resources": {"cpu": "16"}},
                "colocated": {"replicas": 1, "engine": {"pipeline_parallel": 2}, "resources": {"cpu": "8"}},
            },
            {"prefill": (6, 1, 8, 8), "decode": (4, 1, 4, 4), "colocated": (1, 0, 8, 8)},
        ),
        # Workers of several pods.
        (
            {"prefill": {"replicas": 3, "gpus": 4, "engine": {"tensor_parallel": 8, "hosts": 2}}},
            {"prefill": (3, 1, 2, 2)},
        ),
        (
            {"prefill": {"replicas": 0}, "decode": {"replicas": 0}, "colocated": {"replicas": 2}},
            {"prefill": (0, None, None, None), "decode": (0, None, None, None), "colocated": (2, 0, 2, 2)},
        ),
        ({"prefill": {"threads": 1}}, {"prefill": (1, 0, 2, 1), "decode": (1, 0, 2, 2)}),
        *(
            ({"decode": {"resources": {"cpu": cpu}}}, {"decode": (1, 0, whole, whole)})
            for cpu, whole in (("500m", 1), ("1500m", 1), ("2", 2), ("2.9", 2), (4, 4), ("16000m", 16), (0.5, 1))
        ),
    ],
    ids=str,
)
def test_workers_gpus_cpus_and_threads_of_each_role(
    render, tmp_path: Path, values: dict[str, Any], expected: dict[str, tuple[int, Any, Any, Any]]
) -> None:
    """A pod has a worker for each GPU, or as many as share its GPUs and whole CPUs."""
    rendered = render(**values)
    config = rendered.config(tmp_path)
    assert rendered.groups.keys() == {"router", *(item.role for item in worker_configs(config))}
    for role, (replicas, gpus, cpus, threads) in expected.items():
        section, pod = config.role(role), rendered.given[role]
        assert section.replicas == replicas
        if replicas:
            assert (section.gpus, section.cpus) == (gpus, cpus)
            assert {item.engine.threads for item in worker_configs(config) if item.role == role} == {threads}
            assert custom_resources(rendered.groups[role]) == {"kvrelay_worker": replicas // pod["replicas"]}
            limits = worker(rendered, role)["resources"]["limits"]
            assert limits["cpu"] == str(pod["resources"]["cpu"])
            assert limits.get("nvidia.com/gpu", "0") == str(pod["gpus"])
            hosts = config.hosts(role)
            assert rendered.groups[role].get("numOfHosts", 1) == hosts
            assert config.total_resources()["kvrelay_worker"] >= hosts * replicas


def test_workers_are_added_within_the_autoscalers_bounds(render, tmp_path: Path) -> None:
    groups = {"prefill": {"replicas": 2, "gpus": 2, "minReplicas": 1, "maxReplicas": 4}, "decode": {"maxReplicas": 3}}
    given = {"autoscaling": {"enabled": True}, "scaling": {"enabled": True}, **groups}
    rendered = render(**given)
    config = rendered.config(tmp_path).scaling
    assert (config.min_workers, config.max_workers) == (2 + 1, 8 + 3)
    group = rendered.groups["prefill"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (1, 2, 4)
    assert rendered.cluster["spec"]["enableInTreeAutoscaling"] is True
    own = render(**{**given, "scaling": {"enabled": True, "max_workers": 5}})
    assert own.config(tmp_path).scaling.max_workers == 5
    fixed = render(**{**given, "autoscaling": {"enabled": False}})
    assert fixed.config(tmp_path).scaling.max_workers == 0, "without the autoscaler only roles change"
    assert {(each["minReplicas"], each["maxReplicas"]) for each in fixed.groups.values()} == {(1, 1), (2, 2)}


def test_a_pod_need_not_wait_for_a_model_of_the_hub(render) -> None:
    rendered = render(model={"path": "hf:org/name", "hub": {"prefetch": False}})
    assert preparing(rendered.templates["decode"]) == []
    assert {"name": "hub", "emptyDir": {}} in rendered.templates["decode"]["spec"]["volumes"]


def test_rays_state_can_be_kept_in_redis(render) -> None:
    assert render(**EVERYTHING).cluster["spec"]["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis:6380",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
    }
    assert "gcsFaultToleranceOptions" not in render().cluster["spec"]


def test_without_a_key_and_an_authority_there_is_no_test_pod(render) -> None:
    assert not render(router={"tlsSecret": "public", "apiKeysSecret": "keys"}).all("Pod")


def test_the_chart_makes_a_join_token_that_only_a_secret_holds(render) -> None:
    rendered = render()
    token = base64.b64decode(rendered.one("Secret")["data"]["join_token"]).decode()
    assert len(token) >= 40
    assert token not in str([item for item in rendered.objects if item["kind"] != "Secret"])


@pytest.mark.parametrize("path", ["1e3", "yes", "# a: 'b' \""])
def test_a_model_may_have_any_name(render, tmp_path: Path, path: str) -> None:
    assert render(model={"path": path}).config(tmp_path).model.path == path


def test_images(render) -> None:
    rendered = render(
        image={"repository": "registry.example.com/kvrelay", "tag": "1", "pullPolicy": "Always"},
        decode={"image": {"digest": "sha256:" + "a" * 64}},
    )
    assert worker(rendered, "prefill")["image"] == "registry.example.com/kvrelay:1"
    assert worker(rendered, "decode")["image"] == "registry.example.com/kvrelay@sha256:" + "a" * 64
    assert {item["imagePullPolicy"] for _, item in containers(rendered)} == {"Always"}


def test_a_new_configuration_is_a_new_pod_template_and_nothing_else_is(render) -> None:
    def checksum(**values: object) -> str:
        return render(**values).head["metadata"]["annotations"]["checksum/config"]

    assert checksum() == checksum(decode={"podAnnotations": {"a": "b"}})
    assert len({checksum(), checksum(engine={"block_size": 32}), checksum(decode={"replicas": 2})}) == 3


def test_what_is_off_is_not_there(render) -> None:
    rendered = render(
        networkPolicy={"enabled": False},
        podDisruptionBudget={"enabled": False},
        serviceAccount={"create": False},
        decode={"replicas": 3},
    )
    assert {item["kind"] for item in rendered.objects} == {"ConfigMap", "RayCluster", "Secret", "Service", "Pod"}
    assert rendered.head["spec"]["serviceAccountName"] == "default"


def test_names_fit_what_kuberay_derives_from_them(render) -> None:
    rendered = render(release="a" * 53)
    assert len(rendered.name) <= 40
    assert len(f"{rendered.name}-colocated") <= 50  # KubeRay cuts a pod's name there
    assert len(f"{rendered.name}-head-svc") <= 50


def test_authentication_can_be_switched_off(render) -> None:
    rendered = render(auth={"enabled": False})
    assert "authOptions" not in rendered.cluster["spec"]
    for template in rendered.templates.values():
        for item in template["spec"]["containers"]:
            assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & environment(item).keys()
            assert item.get("env") != []


def test_an_older_kubernetes_lets_the_logs_container_outlive_the_drain_and_it_can_be_left_out(render) -> None:
    for template in render(kubernetes="1.28").templates.values():
        assert "initContainers" not in template["spec"]
        item = container(template, "logs")
        assert item in template["spec"]["containers"][1:]  # the first one is Ray's
        assert "restartPolicy" not in item
        command, seconds = item["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        if "lifecycle" in template["spec"]["containers"][0]:
            *_, drain = template["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            assert float(drain) <= float(seconds) < template["spec"]["terminationGracePeriodSeconds"]
    for version in ("1.28", "1.29"):
        without = render(kubernetes=version, actorLogs={"enabled": False})
        assert "logs" not in [item["name"] for _, item in containers(without)]


def test_an_unknown_field_would_be_found(render) -> None:
    spec = json.loads(json.dumps(render().cluster["spec"]))
    spec["workerGroupSpecs"][0]["gpus"] = 1
    spec["gcsFaultTolerance"] = {}
    assert sorted(unknown(spec)) == ["spec.gcsFaultTolerance", "spec.workerGroupSpecs.gpus"]


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


def test_the_notes_say_how_to_reach_it(helm, tmp_path: Path) -> None:
    """helm prints notes only when it installs, so here they are rendered as a template."""
    chart = Path(shutil.copytree(CHART, tmp_path / "chart"))
    text = (CHART / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "notes.yaml").write_text(
        '{{ define "notes" }}' + text + '{{ end }}\nnotes: {{ include "notes" . | quote }}\n'
    )
    for example in (None, *EXAMPLES.values()):
        options: list[str | Path] = [] if example is None else ["--values", example]
        notes = helm("template", "demo", chart, "--show-only", "templates/notes.yaml", *options).stdout
        name = "relay" if example is EXAMPLES["host-network"] else "demo-kvrelay"
        assert f"ray.io/cluster={name},ray.io/group=router" in notes
        assert f"service/{name}-head-svc 8265" in notes
        assert ("network: their ports are open" in notes) is (example is EXAMPLES["host-network"])


def test_the_charts_page_says_what_its_values_are() -> None:
    found = runpy.run_path(str(CHART.parents[1] / "docs" / "generate.py"))["chart_readme"]()
    assert (CHART / "README.md").read_text() == found, "run `make docs`"
    listed = set(re.findall(r"^\| ([\w.]+)\S* \|", found, re.MULTILINE))
    assert {"router.replicas", "prefill.gpus", "startupSeconds"} <= listed
