"""The values that the chart refuses, with messages that name them; its schema has exactly kvrelay's options."""

import json
from typing import Any

import pytest
import yaml
from chart_rendering import CHART

from kvrelay.cluster.config.options import schema

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


OUT_OF_RANGE = [
    {
        "prefill.replicas": -1,
        "decode.replicas": 1.5,
        "colocated.replicas": 1025,
        "decode.gpus": -1,
        "router.replicas": 0,
        "router.grpcPort": 0,
        "decode.threads": 1025,
        "router.httpPort": 0,
        "model.path": "",
        "model.dtype": "int8",
        "model.volume.mountPath": "models",
        "model.volume.source.hostPath.path": "relative",
        "engine.block_size": 24,
        "decode.engine.kv_memory_bytes": "8 gigabytes, please",
        "prefill.workersPerPod": -1,
        "gcsFaultTolerance.redisAddress": "redis",
        "transfer.transport": "carrier-pigeon",
        "image.pullPolicy": "Sometimes",
        "image.digest": "sha256:12",
        "prefill.resources.memory": "lots",
        "prefill.resources.cpu": "0",
        "ray.version": "2.52.0",
        "ray.upgradeStrategy": "Rolling",
        "rdma.count": 0,
        "service.type": "ExternalName",
        "service.nodePort": 80,
        "networkPolicy.nodeCidrs.0": "10.0.0.0",
        "drainSeconds": -1,
        "terminationGracePeriodSeconds": -1,
        "fullnameOverride": "x" * 41,
        "transfer.gpu_buffer_bytes": 1,
        "router.options.classes.interactive.ttft_target_seconds": 0,
    },
    {
        "decode.replicas": "two",
        "router.replicas": 65,
        "router.grpcPort": 65536,
    },
    {
        "router.grpcPort": "50051",
    },
]
"""Values that are refused, by key: helm tells all mistakes of a set at once."""
UNKNOWN_KEYS = (
    "replicas",
    "prefill.replica",
    "router.options.grpc_port",
    "decode.engine.block_sizes",
    "router.options.classes.chat.prio",
)


def values_of(batch: dict[str, Any]) -> dict[str, Any]:
    """{"a": {"b": value}} of {"a.b": value}; a last key 0 makes a list."""
    values: dict[str, Any] = {}
    for path, value in batch.items():
        *parents, last = path.removesuffix(".0").split(".")
        node = values
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = [value] if path.endswith(".0") else value
    return values


def test_a_value_out_of_range_is_named(refusal):
    for batch in OUT_OF_RANGE:
        said = refusal(**values_of(batch))
        assert [path for path in batch if f"- {path}: " not in said] == []


def test_an_unknown_key_is_named(refusal):
    said = refusal(**values_of(dict.fromkeys(UNKNOWN_KEYS, 1)))
    for path in UNKNOWN_KEYS:
        section, _, key = path.rpartition(".")
        assert f"- {section or '(root)'}: Additional property {key} is not allowed" in said


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"prefill": {"replicas": 0}}, "prefill.replicas is 0"),
        ({"decode": {"replicas": 0}}, "decode.replicas is 0"),
        ({"router": {"grpcPort": 8080}}, "router.grpcPort is 8080"),
        ({"router": {"httpPort": 8080}}, "router.httpPort is 8080"),
        ({"router": {"httpPort": 50051}}, "router.httpPort is 50051; allowed: another one than router.grpcPort"),
        ({"router": {"grpcPort": 10002}}, "router.grpcPort is 10002"),
        ({"router": {"grpcPort": 19999}}, "router.grpcPort is 19999"),
        ({"router": {"grpcPort": 52365}}, "router.grpcPort is 52365"),
        ({"model": {"path": "/models/a"}}, "model.volume.source is empty"),
        ({"model": {"path": "/models"}}, "model.volume.source is empty"),
        ({"rdma": {"enabled": True, "hostNetwork": True}}, "networkPolicy.nodeCidrs is empty"),
        ({"autoscaling": {"enabled": True}, "decode": {"maxReplicas": 0}}, "decode.maxReplicas is 0"),
        ({"autoscaling": {"enabled": True}, "decode": {"minReplicas": 2}}, "decode.minReplicas is 2"),
        ({"security": {"tls": {"enabled": True}}}, "security.tls.secrets.operator is empty"),
        ({"transfer": {"encrypt": "full"}}, "transfer.encrypt is full"),
        (
            {"decode": {"gpus": 4, "workersPerPod": 2}},
            "decode.workersPerPod is 2; allowed: 0, or at least decode.gpus (4)",
        ),
        (
            {"engine": {"tensor_parallel": 4, "pipeline_parallel": 4}, "decode": {"gpus": 8}},
            "decode.gpus is 8; allowed: 0, or a multiple of 16: a worker's ranks in a pod",
        ),
        (
            {"engine": {"tensor_parallel": 4}, "decode": {"engine": {"hosts": 3}}},
            "decode.engine.hosts is 3; allowed: a divisor of 4",
        ),
        (
            {"decode": {"engine": {"tensor_parallel": 2, "hosts": 2}}, "transfer": {"encrypt": "integrity"}},
            "decode.engine.hosts is 2; allowed: 1 with security.tls or transfer.encrypt",
        ),
        (
            {"decode": {"gpus": 8, "engine": {"tensor_parallel": 8, "hosts": 2}}},
            "decode.workersPerPod is 2 (8 GPUs for 4 ranks in a pod); allowed: 1",
        ),
        (
            {"prefill": {"gpus": 8, "workersPerPod": 4, "engine": {"tensor_parallel": 4}}},
            "prefill.workersPerPod is 4; allowed: 0, or 2: each of a worker's 4 ranks",
        ),
        ({"drainSeconds": 50}, "terminationGracePeriodSeconds is 60; allowed: at least drainSeconds (50) and 15 more"),
        ({"gcsFaultTolerance": {"enabled": True}}, "gcsFaultTolerance.redisAddress is empty"),
        ({"gateway": {"enabled": True}}, "gateway.parentRefs is empty"),
        ({"ingress": {"enabled": True}}, "ingress.hosts is empty"),
        ({"fullnameOverride": "Relay"}, '"Relay"'),
        ({"fullnameOverride": "1relay"}, '"1relay"'),
    ],
)
def test_values_that_do_not_go_together_are_named(refusal, values, named):
    assert named in refusal(**values)


