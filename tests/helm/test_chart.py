"""Properties of every rendering of the chart: the defaults, each example, and values that make every object."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from chart_rendering import (
    CHART,
    EVERY_SHAPE,
    SHAPES,
    Object,
    Rendered,
    container,
    containers,
    custom_resources,
    environment,
    preparing,
    ray_containers,
    worker_configs,
)
from kuberay_fields import unknown

from kvrelay.cluster.config.options import ClusterConfig

NATIVE_SIDECARS = "1.29"
"""Version of Kubernetes from which on the chart makes the same objects."""
CUSTOM = {"RayCluster", "PodMonitor", "PrometheusRule", "HTTPRoute", "GRPCRoute"}
SECRETS = "/etc/kvrelay-secrets"
PARTS = {"headgroup": {"supervisor", "operator"}, "router": {"router"}}
"""kvrelay's parts in the pods of a group; other groups' have workers."""


@pytest.fixture(params=EVERY_SHAPE)
def shape(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SHAPES[request.param]


@pytest.fixture
def rendered(render, shape: dict[str, Any]) -> Rendered:
    return render(**shape)


@pytest.fixture
def config(rendered: Rendered, tmp_path: Path) -> ClusterConfig:
    return rendered.config(tmp_path)


def ray_container(template: Object) -> Object:
    """The container that KubeRay takes for Ray's."""
    return template["spec"]["containers"][0]


def tcp(*ports: int) -> list[Object]:
    return [{"port": port, "protocol": "TCP"} for port in ports]


def test_lint_finds_nothing(helm, shape: dict[str, Any]) -> None:
    if shape.keys() <= {"values"}:
        helm("lint", "--strict", CHART, *(option for file in shape.values() for option in ("--values", file)))


