"""Properties of every rendering of the chart: the defaults and each example."""

import re
from pathlib import Path

import pytest
from chart_rendering import (
    CHART,
    SHAPES,
    Rendered,
    container,
    containers,
    custom_resources,
    environment,
    ray_containers,
)

HEADER = {"apiVersion", "kind", "metadata"}


@pytest.fixture(params=SHAPES)
def values(request: pytest.FixtureRequest) -> Path | None:
    return request.param


@pytest.fixture
def rendered(render, values) -> Rendered:
    return render(values)


def test_lint_finds_nothing(helm, values):
    helm("lint", "--strict", CHART, *(() if values is None else ("--values", values)))


def test_every_object_is_named_once_and_labelled(rendered):
    seen = set()
    for item in rendered.objects:
        assert item.keys() >= HEADER
        metadata = item["metadata"]
        key = (item["kind"], metadata["name"])
        assert key not in seen
        seen.add(key)
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", metadata["name"])
        assert metadata["labels"]["app.kubernetes.io/instance"] == "demo"
        assert all(isinstance(value, str) for value in metadata["labels"].values())


def resource(group: str) -> str:
    """Workers of every role take the same resource, so that they can change their roles."""
    return "kvrelay_router" if group == "router" else "kvrelay_worker"


def test_every_parameter_of_ray_is_text_and_the_head_takes_no_work(rendered):
    spec = rendered.cluster["spec"]
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    parameters = spec["headGroupSpec"]["rayStartParams"]
    assert parameters["num-cpus"] == parameters["num-gpus"] == "0"
    assert "resources" not in parameters


def test_groups_agree_with_the_configuration(rendered, tmp_path):
    config = rendered.config(tmp_path)
    roles = {role: getattr(config, role).replicas for role in ("prefill", "decode", "colocated")}
    expected = {"router": config.router.replicas, **{role: replicas for role, replicas in roles.items() if replicas}}
    actors = {
        name: group["replicas"] * custom_resources(group)[resource(name)] for name, group in rendered.groups.items()
    }
    assert actors == expected
    for group in rendered.groups.values():
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert config.ray.address == "auto"


def test_every_actor_fits_a_pod_of_its_group_and_routers_no_other(rendered, tmp_path):
    config = rendered.config(tmp_path)
    for name, group in rendered.groups.items():
        needs = config.bundle(None if name == "router" else name)
        parameters = group["rayStartParams"]
        offered = {
            "CPU": float(parameters["num-cpus"]),
            "GPU": float(parameters["num-gpus"]),
            **custom_resources(group),
        }
        assert needs[resource(name)] == 1
        actors = offered[resource(name)]  # so no more of them share a pod
        assert all(amount * actors <= offered[resource] for resource, amount in needs.items())
        assert group["labels"] == {config.ray.role_label: name}, "where its workers go first"
        for other, elsewhere in rendered.groups.items():
            if "router" in (name, other) and other != name:
                assert resource(name) not in custom_resources(elsewhere)


def test_gpus_are_the_same_for_kubernetes_ray_and_kvrelay(rendered, tmp_path):
    config = rendered.config(tmp_path)
    for name, group in rendered.groups.items():
        limits = container(group["template"], "ray-worker")["resources"]["limits"]
        workers = custom_resources(group)[resource(name)]
        gpus = 0 if name == "router" else config.role(name).gpus * workers
        assert int(limits.get("nvidia.com/gpu", "0")) == gpus == int(group["rayStartParams"]["num-gpus"])


def test_the_service_reaches_the_router_and_nothing_else(rendered, tmp_path):
    config = rendered.config(tmp_path)
    service = rendered.named("Service", rendered.name)["spec"]
    assert rendered.selected(service["selector"]) == {"router"}
    targets = {item["name"]: item for item in container(rendered.templates["router"], "ray-worker")["ports"]}
    for port, known in zip(service["ports"], (config.router.grpc_port, config.router.http_port), strict=True):
        assert port["port"] == targets[port["targetPort"]]["containerPort"] == known
    assert "publishNotReadyAddresses" not in service


