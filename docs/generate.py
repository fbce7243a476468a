"""Writes the reference pages configuration.md and metrics.md from the code: `python docs/generate.py` (`make docs`)."""

import json
from pathlib import Path
from typing import Any

from ray.util.metrics import Metric

from kvrelay.cluster.config import ClusterConfig, schema
from kvrelay.cluster.metrics import RouterMetrics, WorkerMetrics

FOLDER = Path(__file__).parent
CONFIGURATION = """# Configuration

This page is generated from the configuration classes by `python docs/generate.py`; edit the docstrings there.

`kvrelay up --config FILE` reads one YAML file. Every key is optional, unknown keys are refused, and options of the
command line win over the file. `kvrelay config show` prints the whole configuration, `kvrelay config validate --config
FILE` checks a file, and `kvrelay config schema` prints the JSON schema for editors.

```yaml
model:
  path: /models/Llama-3.1-8B-Instruct
prefill:
  replicas: 2
  gpus: 1
decode:
  replicas: 4
  gpus: 1
  engine:
    kv_memory_bytes: 60000000000
router:
  host: 0.0.0.0
```
"""
METRICS = """# Metrics

This page is generated from `cluster/metrics.py` and `router/metrics.py` by `python docs/generate.py`; edit the
descriptions there.

A router's HTTP has its own metrics at `/metrics`, under the names below (`_total` behind counters). Every node of the
Ray cluster exports those of all of its processes as Prometheus text. Ray adds the prefix `ray_` to the names, the
suffix `_total` to counters, and labels of node and process. The unit is the last word of the name. Histograms have
`_bucket`, `_sum` and `_count`. The labels `router` and `worker` hold the process's name, `router-0` for example.

`outcome` is `stop`, `length`, `cancelled`, `invalid`, `exhausted`, `unavailable`, `deadline` or `internal`. The routers
record the metrics of a request when it has ended, also those whose time was spent on workers; a part that a request
never had (a hand-off with a co-located worker) is not recorded.

| metric | type | unit | labels | meaning |
|---|---|---|---|---|
"""


def configuration() -> str:
    """The page configuration.md."""
    document = schema()
    defaults = ClusterConfig().model_dump(mode="json")
    parts = [CONFIGURATION, *_top_level(document, defaults)]
    roles: list[str] = []
    for name, entry in document["properties"].items():
        if "$ref" not in entry:
            continue
        section = document["$defs"][entry["$ref"].rpartition("/")[2]]
        if entry["$ref"].endswith("/RoleSection"):
            roles.append(f"`{name}`: {_text(entry)}")
            if len(roles) < 3:
                continue
            parts.append("## `prefill`, `decode`, `colocated`\n\n" + "\n".join(f"* {role}" for role in roles) + "\n")
        else:
            parts.append(f"## `{name}`\n\n{_text(entry) or _text(section)}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        for key, field in section["properties"].items():
            default = "" if key == "replicas" else f"`{json.dumps(defaults[name][key])}`"
            parts.append(f"| `{key}` | {_type(field)} | {default} | {_text(field)} |")
        parts.append("")
    return "\n".join(parts)


def _top_level(document: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    """The keys that are in no section."""
    keys = {name: entry for name, entry in document["properties"].items() if "$ref" not in entry}
    rows = [f"| `{key}` | {_type(entry)} | `{defaults[key]}` | {_text(entry)} |" for key, entry in keys.items()]
    return ["## Keys of the whole cluster\n", "| key | type | default | meaning |\n|---|---|---|---|", *rows, ""]


def _text(field: dict[str, Any]) -> str:
    return " ".join(field.get("description", "").split())


def _type(field: dict[str, Any]) -> str:
    """A type in words, with its limits as far as the schema has them."""
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        return " or ".join(map(_type, field["anyOf"]))
    if "properties" in field:
        return "keys of [`engine`](#engine) except `threads`"
    if field["type"] == "object":
        return f"mapping of names to {'keys' if '$ref' in field['additionalProperties'] else 'numbers'}"
    low, high = field.get("minimum"), field.get("maximum")
    if low is None:
        return str(field["type"])
    return f"{field['type']}, at least {low}" if high is None else f"{field['type']}, {low} to {high}"


def metrics() -> str:
    """The page metrics.md."""
    lines = []
    for observer in (RouterMetrics("router-0"), WorkerMetrics("prefill-0", "prefill")):
        for value in vars(observer).values():
            values = value.values() if isinstance(value, dict) else [value]
            lines += [_metric(metric) for metric in values if isinstance(metric, Metric)]
    return METRICS + "\n".join(sorted(lines)) + "\n"


def _metric(metric: Metric) -> str:
    info = metric.info
    name = info["name"]
    kind = type(metric).__name__.lower()
    labels = ", ".join(f"`{label}`" for label in info["tag_keys"])
    return f"| `{name}` | {kind} | {name.rpartition('_')[2]} | {labels} | {info['description']} |"


if __name__ == "__main__":
    for page, text in (("configuration.md", configuration()), ("metrics.md", metrics())):
        (FOLDER / page).write_text(text)