def test_every_object_is_named_once_and_labelled(rendered: Rendered) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in rendered.objects]
    assert len(set(names)) == len(names)
    for item in rendered.objects:
        assert item["apiVersion"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", item["metadata"]["name"])
        assert item["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo"
        assert all(isinstance(value, str) for value in item["metadata"]["labels"].values())


@pytest.mark.parametrize(
    "version", [pytest.param("1.27", marks=pytest.mark.more), pytest.param("1.33", marks=pytest.mark.more), "1.37"]
)
def test_kubernetes_and_kuberay_know_every_field(render, shape: dict[str, Any], version: str) -> None:
    """An API server drops what it doesn't know."""
    rendered: Rendered = render(kubernetes=min(version, NATIVE_SIDECARS), **shape)
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
    assert unknown(rendered.cluster["spec"]) == []


def test_the_configuration_is_what_the_values_say(rendered: Rendered, config: ClusterConfig) -> None:
    given, written = rendered.given, yaml.safe_load(rendered.named("ConfigMap", rendered.name)["data"]["config.yaml"])
    for section in ("engine", "transfer", "heartbeat"):
        assert written.get(section, {}) == given[section]
    assert written.get("scaling", {}).items() >= given["scaling"].items()
    assert written["router"].items() >= given["router"]["options"].items()
    assert (config.model.path, config.model.dtype) == (given["model"]["path"], given["model"]["dtype"])
    assert (config.drain_seconds, config.ray.namespace) == (given["drainSeconds"], given["ray"]["namespace"])
    assert config.ray.address == "auto"
    for router in config.router_configs():
        assert router.host == given["router"]["host"] != "127.0.0.1"
        assert (router.grpc_port, router.http_port) == (given["router"]["grpcPort"], given["router"]["httpPort"])
    for worker in worker_configs(config):
        options = {**given["engine"], **given[worker.role]["engine"]}
        read = ClusterConfig.model_validate({"engine": options}).worker_config("any", worker.role).engine
        assert all(getattr(worker.engine, name) == getattr(read, name) for name in options)
        assert worker.engine.threads == given[worker.role]["threads"] or not given[worker.role]["threads"]


def test_groups_are_those_of_the_configuration(rendered: Rendered, config: ClusterConfig) -> None:
    """Every actor fits a pod of its group, no more of them share a pod than it is for, and routers fit no other."""
    expected = {role: config.role(role).replicas for role in ("prefill", "decode", "colocated")}
    expected = {"router": config.router.replicas, **{role: count for role, count in expected.items() if count}}
    assert rendered.groups.keys() == expected.keys()
    for name, group in rendered.groups.items():
        # Workers of every role take the same resource, so that they can change their roles.
        resource = "kvrelay_router" if name == "router" else "kvrelay_worker"
        own, parameters = custom_resources(group), group["rayStartParams"]
        assert own.keys() == {resource}
        assert group["replicas"] * own[resource] == expected[name]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["labels"] == {config.ray.role_label: name}, "where its workers go first"
        offered = {"CPU": float(parameters["num-cpus"]), "GPU": float(parameters["num-gpus"]), **own}
        needs = config.bundle(name)
        assert needs[resource] == 1
        assert all(amount * own[resource] <= offered[each] for each, amount in needs.items())
        gpus = needs.get("GPU", 0) * own[resource]
        limits = container(group["template"], "ray-worker")["resources"]["limits"]
        assert int(limits.get("nvidia.com/gpu", "0")) == gpus == offered["GPU"]


def test_every_parameter_of_ray_is_text_and_the_head_takes_no_work(rendered: Rendered) -> None:
    spec = rendered.cluster["spec"]
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    parameters = spec["headGroupSpec"]["rayStartParams"]
    assert parameters["num-cpus"] == parameters["num-gpus"] == "0"
    assert "resources" not in parameters


def test_the_service_routes_and_ingresses_reach_the_router_and_nothing_else(
    rendered: Rendered, config: ClusterConfig
) -> None:
    service = rendered.named("Service", rendered.name)["spec"]
    assert rendered.selected(service["selector"]) == {"router"}
    assert "publishNotReadyAddresses" not in service
    targets = {item["name"]: item["containerPort"] for item in ray_container(rendered.templates["router"])["ports"]}
    ports = {"grpc": config.router.grpc_port, "http": config.router.http_port}
    assert {item["name"]: item["port"] for item in service["ports"]} == ports
    assert {item["name"]: targets[item["targetPort"]] for item in service["ports"]} == ports
    assert [item for item in service["ports"] if "h2c" in item.get("appProtocol", "")] == [
        item for item in service["ports"] if item["name"] == "grpc" and not config.router.tls_certificate
    ]
    for kind, name in (("HTTPRoute", "http"), ("GRPCRoute", "grpc")):
        for route in rendered.all(kind):
            (backend,) = route["spec"]["rules"][0]["backendRefs"]
            assert backend == {"name": rendered.name, "port": ports[name]}
    ingresses = {item["metadata"]["name"].removeprefix(f"{rendered.name}-"): item for item in rendered.all("Ingress")}
    assert ingresses.keys() == (ports.keys() if rendered.given["ingress"]["enabled"] else set())
    for name, ingress in ingresses.items():
        (rule,) = ingress["spec"]["rules"]
        backend = rule["http"]["paths"][0]["backend"]["service"]
        assert (backend["name"], backend["port"]["name"]) == (rendered.name, name)


def test_probes_need_no_program_in_the_image_and_the_routers_asks_its_health_service(
    rendered: Rendered, config: ClusterConfig
) -> None:
    health = {"path": "/api/healthz", "port": 52365}
    scheme = "HTTPS" if config.router.tls_certificate else "HTTP"
    seconds = rendered.given["startupSeconds"]
    for group, template in rendered.templates.items():
        ray = ray_container(template)
        assert ray["name"] == ("ray-head" if group == "headgroup" else "ray-worker")
        assert ray["livenessProbe"]["httpGet"] == ray["startupProbe"]["httpGet"] == health
        period = ray["startupProbe"]["periodSeconds"]
        assert seconds <= period * ray["startupProbe"]["failureThreshold"] < seconds + period
        ready = {"path": "/ready", "port": config.router.http_port, "scheme": scheme} if group == "router" else health
        assert ray["readinessProbe"]["httpGet"] == ready


def test_the_launcher_is_a_driver_beside_the_head(rendered: Rendered) -> None:
    spec = rendered.head["spec"]
    launcher, ray = container(rendered.head, "launcher"), container(rendered.head, "ray-head")
    assert launcher["command"] == ["/bin/bash", "/etc/kvrelay/launch.sh"]
    # Ray finds the node of a driver by its raylet's process, and reaches it by the sockets in /tmp/ray.
    assert spec["shareProcessNamespace"] is True
    for path in ("/tmp/ray", "/dev/shm"):
        (mine,) = [mount["name"] for mount in launcher["volumeMounts"] if mount["mountPath"] == path]
        assert mine in [mount["name"] for mount in ray["volumeMounts"] if mount["mountPath"] == path]
    # The head's Service must not wait for what waits for the head.
    assert "readinessProbe" not in launcher
    assert launcher["image"] == ray["image"]
    (volume,) = [item for item in spec["volumes"] if item["name"] == "config"]
    assert volume["configMap"]["name"] == rendered.name


def test_the_router_and_all_workers_see_the_model(rendered: Rendered, config: ClusterConfig) -> None:
    """A model of the hub is downloaded into the cache before the pod's containers start."""
    path, model = config.model.path, rendered.given["model"]
    source = {"hf:": model["hub"]["source"] or {"emptyDir": {}}, "/": model["volume"]["source"]}
    volumes = [
        {"name": "hub" if kind == "hf:" else "model", **source[kind]} for kind in source if path.startswith(kind)
    ]
    for group, template in rendered.templates.items():
        found = [item for item in template["spec"]["volumes"] if item["name"] in ("hub", "model")]
        assert found == ([] if group == "headgroup" else volumes)
        values = rendered.given["head" if group == "headgroup" else group]
        fetch = preparing(template)
        assert fetch[: len(values["extraInitContainers"])] == values["extraInitContainers"]
        del fetch[: len(values["extraInitContainers"])]
        readers = [] if group == "headgroup" else [*fetch, ray_container(template)]
        assert len(fetch) == (path.startswith("hf:") and group != "headgroup")
        for item in fetch:
            options = ["--no-weights"] if group == "router" else []
            assert item["command"] == ["python", "-m", "kvrelay.models", path, *options]
        for item in readers:
            variables, mounts = environment(item), {mount["name"]: mount for mount in item["volumeMounts"]}
            assert ("HF_HOME" in variables) is path.startswith("hf:")
            if path.startswith("hf:"):
                assert variables["HF_HOME"]["value"] == mounts["hub"]["mountPath"]
                token = {"name": model["hub"]["tokenSecret"], "key": "token"}
                assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == token
            elif path.startswith("/"):
                assert path.startswith(mounts["model"]["mountPath"] + "/")
                assert mounts["model"]["readOnly"] is True


def test_every_container_of_ray_has_the_token_from_a_secret(rendered: Rendered) -> None:
    spec = rendered.cluster["spec"]
    named = {"secretName": name} if (name := rendered.given["auth"]["existingSecret"]) else {}
    assert spec["authOptions"] == {"mode": "token", **named}
    everyone = [item for template in rendered.templates.values() for item in ray_containers(template)]
    everyone += [spec["autoscalerOptions"]] if spec["enableInTreeAutoscaling"] else []
    for item in everyone:
        variables = environment(item)
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        # KubeRay names the Secret that it makes like the cluster.
        secret = {"name": name or rendered.name, "key": "auth_token"}
        assert variables["RAY_AUTH_TOKEN"] == {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": secret}}


def test_each_pod_has_the_secrets_of_its_own_parts_only(rendered: Rendered, config: ClusterConfig) -> None:
    security, router = rendered.given["security"], rendered.given["router"]
    join = security["joinTokenSecret"] or rendered.one("Secret")["metadata"]["name"]
    assert len(rendered.all("Secret")) == (not security["joinTokenSecret"])
    for group, template in rendered.templates.items():
        parts = PARTS.get(group, {"worker"})
        expected = {config.security.join_token_path.rpartition("/")[0]: {join}}
        if security["tls"]["enabled"]:
            expected[config.security.certificates] = {security["tls"]["secrets"][part] for part in parts}
        if group == "router":
            expected |= {f"{SECRETS}/public": {name} for name in [router["tlsSecret"]] if name}
            expected |= {f"{SECRETS}/api-keys": {name} for name in [router["apiKeysSecret"]] if name}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for item in ray_containers(template):
            found: dict[str, set[str]] = {}
            for mount in item["volumeMounts"]:
                volume = volumes[mount["name"]]
                if sources := [source["secret"] for source in volume.get("projected", {}).get("sources", [])]:
                    files = {file["path"] for source in sources for file in source["items"]}
                    assert files == {"ca.crt", *(f"{part}.{kind}" for part in parts for kind in ("crt", "key"))}
                    found[mount["mountPath"]] = {source["name"] for source in sources}
                if "secret" in volume:
                    found[mount["mountPath"]] = {volume["secret"]["secretName"]}
                assert mount.get("readOnly", False) or mount["mountPath"] not in found
            assert found == expected
    assert config.security.tls == ("mutual" if security["tls"]["enabled"] else "off")
    if router["tlsSecret"]:
        assert config.router.tls_certificate == f"{SECRETS}/public/tls.crt"
        assert config.router.tls_key == f"{SECRETS}/public/tls.key"
    if router["apiKeysSecret"]:
        assert config.router.api_keys == f"{SECRETS}/api-keys/api_keys"


def test_pods_have_their_resources_shared_memory_and_the_labels_that_kuberay_selects_by(rendered: Rendered) -> None:
    for group, template in rendered.templates.items():
        values = rendered.given["head" if group == "headgroup" else group]
        for option in ("nodeSelector", "tolerations", "affinity", "priorityClassName", "runtimeClassName"):
            assert template["spec"].get(option, type(values[option])()) == values[option]
        for item in template["spec"]["containers"]:
            assert item["resources"]["requests"] == item["resources"]["limits"]
            assert item["resources"]["limits"].keys() >= {"cpu", "memory"}
        (volume,) = [item for item in template["spec"]["volumes"] if item["name"] == "shared-mem"]
        assert volume["emptyDir"]["medium"] == "Memory"
        assert volume["emptyDir"]["sizeLimit"]
        labels = template["metadata"]["labels"]
        assert not labels.keys() & {"app.kubernetes.io/name", "app.kubernetes.io/created-by"}
        assert not [key for key in labels if key.startswith("ray.io/")]


def test_only_groups_that_hand_over_have_rdma(rendered: Rendered) -> None:
    rdma = rendered.given["rdma"]
    for group, template in rendered.templates.items():
        spec, item = template["spec"], ray_container(template)
        used = rdma["enabled"] and group in ("prefill", "decode")
        devices = {rdma["resource"]: str(rdma["count"])} if used and rdma["resource"] else {}
        limits = item["resources"]["limits"]
        assert {name: amount for name, amount in limits.items() if name.startswith("rdma/")} == devices
        added = {"add": ["IPC_LOCK"]} if used and rdma["ipcLock"] else {}
        assert item["securityContext"]["capabilities"] == {"drop": ["ALL"], **added}
        on_host = bool(used and rdma["hostNetwork"])
        assert spec.get("hostNetwork", False) is on_host
        assert not on_host or spec["dnsPolicy"] == "ClusterFirstWithHostNet"
        nccl = rendered.given["nccl"] if group in ("prefill", "decode") else {}
        variables = environment(item)
        assert {name: variables[name]["value"] for name in variables if name.startswith("NCCL_")} == nccl


def test_every_mount_has_its_volume_and_nothing_runs_as_root_or_can_become_it(rendered: Rendered) -> None:
    theirs = [item for values in ("router", "decode") for item in rendered.given[values]["extraInitContainers"]]
    for spec, item in containers(rendered):
        mounts = item.get("volumeMounts", [])
        assert {mount["name"] for mount in mounts} <= {volume["name"] for volume in spec.get("volumes", [])}
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        if item not in theirs:
            assert item["securityContext"]["allowPrivilegeEscalation"] is False
            assert item["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert not item["securityContext"].get("privileged", False)


def test_only_the_autoscaler_gets_an_api_token(rendered: Rendered) -> None:
    account = rendered.one("ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    for group, template in rendered.templates.items():
        spec = template["spec"]
        assert spec["serviceAccountName"] == account["metadata"]["name"]
        wanted = group == "headgroup" and rendered.cluster["spec"]["enableInTreeAutoscaling"]
        assert spec["automountServiceAccountToken"] is wanted


def test_policies_let_the_pods_talk_and_those_call_who_are_named(rendered: Rendered, config: ClusterConfig) -> None:
    name, given, everyone = rendered.name, rendered.given["networkPolicy"], set(rendered.templates)
    policies = {
        policy["metadata"]["name"].removeprefix(name): policy["spec"] for policy in rendered.all("NetworkPolicy")
    }
    wanted = {"-dashboard": given["dashboardFrom"], "-egress": given["defaultDeny"]}
    assert policies.keys() == {"", "-grpc", *(each for each, value in wanted.items() if value)}
    for each, policy in policies.items():
        assert policy["policyTypes"] == (["Egress"] if each == "-egress" else ["Ingress"])
    selected = {each: policy["podSelector"].get("matchLabels", {}) for each, policy in policies.items()}
    inside, *metrics = policies[""]["ingress"]
    peer, *nodes = inside["from"]
    assert "ports" not in inside
    assert rendered.selected(selected[""]) == rendered.selected(peer["podSelector"]["matchLabels"]) == everyone
    assert nodes == [{"ipBlock": {"cidr": cidr}} for cidr in given["nodeCidrs"]]
    ports = {8080, *filter(None, rendered.given["metrics"].values())}
    for rule in metrics:
        assert rule["from"] == given["metricsFrom"]
        assert {port["port"] for port in rule["ports"]} == ports
    assert len(metrics) == bool(given["metricsFrom"])
    (rule,) = policies["-grpc"]["ingress"]
    assert rendered.selected(selected["-grpc"]) == {"router"}
    assert rule["ports"] == tcp(config.router.grpc_port, config.router.http_port)
    *peers, test = rule.get("from", [None])
    assert peers == given["grpcFrom"]
    if peers:
        (pod,) = rendered.all("Pod")
        assert test["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    if "-dashboard" in policies:
        assert rendered.selected(selected["-dashboard"]) == {"headgroup"}
        assert policies["-dashboard"]["ingress"] == [{"from": given["dashboardFrom"], "ports": tcp(8265)}]
    if "-egress" in policies:
        egress = policies["-egress"]
        ports = {port["port"] for rule in egress["egress"] for port in rule.get("ports", [])}
        api = {443, 6443} if rendered.given["autoscaling"]["enabled"] else set()
        hub = {443} if config.model.path.startswith("hf:") else set()
        redis = rendered.given["gcsFaultTolerance"]["redisAddress"].rpartition(":")[2]
        assert ports == {53, *api, *hub, *([int(redis)] if redis else [])}
        assert egress["egress"][len(egress["egress"]) - len(given["egressTo"]) :] == given["egressTo"]
        (term,) = egress["podSelector"]["matchExpressions"]
        for labels in [
            *map(rendered.pod_labels, everyone),
            *(pod["metadata"]["labels"] for pod in rendered.all("Pod")),
        ]:
            assert labels[term["key"]] in term["values"]


def test_budgets_let_a_node_drain(rendered: Rendered) -> None:
    for budget in rendered.all("PodDisruptionBudget"):
        (group,) = rendered.selected(budget["spec"]["selector"]["matchLabels"])
        spec = rendered.groups.get(group, {"replicas": 1})
        pods = spec["replicas"] * spec.get("numOfHosts", 1)
        minimum = budget["spec"]["minAvailable"]
        assert isinstance(minimum, int)  # the only form that counts for pods of a custom resource
        assert "maxUnavailable" not in budget["spec"]
        # Single ones only with holdSinglePods.
        assert minimum == (1 if pods == 1 and group in ("headgroup", "router") else pods - 1) > 0


def test_prometheus_scrapes_every_pod_and_takes_no_series_twice(rendered: Rendered, config: ClusterConfig) -> None:
    own = {"router": config.metrics.router_port, "headgroup": config.metrics.supervisor_port}
    ports = {
        group: {port["name"]: port["containerPort"] for port in ray_container(template)["ports"]}
        for group, template in rendered.templates.items()
    }
    for group, found in ports.items():
        assert found["metrics"] == 8080
        assert found.get("own-metrics") == own.get(group, config.metrics.worker_port)
    for monitor in rendered.all("PodMonitor"):
        assert rendered.selected(monitor["spec"]["selector"]["matchLabels"]) == set(ports)
        rays, *others = monitor["spec"]["podMetricsEndpoints"]
        assert len(others) == all(rendered.given["metrics"].values())
        for endpoint in (rays, *others):
            assert endpoint["relabelings"] == rays["relabelings"]
            assert all(endpoint["port"] in found for found in ports.values())
        (rename,) = rays["metricRelabelings"]
        pattern = re.compile(rename["regex"])
        found_name = pattern.fullmatch("ray_kvrelay_router_requests_total")
        assert found_name is not None
        assert found_name.expand(r"\1") == "kvrelay_router_requests_total"
        assert pattern.fullmatch("ray_tasks") is None
        assert (rename.get("action") == "drop") is bool(others)


def test_what_actors_log_is_printed_in_every_pod(rendered: Rendered) -> None:
    for template in rendered.templates.values():
        item = container(template, "logs")
        assert item["command"] == ["python", "-m", "kvrelay.cluster.ray.follow", "/tmp/ray"]
        assert item["restartPolicy"] == "Always"  # so that it starts before the actors and ends after them
        assert item in template["spec"]["initContainers"]
        for each in [item, *template["spec"]["containers"]]:
            assert [mount["name"] for mount in each["volumeMounts"] if mount["mountPath"] == "/tmp/ray"] == ["ray-logs"]


def test_pods_drain_before_they_end_and_have_the_time_for_it(rendered: Rendered, config: ClusterConfig) -> None:
    for group, template in rendered.templates.items():
        item = ray_container(template)
        if group == "headgroup":
            assert "lifecycle" not in item
            continue
        *command, seconds = item["lifecycle"]["preStop"]["exec"]["command"]
        assert command == ["python", "-m", "kvrelay.cluster.ray.node_drain"]
        assert environment(item)["KVRELAY_DRAIN_DIR"]["value"]
        assert environment(item)["RAY_worker_niceness"]["value"] == "0", "Ray's default slows its actors down"
        assert config.drain_seconds < float(seconds) < template["spec"]["terminationGracePeriodSeconds"]


def test_the_test_pod_calls_the_service(rendered: Rendered) -> None:
    """It has a key, and knows the authority, where the routers ask for them."""
    pod, given = rendered.one("Pod"), rendered.given["helmTest"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (item,) = pod["spec"]["containers"]
    options = dict(zip(item["command"], item["command"][1:], strict=False))
    port = rendered.named("Service", rendered.name)["spec"]["ports"][0]["port"]
    assert options["--target"] == f"{given['tlsHost'] or rendered.name}:{port}"
    assert ("--ca" in options) is bool(given["tlsHost"])
    if given["tlsHost"]:
        assert options["--ca"].startswith(item["volumeMounts"][0]["mountPath"])
    key = {"name": given["apiKeySecret"], "key": "api_key"}
    assert [each["valueFrom"]["secretKeyRef"] for each in item.get("env", [])] == ([key] if key["name"] else [])