def test_probes_need_no_program_in_the_image_and_the_routers_asks_its_health_service(rendered, tmp_path):
    router = rendered.config(tmp_path).router
    assert router.host != "127.0.0.1"
    health = {"path": "/api/healthz", "port": 52365}
    for group, template in rendered.templates.items():
        ray = template["spec"]["containers"][0]  # KubeRay takes the first one for Ray's
        assert ray["name"] == ("ray-head" if group == "headgroup" else "ray-worker")
        assert ray["livenessProbe"]["httpGet"] == health
        ready = {"path": "/ready", "port": router.http_port, "scheme": "HTTP"} if group == "router" else health
        assert ray["readinessProbe"]["httpGet"] == ready


def test_the_launcher_is_a_driver_beside_the_head(rendered):
    spec = rendered.head["spec"]
    launcher = container(rendered.head, "launcher")
    ray = container(rendered.head, "ray-head")
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


def test_the_router_and_all_workers_see_the_model(rendered, tmp_path):
    path = rendered.config(tmp_path).model.path
    if not path.startswith("/"):
        for group in rendered.groups.values():
            variables = environment(container(group["template"], "ray-worker"))
            assert ("HF_HOME" in variables) is path.startswith("hf:")
        return
    for group in rendered.groups.values():
        item = container(group["template"], "ray-worker")
        (mount,) = [mount for mount in item["volumeMounts"] if mount["name"] == "model"]
        assert path.startswith(mount["mountPath"] + "/")
        assert mount["readOnly"] is True


def test_every_container_of_ray_has_the_token_from_a_secret(rendered):
    spec = rendered.cluster["spec"]
    assert spec["authOptions"]["mode"] == "token"
    # KubeRay names the Secret that it makes like the cluster.
    secret = spec["authOptions"].get("secretName", rendered.name)
    everyone = [item for template in rendered.templates.values() for item in ray_containers(template)]
    if spec["enableInTreeAutoscaling"]:
        everyone.append(spec["autoscalerOptions"])
    for item in everyone:
        variables = environment(item)
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": secret, "key": "auth_token"}
        assert "value" not in variables["RAY_AUTH_TOKEN"]


def test_pods_have_their_resources_shared_memory_and_the_labels_that_kuberay_selects_by(rendered):
    for template in rendered.templates.values():
        for item in template["spec"]["containers"]:
            assert item["resources"]["requests"] == item["resources"]["limits"]
            assert item["resources"]["limits"].keys() >= {"cpu", "memory"}
        (volume,) = [item for item in template["spec"]["volumes"] if item["name"] == "shared-mem"]
        assert volume["emptyDir"]["medium"] == "Memory"
        assert volume["emptyDir"]["sizeLimit"]
        labels = template["metadata"]["labels"]
        assert not labels.keys() & {"app.kubernetes.io/name", "app.kubernetes.io/created-by"}
        assert not [key for key in labels if key.startswith("ray.io/")]


