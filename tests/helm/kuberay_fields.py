"""Writes kuberay_fields.json, the fields of KubeRay's RayCluster: `python tests/helm/kuberay_fields.py CRD`.

CRD is `ray.io_rayclusters.yaml` of a release of KubeRay, or the JSON schema of its version v1. An API server drops what
the definition doesn't name, so the chart's tests refuse it. Pod templates, which are Kubernetes' own, are left out: an
object without fields may have any.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).parent / "kuberay_fields.json"
KUBERNETES = ("template", "affinity", "env", "envFrom", "securityContext", "volumeMounts", "resources", "valueFrom")
"""Keys whose values have Kubernetes' own types."""


def fields(schema: dict[str, Any]) -> dict[str, Any]:
    """The properties of an object, or of the elements of an array, each with its own."""
    schema = schema.get("items", schema)
    return {
        name: {} if name in KUBERNETES else fields(child)
        for name, child in sorted(schema.get("properties", {}).items())
    }


def unknown(spec: Any) -> list[str]:
    """The paths of what the definition doesn't name, in a RayCluster's `spec`."""
    return _unknown(spec, json.loads(TARGET.read_text()), "spec")


def _unknown(value: Any, known: dict[str, Any], path: str) -> list[str]:
    if isinstance(value, list):
        return [found for child in value for found in _unknown(child, known, path)]
    if not known or not isinstance(value, dict):
        return []
    return [
        found
        for name, child in value.items()
        for found in (_unknown(child, known[name], f"{path}.{name}") if name in known else [f"{path}.{name}"])
    ]


def main() -> None:
    document = yaml.safe_load(Path(sys.argv[1]).read_text())
    if "spec" in document and "versions" in document["spec"]:
        (version,) = [version for version in document["spec"]["versions"] if version["name"] == "v1"]
        document = version["schema"]["openAPIV3Schema"]
    TARGET.write_text(json.dumps(fields(document["properties"]["spec"]), indent=1) + "\n")


if __name__ == "__main__":
    main()
