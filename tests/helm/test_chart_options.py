"""The effect of single values of the chart."""

import re
import shutil
from pathlib import Path

import pytest
from chart_rendering import (
    CHART,
    EXAMPLES,
    Rendered,
    container,
    containers,
    custom_resources,
    environment,
    preparing,
    ray_containers,
)

pytestmark = pytest.mark.more
EXAMPLE = {path.stem: path for path in EXAMPLES}


@pytest.fixture
def pair(render) -> Rendered:
    """Two prefill and four decode workers with a GPU each, over RDMA."""
    return render(EXAMPLE["gpu-rdma"])


def worker(rendered: Rendered, group: str) -> dict:
    return container(rendered.templates[group], "ray-worker")


def test_the_pair_over_rdma(pair, tmp_path):
    config = pair.config(tmp_path)
    assert (config.prefill.replicas, config.decode.replicas, config.colocated.replicas) == (2, 4, 0)
    for group in ("prefill", "decode"):
        item = worker(pair, group)
        limits = item["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == limits["rdma/hca_shared_devices_a"] == "1"
        assert environment(item)["NCCL_IB_HCA"]["value"] == "mlx5"
        assert item["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert pair.templates[group]["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
        assert "hostNetwork" not in pair.templates[group]["spec"]
    for group in ("router", "headgroup"):
        item = pair.templates[group]["spec"]["containers"][0]
        assert item["resources"]["limits"].keys() == {"cpu", "memory"}
        assert "NCCL_IB_HCA" not in environment(item)
        assert "add" not in item["securityContext"]["capabilities"]


def test_engine_options_of_a_role_win_over_everyones(pair, tmp_path):
    workers = pair.config(tmp_path).worker_configs()
    prefills = [worker.engine for worker in workers if worker.role == "prefill"]
    decodes = [worker.engine for worker in workers if worker.role == "decode"]
    assert (len(prefills), len(decodes)) == (2, 4)
    assert {engine.max_batch_tokens for engine in prefills} == {8192}
    assert {engine.max_batch_tokens for engine in decodes} == {512}
    assert {engine.kv_memory_bytes for engine in prefills} == {16 * 2**30}
    assert {engine.kv_memory_bytes for engine in decodes} == {40 * 2**30}
    assert all(engine.block_size == 64 and engine.threads == 8 for engine in (*prefills, *decodes))


def test_a_pod_of_several_gpus_has_a_worker_for_each(render, tmp_path):
    rendered = render(prefill={"replicas": 2, "gpus": 4, "resources": {"cpu": "16"}}, decode={"gpus": 8})
    config = rendered.config(tmp_path)
    assert (config.prefill.replicas, config.prefill.gpus, config.prefill.cpus) == (8, 1, 4)
    assert (config.decode.replicas, config.decode.gpus) == (8, 1)
    assert custom_resources(rendered.groups["prefill"]) == {"kvrelay_worker": 4}
    assert worker(rendered, "prefill")["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {item.engine.threads for item in config.worker_configs() if item.role == "prefill"} == {4}


def test_several_workers_share_a_pods_gpu_or_cpus(render, tmp_path):
    config = render(prefill={"gpus": 1, "workersPerPod": 3}, decode={"workersPerPod": 2}).config(tmp_path)
    assert (config.prefill.replicas, config.prefill.gpus) == (3, 0.3333)
    assert (config.decode.replicas, config.decode.gpus, config.decode.cpus) == (2, 0, 1)


def test_workers_are_added_within_the_autoscalers_bounds(render, tmp_path):
    groups = {"prefill": {"replicas": 2, "gpus": 2, "minReplicas": 1, "maxReplicas": 4}, "decode": {"maxReplicas": 3}}
    scaling = {"enabled": True, "ttft_target_seconds": 1.5}
    config = render(autoscaling={"enabled": True}, scaling=scaling, **groups).config(tmp_path).scaling
    assert (config.enabled, config.ttft_target_seconds) == (True, 1.5)
    assert (config.min_workers, config.max_workers) == (2 + 1, 8 + 3)
    own = render(autoscaling={"enabled": True}, scaling={**scaling, "max_workers": 5}, **groups)
    assert own.config(tmp_path).scaling.max_workers == 5
    assert render(scaling=scaling).config(tmp_path).scaling.max_workers == 0, "without the autoscaler only roles change"


def test_ports_of_metrics_reach_the_configuration_and_prometheus(render, tmp_path):
    ports = {"routerPort": 9500, "workerPort": 9400, "supervisorPort": 9300}
    monitored = {"podMonitor": {"enabled": True}, "networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}]}}
    rendered = render(metrics=ports, **monitored)
    metrics = rendered.config(tmp_path).metrics
    assert (metrics.router_port, metrics.worker_port, metrics.supervisor_port) == (9500, 9400, 9300)
    for group, port in {"router": 9500, "prefill": 9400, "decode": 9400, "headgroup": 9300}.items():
        (named,) = [item for item in ray_ports(rendered, group) if item["name"] == "own-metrics"]
        assert named["containerPort"] == port
    rays, own = rendered.one("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert own["relabelings"] == rays["relabelings"]
    assert rays["metricRelabelings"][0]["action"] == "drop", "no series twice"
    assert own["port"] == "own-metrics"
    open_ports = {
        port["port"]
        for policy in rendered.all("NetworkPolicy")
        for rule in policy["spec"].get("ingress", [])
        for port in rule.get("ports", [])
    }
    assert {8080, 9300, 9400, 9500} <= open_ports
    plain = render(**monitored)
    assert len(plain.one("PodMonitor")["spec"]["podMetricsEndpoints"]) == 1
    assert all(item["name"] != "own-metrics" for group in plain.templates for item in ray_ports(plain, group))


def ray_ports(rendered, group):
    return rendered.templates[group]["spec"]["containers"][0]["ports"]


@pytest.mark.parametrize("path", ["hf:org/name@v1", "org/name@v1"])
def test_a_model_of_the_hub_is_downloaded_once_into_the_cache(render, path):
    claim = {"persistentVolumeClaim": {"claimName": "cache"}}
    rendered = render(model={"path": path, "hub": {"tokenSecret": "hub", "source": claim}})
    for group, template in rendered.templates.items():
        spec = template["spec"]
        if group == "headgroup":
            assert preparing(template) == []
            continue
        (fetch,) = preparing(template)
        wanted = ["python", "-m", "kvrelay.models", path]
        assert fetch["command"] == wanted + (["--no-weights"] if group == "router" else [])
        for item in (fetch, spec["containers"][0]):
            variables = environment(item)
            assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
            assert variables["HF_HOME"]["value"] in [mount["mountPath"] for mount in item["volumeMounts"]]
        assert {"name": "hub", **claim} in spec["volumes"]
    later = render(model={"path": "hf:org/name", "hub": {"prefetch": False}})
    assert preparing(later.templates["decode"]) == []
    assert {"name": "hub", "emptyDir": {}} in later.templates["decode"]["spec"]["volumes"]


def test_rays_state_can_be_kept_in_redis(render):
    rendered = render(gcsFaultTolerance={"enabled": True, "redisAddress": "redis:6380", "redisPasswordSecret": "redis"})
    assert rendered.cluster["spec"]["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis:6380",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
    }
    assert "gcsFaultToleranceOptions" not in render().cluster["spec"]


def test_outgoing_traffic_can_be_denied_but_for_what_is_needed(render):
    mine = {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}
    rendered = render(
        networkPolicy={"defaultDeny": True, "egressTo": [mine]},
        gcsFaultTolerance={"enabled": True, "redisAddress": "redis:6380"},
        model={"path": "hf:org/name"},
    )
    spec = rendered.named("NetworkPolicy", f"{rendered.name}-egress")["spec"]
    ports = {port["port"] for rule in spec["egress"] for port in rule.get("ports", [])}
    assert ports == {53, 443, 6380}
    assert mine in spec["egress"]
    (term,) = spec["podSelector"]["matchExpressions"]
    for labels in [*map(rendered.pod_labels, rendered.templates), rendered.one("Pod")["metadata"]["labels"]]:
        assert labels[term["key"]] in term["values"]


def test_the_test_pod_has_a_key_and_knows_the_authority(render):
    router = {"tlsSecret": "public", "apiKeysSecret": "keys"}
    assert not render(router=router).all("Pod")
    pod = render(router=router, helmTest={"apiKeySecret": "key", "tlsHost": "llm.example.com"}).one("Pod")
    item = pod["spec"]["containers"][0]
    assert environment(item)["KVRELAY_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "key", "key": "api_key"}
    assert item["command"][item["command"].index("--target") + 1] == "llm.example.com:50051"
    assert item["command"][item["command"].index("--ca") + 1].startswith(item["volumeMounts"][0]["mountPath"])


def test_a_pod_monitor_finds_every_pod(pair):
    spec = pair.one("PodMonitor")["spec"]
    assert pair.selected(spec["selector"]["matchLabels"]) == set(pair.templates)
    (endpoint,) = spec["podMetricsEndpoints"]
    (rename,) = endpoint["metricRelabelings"]
    pattern = re.compile(rename["regex"])
    assert pattern.fullmatch("ray_kvrelay_router_requests_total").expand(r"\1") == "kvrelay_router_requests_total"
    assert pattern.fullmatch("ray_tasks") is None
    for template in pair.templates.values():
        ports = template["spec"]["containers"][0]["ports"]
        assert [port["containerPort"] for port in ports if port["name"] == endpoint["port"]] == [8080]


def test_colocated_workers_alone(render, tmp_path):
    rendered = render(EXAMPLE["colocated"])
    config = rendered.config(tmp_path)
    assert set(rendered.groups) == {"router", "colocated"}
    assert [item.role for item in config.worker_configs()] == ["colocated", "colocated"]


def test_host_network_is_for_those_who_hand_over(render):
    rendered = render(EXAMPLE["host-network"])
    for group, template in rendered.templates.items():
        spec = template["spec"]
        assert spec.get("hostNetwork", False) is (group in ("prefill", "decode"))
        if "hostNetwork" in spec:
            assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
            assert not [name for name in spec["containers"][0]["resources"]["limits"] if name.startswith("rdma/")]
    peers = rendered.named("NetworkPolicy", "relay")["spec"]["ingress"][0]["from"]
    assert {"ipBlock": {"cidr": "10.0.0.0/16"}} in peers


@pytest.mark.parametrize("port", [1024, 50052, 65535])
def test_two_ports_for_the_routers_their_probe_their_service_and_their_policy(render, tmp_path, port):
    rendered = render(router={"grpcPort": port, "httpPort": port - 1, "replicas": 3})
    config = rendered.config(tmp_path)
    assert [router.grpc_port for router in config.router_configs()] == [port] * 3
    group = rendered.groups["router"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (3, 3, 3)
    assert [router.http_port for router in config.router_configs()] == [port - 1] * 3
    assert worker(rendered, "router")["readinessProbe"]["httpGet"]["port"] == port - 1
    assert [each["port"] for each in rendered.one("Service")["spec"]["ports"]] == [port, port - 1]
    policy = rendered.named("NetworkPolicy", f"{rendered.name}-grpc")
    assert [each["port"] for each in policy["spec"]["ingress"][0]["ports"]] == [port, port - 1]


@pytest.mark.parametrize("cpus", [{"500m": 1, "1500m": 1, "2": 2}, {"2.9": 2, 4: 4, "16000m": 16}, {0.5: 1}])
def test_whole_cpus_are_rays_and_the_forward_passs(render, tmp_path, cpus):
    roles = dict(zip(("prefill", "decode", "colocated"), cpus.items(), strict=False))
    rendered = render(**{role: {"replicas": 1, "resources": {"cpu": cpu}} for role, (cpu, _) in roles.items()})
    configs = {config.role: config for config in rendered.config(tmp_path).worker_configs()}
    for role, (cpu, whole) in roles.items():
        assert rendered.groups[role]["rayStartParams"]["num-cpus"] == str(whole)
        assert worker(rendered, role)["resources"]["limits"]["cpu"] == str(cpu)
        assert configs[role].engine.threads == whole
    (prefill, decode) = render(prefill={"threads": 1}).config(tmp_path).worker_configs()
    assert (prefill.engine.threads, decode.engine.threads) == (1, 2), "they can be chosen"


def test_every_section_of_the_configuration_can_be_given(render, tmp_path):
    config = render(
        model={"path": "pico-draft", "dtype": "float32"},
        engine={"block_size": 32, "prefix_cache": False},
        transfer={"checksum": False, "lease_seconds": 2.5},
        heartbeat={"suspect_seconds": 2, "dead_seconds": 5, "step_dead_seconds": 60},
        scaling={"enabled": True, "ttft_target_seconds": 0.5},
        drainSeconds=7.5,
        router={"options": {"max_requests": 7}},
        ray={"namespace": "blue"},
    ).config(tmp_path)
    assert (config.model.path, config.model.dtype) == ("pico-draft", "float32")
    assert (config.engine.block_size, config.engine.prefix_cache) == (32, False)
    assert (config.transfer.checksum, config.transfer.lease_seconds) == (False, 2.5)
    assert (config.heartbeat.suspect_seconds, config.heartbeat.dead_seconds) == (2, 5)
    assert (config.heartbeat.step_dead_seconds, config.drain_seconds) == (60, 7.5)
    assert (config.scaling.enabled, config.scaling.ttft_target_seconds) == (True, 0.5)
    assert (config.router.max_requests, config.ray.namespace) == (7, "blue")
    for path in ("1e3", "yes", "# a: 'b' \""):  # which look like something else
        assert render(model={"path": path}).config(tmp_path).model.path == path


@pytest.mark.parametrize(
    "source",
    [
        {"persistentVolumeClaim": {"claimName": "models"}},
        {"hostPath": {"path": "/mnt/models"}},
        {"emptyDir": {"sizeLimit": "40Gi"}},
    ],
)
def test_the_model_volume_is_where_the_model_is_read(render, source):
    fill = {"name": "fill", "image": "busybox", "volumeMounts": [{"name": "model", "mountPath": "/models"}]}
    rendered = render(
        model={"path": "/models/a", "volume": {"source": source}},
        decode={"extraInitContainers": [fill]},
    )
    for group in ("router", "prefill", "decode"):
        spec = rendered.templates[group]["spec"]
        (volume,) = [item for item in spec["volumes"] if item["name"] == "model"]
        assert {**volume, "name": "model"} == {"name": "model", **source}
        assert {"name": "model", "mountPath": "/models", "readOnly": True} in spec["containers"][0]["volumeMounts"]
    assert preparing(rendered.templates["decode"]) == [fill]
    assert "model" not in [item["name"] for item in rendered.head["spec"]["volumes"]]


def test_images(render):
    rendered = render(
        image={"repository": "registry.example.com/kvrelay", "tag": "1", "pullPolicy": "Always"},
        decode={"image": {"digest": "sha256:" + "a" * 64}},
    )
    assert worker(rendered, "prefill")["image"] == "registry.example.com/kvrelay:1"
    assert worker(rendered, "decode")["image"] == "registry.example.com/kvrelay@sha256:" + "a" * 64
    assert {item["imagePullPolicy"] for _, item in containers(rendered)} == {"Always"}


def test_an_existing_secret_is_used_by_everyone_and_authentication_can_be_switched_off(render):
    rendered = render(auth={"existingSecret": "mine"})
    assert rendered.cluster["spec"]["authOptions"] == {"mode": "token", "secretName": "mine"}
    for template in rendered.templates.values():
        for item in ray_containers(template):
            assert environment(item)["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "mine"
    rendered = render(auth={"enabled": False})
    assert "authOptions" not in rendered.cluster["spec"]
    for template in rendered.templates.values():
        for item in template["spec"]["containers"]:
            assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & environment(item).keys()
            assert item.get("env") != []


def test_autoscaling_bounds(render):
    rendered = render(autoscaling={"enabled": True}, decode={"replicas": 2, "minReplicas": 0, "maxReplicas": 5})
    group = rendered.groups["decode"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (0, 2, 5)
    assert rendered.cluster["spec"]["enableInTreeAutoscaling"] is True
    fixed = render(decode={"replicas": 2, "minReplicas": 0, "maxReplicas": 5}).groups["decode"]
    assert (fixed["minReplicas"], fixed["maxReplicas"]) == (2, 2)


def test_a_new_configuration_is_a_new_pod_template_and_nothing_else_is(render):
    def checksum(**values: object) -> str:
        return render(**values).head["metadata"]["annotations"]["checksum/config"]

    assert checksum() == checksum(decode={"podAnnotations": {"a": "b"}})
    assert len({checksum(), checksum(engine={"block_size": 32}), checksum(decode={"replicas": 2})}) == 3


def test_policies_name_who_may_come_in(render):
    peer = {"namespaceSelector": {"matchLabels": {"team": "a"}}}
    rendered = render(networkPolicy={"grpcFrom": [peer], "metricsFrom": [peer], "dashboardFrom": [peer]})
    name = rendered.name
    grpc = rendered.named("NetworkPolicy", f"{name}-grpc")["spec"]["ingress"][0]
    assert peer in grpc["from"]
    assert {"from": [peer], "ports": [{"port": 8080, "protocol": "TCP"}]} in rendered.named("NetworkPolicy", name)[
        "spec"
    ]["ingress"]
    dashboard = rendered.named("NetworkPolicy", f"{name}-dashboard")["spec"]
    assert rendered.selected(dashboard["podSelector"]["matchLabels"]) == {"headgroup"}
    assert dashboard["ingress"] == [{"from": [peer], "ports": [{"port": 8265, "protocol": "TCP"}]}]


def test_what_is_off_is_not_there(render):
    rendered = render(
        networkPolicy={"enabled": False},
        podDisruptionBudget={"enabled": False},
        serviceAccount={"create": False},
        decode={"replicas": 3},
    )
    assert {item["kind"] for item in rendered.objects} == {"ConfigMap", "RayCluster", "Secret", "Service", "Pod"}
    assert rendered.head["spec"]["serviceAccountName"] == "default"


def test_names_fit_what_kuberay_derives_from_them(render):
    rendered = render(release="a" * 53)
    assert len(rendered.name) <= 40
    assert len(f"{rendered.name}-colocated") <= 50  # KubeRay cuts a pod's name there
    assert len(f"{rendered.name}-head-svc") <= 50


def test_the_notes_say_how_to_reach_it(helm, tmp_path):
    """helm prints notes only when it installs, so here they are rendered as a template."""
    chart = Path(shutil.copytree(CHART, tmp_path / "chart"))
    text = (CHART / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "notes.yaml").write_text(
        '{{ define "notes" }}' + text + '{{ end }}\nnotes: {{ include "notes" . | quote }}\n'
    )
    for example in (None, *EXAMPLES):
        options: list[str | Path] = [] if example is None else ["--values", example]
        notes = helm("template", "demo", chart, "--show-only", "templates/notes.yaml", *options).stdout
        name = "relay" if example is EXAMPLE["host-network"] else "demo-kvrelay"
        assert f"ray.io/cluster={name},ray.io/group=router" in notes
        assert f"service/{name}-head-svc 8265" in notes
        assert ("network: their ports are open" in notes) is (example is EXAMPLE["host-network"])