def test_every_mount_has_its_volume_and_nothing_runs_as_root_or_can_become_it(rendered):
    for spec, item in containers(rendered):
        mounts = item.get("volumeMounts", [])
        assert {mount["name"] for mount in mounts} <= {volume["name"] for volume in spec.get("volumes", [])}
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert item["securityContext"]["allowPrivilegeEscalation"] is False
        assert item["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert not item["securityContext"].get("privileged", False)


def test_only_the_autoscaler_gets_an_api_token(rendered):
    account = rendered.one("ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    for group, template in rendered.templates.items():
        spec = template["spec"]
        assert spec["serviceAccountName"] == account["metadata"]["name"]
        wanted = group == "headgroup" and rendered.cluster["spec"]["enableInTreeAutoscaling"]
        assert spec["automountServiceAccountToken"] is wanted


def test_policies_let_the_pods_talk_and_clients_call(rendered, tmp_path):
    inside = rendered.named("NetworkPolicy", rendered.name)["spec"]
    assert rendered.selected(inside["podSelector"]["matchLabels"]) == set(rendered.templates)
    first = inside["ingress"][0]
    assert "ports" not in first
    assert rendered.selected(first["from"][0]["podSelector"]["matchLabels"]) == set(rendered.templates)
    grpc = rendered.named("NetworkPolicy", f"{rendered.name}-grpc")["spec"]
    assert rendered.selected(grpc["podSelector"]["matchLabels"]) == {"router"}
    router = rendered.config(tmp_path).router
    ports = [{"port": port, "protocol": "TCP"} for port in (router.grpc_port, router.http_port)]
    assert grpc["ingress"][0]["ports"] == ports
    for policy in rendered.all("NetworkPolicy"):
        egress = policy["metadata"]["name"].endswith("-egress")
        assert policy["spec"]["policyTypes"] == (["Egress"] if egress else ["Ingress"])


def test_budgets_let_a_node_drain(rendered):
    for budget in rendered.all("PodDisruptionBudget"):
        (group,) = rendered.selected(budget["spec"]["selector"]["matchLabels"])
        replicas = 1 if group == "headgroup" else rendered.groups[group]["replicas"]
        minimum = budget["spec"]["minAvailable"]
        assert isinstance(minimum, int)  # the only form that counts for pods of a custom resource
        assert "maxUnavailable" not in budget["spec"]
        # Single ones only with holdSinglePods.
        assert minimum == (1 if replicas == 1 and group in ("headgroup", "router") else replicas - 1) > 0


def test_what_actors_log_is_printed_in_every_pod(rendered):
    for template in rendered.templates.values():
        item = container(template, "logs")
        assert item["command"] == ["python", "-m", "kvrelay.cluster.ray.follow", "/tmp/ray"]
        assert item["restartPolicy"] == "Always"  # so that it starts before the actors and ends after them
        assert item in template["spec"]["initContainers"]
        for each in [item, *template["spec"]["containers"]]:
            assert [mount["name"] for mount in each["volumeMounts"] if mount["mountPath"] == "/tmp/ray"] == ["ray-logs"]


def test_an_older_kubernetes_lets_the_logs_container_outlive_the_drain_and_it_can_be_left_out(render):
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


def test_pods_drain_before_they_end_and_have_the_time_for_it(rendered, tmp_path):
    drain = rendered.config(tmp_path).drain_seconds
    for group, template in rendered.templates.items():
        item = template["spec"]["containers"][0]
        if group == "headgroup":
            assert "lifecycle" not in item
            continue
        *command, seconds = item["lifecycle"]["preStop"]["exec"]["command"]
        assert command == ["python", "-m", "kvrelay.cluster.ray.node_drain"]
        assert environment(item)["KVRELAY_DRAIN_DIR"]["value"]
        assert environment(item)["RAY_worker_niceness"]["value"] == "0", "Ray's default slows its actors down"
        assert drain < float(seconds) < template["spec"]["terminationGracePeriodSeconds"]


def test_the_test_pod_calls_the_service(rendered):
    pod = rendered.one("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    command = pod["spec"]["containers"][0]["command"]
    port = rendered.named("Service", rendered.name)["spec"]["ports"][0]["port"]
    assert command[command.index("--target") + 1] == f"{rendered.name}:{port}"
    # Where the policy names who may call, it is among them.
    (rule,) = rendered.named("NetworkPolicy", f"{rendered.name}-grpc")["spec"]["ingress"]
    peers = [peer.get("podSelector", {}).get("matchLabels") for peer in rule.get("from", [])]
    assert not peers or any(labels and labels.items() <= pod["metadata"]["labels"].items() for labels in peers)
