"""A rendered chart as Python objects, and the pods that KubeRay makes of its RayCluster."""

import json
import shlex
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrelay.cluster.config.file import load
from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.worker.config import WorkerConfig

HELM = Path(__file__).parents[2] / "helm"
CHART = HELM / "kvrelay"
PROFILES = sorted(CHART.glob("values-*.yaml"))
EXAMPLES = {path.stem: path for path in [*sorted((HELM / "examples").glob("*.yaml")), *PROFILES]}
EVERYTHING: dict[str, Any] = {
    "model": {"path": "hf:org/name", "dtype": "float32", "hub": {"tokenSecret": "hub"}},
    "engine": {"block_size": 32, "prefix_cache": False},
    "transfer": {"checksum": False, "lease_seconds": 2.5, "encrypt": "full"},
    "heartbeat": {"suspect_seconds": 2, "dead_seconds": 5, "step_dead_seconds": 60},
    "scaling": {"enabled": True, "calm_seconds": 60.0},
    "security": {
        "joinTokenSecret": "mine",
        "tls": {"enabled": True, "secrets": {part: part for part in ("supervisor", "router", "worker", "operator")}},
    },
    "router": {
        "tlsSecret": "public",
        "apiKeysSecret": "keys",
        "replicas": 3,
        "options": {"max_requests": 7},
        "grpcPort": 65535,
        "httpPort": 1024,
    },
    "helmTest": {"apiKeySecret": "key", "tlsHost": "llm.example.com"},
    "prefill": {"threads": 1},
    "decode": {"replicas": 2, "minReplicas": 0, "maxReplicas": 5},
    "drainSeconds": 7.5,
    "startupSeconds": 123,
    "ray": {"namespace": "blue"},
    "gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6380", "redisPasswordSecret": "redis"},
    "autoscaling": {"enabled": True},
    "networkPolicy": {
        "defaultDeny": True,
        "egressTo": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}],
        "grpcFrom": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}],
        "metricsFrom": [{"namespaceSelector": {}}],
        "dashboardFrom": [{"podSelector": {}}],
    },
    "metrics": {"routerPort": 9500, "workerPort": 9400, "supervisorPort": 9300},
    "ingress": {"enabled": True, "className": "nginx", "hosts": ["a.b"], "grpcHosts": ["g.b"], "tlsSecret": "outside"},
    "gateway": {"enabled": True, "parentRefs": [{"name": "public"}], "grpcHostnames": ["g.b"]},
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboards": {"enabled": True},
    "service": {"type": "LoadBalancer"},
}
"""Values that make every kind of object, and fill every section of the configuration."""
FILLED: dict[str, Any] = {
    "model": {"path": "/models/a", "volume": {"source": {"emptyDir": {"sizeLimit": "40Gi"}}}},
    "decode": {
        "extraInitContainers": [
            {"name": "fill", "image": "busybox", "volumeMounts": [{"name": "model", "mountPath": "/models"}]}
        ]
    },
}
"""Values by which an init container of the user's fills the model's volume."""
SHAPES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    **{name: {"values": path} for name, path in EXAMPLES.items()},
    "filled": FILLED,
    "several-pods": {"prefill": {"gpus": 4, "replicas": 2, "engine": {"tensor_parallel": 8, "hosts": 2}}},
}
"""Arguments of `render` for which the properties of every rendering are tested."""
IN_TURN = ("defaults", "everything", "gpu-rdma")
"""Shapes in `make test`."""
EVERY_SHAPE = [pytest.param(name, marks=() if name in IN_TURN else pytest.mark.more) for name in SHAPES]

Object = dict[str, Any]


def worker_configs(config: ClusterConfig) -> list[WorkerConfig]:
    """The options of each worker that the cluster begins with."""
    return [config.worker_config(name, role) for name, role in config.members().items() if role != "router"]