def test_a_release_whose_name_kuberay_would_refuse_is_refused(refusal):
    assert '"9-kvrelay"' in refusal(release="9")


def test_an_old_kubernetes_is_refused(helm):
    done = helm("template", "demo", CHART, "--kube-version", "1.26.15", check=False)
    assert done.returncode != 0
    assert "1.27.0" in done.stderr
    helm("template", "demo", CHART, "--kube-version", "1.27.0")
    helm("template", "demo", CHART, "--kube-version", "v1.29.4-gke.1043004")


@pytest.mark.parametrize("key", ["ray.io/group", "app.kubernetes.io/name"])
def test_labels_that_kuberay_selects_by_cannot_be_set(refusal, key):
    assert "podLabels" in refusal(decode={"podLabels": {key: "mine"}})


STRICTER = {
    *("engine.block_size", "engine.speculation", "transfer.gpu_buffer_bytes"),
    *(f"router.options.{name}" for name in ("cors_origins", "otlp_endpoint")),
    *(f"router.options.{name}" for name in ("served_model_name", "trusted_proxies")),
}
"""Options of which the chart checks more than the configuration's schema, which leaves that to code."""


@pytest.mark.parametrize(
    ("section", "node", "elsewhere"),
    [
        ("EngineConfig", "engine", {"threads"}),
        ("TransferConfig", "transfer", set()),
        ("HeartbeatConfig", "heartbeat", set()),
        ("ScalingOptions", "scaling", set()),
        (
            "RouterSection",
            "router.options",
            {
                *("host", "grpc_port", "http_port", "replicas", "port_step", "cpus", "resources"),
                *("tls_certificate", "tls_key", "api_keys"),
            },
        ),
    ],
)
def test_the_schema_has_exactly_the_options_of_the_configuration_and_their_limits(
    section: str, node: str, elsewhere: set[str]
) -> None:
    there = schema()["$defs"][section]["properties"]
    here = SCHEMA
    for key in node.split("."):
        here = resolved(here["properties"][key])
    assert here["properties"].keys() == there.keys() - elsewhere
    for name, option in here["properties"].items():
        if f"{node}.{name}" not in STRICTER:
            assert limits(resolved(option)) == limits(there[name]), name


def limits(node: Any) -> Any:
    """Limits of an option's schema: without texts for people, and without the type of values that are listed."""
    if isinstance(node, dict) and "$ref" in node:
        return limits(schema()["$defs"][node["$ref"].rpartition("/")[2]])
    if isinstance(node, list):
        return [limits(each) for each in node]
    if not isinstance(node, dict):
        return node.replace(r"\d", "[0-9]") if isinstance(node, str) else node
    left_out = {"description", "title", "default", *(["type"] if node.keys() & {"enum", "const"} else [])}
    return {key: limits(value) for key, value in node.items() if key not in left_out}


def resolved(node: dict[str, Any]) -> dict[str, Any]:
    """A node of the schema, or the definition that it refers to."""
    return SCHEMA["definitions"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def test_a_roles_engine_has_the_options_of_the_common_engine():
    assert SCHEMA["definitions"]["role"]["properties"]["engine"] == SCHEMA["properties"]["engine"]


def test_the_schema_is_strict_and_every_value_is_in_it():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.keys() <= SCHEMA["properties"].keys()
    free = {"affinity", "csi", "global", "image", "items", "podSecurityContext", "securityContext", "valueFrom"}

    def check(node: dict[str, Any], name: str) -> None:
        if node.get("type") == "object":
            assert node.get("additionalProperties", True) is not True or name in free, name
        for key in ("properties", "definitions"):
            for child_name, child in node.get(key, {}).items():
                check(child, child_name)
        if isinstance(node.get("items"), dict):
            check(node["items"], "items")

    check(SCHEMA, "")