class Rendered:
    """The documents that `helm template` printed for these values, the chart's own among them."""

    def __init__(self, text: str, given: Object) -> None:
        self.given = given
        self.objects: list[Object] = [document for document in yaml.safe_load_all(text) if document]

    def all(self, kind: str) -> list[Object]:
        """Every object of a kind."""
        return [item for item in self.objects if item["kind"] == kind]

    def one(self, kind: str) -> Object:
        """The only object of a kind."""
        (item,) = self.all(kind)
        return item

    def named(self, kind: str, name: str) -> Object:
        """The object of a kind with a name."""
        (item,) = [item for item in self.all(kind) if item["metadata"]["name"] == name]
        return item

    @cached_property
    def cluster(self) -> Object:
        """The RayCluster."""
        return self.one("RayCluster")

    @property
    def name(self) -> str:
        """The RayCluster's name."""
        return str(self.cluster["metadata"]["name"])

    @property
    def head(self) -> Object:
        """The head's pod template."""
        template: Object = self.cluster["spec"]["headGroupSpec"]["template"]
        return template

    @property
    def groups(self) -> dict[str, Object]:
        """The worker groups by name."""
        return {group["groupName"]: group for group in self.cluster["spec"]["workerGroupSpecs"]}

    @property
    def templates(self) -> dict[str, Object]:
        """Every group's pod template, `headgroup` among them."""
        return {"headgroup": self.head, **{name: group["template"] for name, group in self.groups.items()}}

    def pod_labels(self, group: str) -> dict[str, str]:
        """Labels of a group's pods: the template's under those that KubeRay sets itself."""
        own = {
            "ray.io/cluster": self.name,
            "ray.io/group": group,
            "ray.io/node-type": "head" if group == "headgroup" else "worker",
            "ray.io/is-ray-node": "yes",
        }
        return {**self.templates[group]["metadata"]["labels"], **own}

    def selected(self, selector: dict[str, str]) -> set[str]:
        """Groups whose pods a selector matches."""
        return {group for group in self.templates if selector.items() <= self.pod_labels(group).items()}

    def config(self, folder: Path) -> ClusterConfig:
        """The configuration in the ConfigMap, read the way `kvrelay up` reads it."""
        path = folder / "config.yaml"
        path.write_text(self.named("ConfigMap", self.name)["data"]["config.yaml"])
        return load(path)


def container(template: Object, name: str) -> Object:
    """A container of a pod template, or an init container."""
    spec = template["spec"]
    (found,) = [item for item in [*spec.get("initContainers", []), *spec["containers"]] if item["name"] == name]
    return dict(found)


def preparing(template: Object) -> list[Object]:
    """The init containers of a pod template that end before the pod's containers start."""
    return [item for item in template["spec"].get("initContainers", []) if item.get("restartPolicy") != "Always"]


def containers(rendered: Rendered) -> list[tuple[Object, Object]]:
    """Every (pod spec, container), the test pod's among them."""
    specs = [template["spec"] for template in rendered.templates.values()]
    specs += [pod["spec"] for pod in rendered.all("Pod")]
    return [(spec, item) for spec in specs for item in [*spec.get("initContainers", []), *spec["containers"]]]


def environment(item: Object) -> dict[str, Object]:
    """A container's environment by name."""
    return {entry["name"]: entry for entry in item.get("env", [])}


def ray_containers(template: Object) -> list[Object]:
    """The containers of a pod template in which processes of Ray run."""
    return [item for item in template["spec"]["containers"] if item["name"] != "logs"]


def custom_resources(group: Object) -> dict[str, float]:
    """A group's custom Ray resources, after all three readers of that string agreed on them."""
    text = group["rayStartParams"]["resources"]
    _, _, pasted = shlex.split(f"ray start --resources={text}")  # KubeRay pastes it into a shell command
    shell = json.loads(pasted.removeprefix("--resources="))
    operator = json.loads(text.strip("'\"` "))  # KubeRay looks for accelerators in it
    autoscaler = json.loads(text[1:-1].replace("\\", ""))  # Ray's autoscaler sizes a group by it
    assert shell == operator == autoscaler
    assert all(isinstance(amount, int) for amount in shell.values())
    return dict(shell)
