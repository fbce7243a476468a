"""Writes the reference pages and the dashboards from the code: `python docs/generate.py` (`make docs`)."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from kvrelay.cluster.config.options import ClusterConfig, schema
from kvrelay.cluster.grafana.dashboards import write
from kvrelay.rpc.metrics.families import BUILD_HELP, BUILD_LABELS, BUILD_NAME, COMMON, FAMILIES, Family, Label

FOLDER = Path(__file__).parent
CHART = FOLDER.parent / "helm" / "kvrelay"
DASHBOARDS = CHART / "dashboards"
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
    kv_memory_bytes: 60GiB
router:
  host: 0.0.0.0
```
"""
METRICS = """# Metrics

This page is generated from `rpc/metrics/families.py` by `python docs/generate.py`; edit the table there.

| process | where its metrics are |
|---|---|
| router | `/metrics` of `router.http_port` (where calls need an API key, so does this), and of `metrics.router_port` |
| worker | `/metrics` of `metrics.worker_port` |
| supervisor | `/metrics` of `metrics.supervisor_port` |
| all of them, on Ray | Ray's agent of each node, under `ray_` + these names, with Ray's labels of node and process |

The ports of section [`metrics`](configuration.md#metrics) are closed by default; `kvrelay status --json` shows those
that are open. [observability.md](observability.md) tells how to set up Prometheus, Grafana and traces.

A name is `kvrelay_<part>_<what>_<unit>`, with `_total` behind a counter; a histogram has `_bucket`, `_sum` and
`_count`. Counters start at 0 with their process. What a router records of a request is recorded when that has ended,
except the time between tokens and what attempts do. Every process also has `process_*` of the Prometheus client: CPU,
memory, file descriptors, start time.

No metric has a label whose values clients could choose without limit, and none has text of anybody's request.
"""
CHART_README = """# {name}

{description}

![Version: {version}](https://img.shields.io/badge/Version-{version}-informational) \
![AppVersion: {appVersion}](https://img.shields.io/badge/AppVersion-{appVersion}-informational)

This page is generated from `Chart.yaml` and the comments of `values.yaml` by `python docs/generate.py`; edit them.

```sh
helm install my-model helm/kvrelay --set model.path=ORG/NAME --set image.repository=REGISTRY/kvrelay
```

It makes a RayCluster, so KubeRay's operator must be there.
[docs/deploy.md]({source}/blob/main/docs/deploy.md) tells how to build the image, what each profile (`values-*.yaml`) is
for, and how to upgrade.

## Requirements

Kubernetes: `{kubeVersion}`

## Values

| Key | Type | Default | Description |
|-----|------|---------|-------------|
"""
PARTS = {
    "router": ("Routers", "the router's name and its model's"),
    "worker": ("Workers", "the worker's name, role and model"),
    "transfer": ("The hand-off, as each of its two workers sees it", "the worker's name, role and model"),
    "supervisor": ("The supervisor", ""),
}


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
        parts += [*_rows(document, section, defaults[name]), ""]
    return "\n".join(parts)


def _rows(document: dict[str, Any], section: dict[str, Any], defaults: dict[str, Any], above: str = "") -> list[str]:
    """A line for each key of a section, and for each key of the groups in it."""
    rows = []
    for key, field in section["properties"].items():
        if "$ref" in field:
            group = document["$defs"][field["$ref"].rpartition("/")[2]]
            rows += _rows(document, group, defaults[key], f"{above}{key}.")
            continue
        default = "" if key == "replicas" else f"`{json.dumps(defaults[key])}`"
        rows.append(f"| `{above}{key}` | {_type(field)} | {default} | {_text(field)} |")
    return rows


def _top_level(document: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    """The keys that are in no section."""
    keys = {name: entry for name, entry in document["properties"].items() if "$ref" not in entry}
    rows = [f"| `{key}` | {_type(entry)} | `{defaults[key]}` | {_text(entry)} |" for key, entry in keys.items()]
    return ["## Keys of the whole cluster\n", "| key | type | default | meaning |\n|---|---|---|---|", *rows, ""]


def _text(field: dict[str, Any]) -> str:
    return " ".join(field.get("description", "").split())


def _type(field: dict[str, Any]) -> str:
    """A type in words, with its limits as far as the schema has them."""
    if "const" in field:
        return f"`{field['const']}`"
    if "pattern" in field:
        return "text such as `8GiB`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        return " or ".join(map(_type, field["anyOf"]))
    if "properties" in field:
        return "keys of [`engine`](#engine) except `threads`"
    if field["type"] == "object":
        return f"mapping of names to {'keys' if '$ref' in field['additionalProperties'] else 'numbers'}"
    low, high, above = field.get("minimum"), field.get("maximum"), field.get("exclusiveMinimum")
    if above is not None:
        return f"{field['type']}, more than {above}"
    if low is None:
        return str(field["type"])
    return f"{field['type']}, at least {low}" if high is None else f"{field['type']}, {low} to {high}"


def metrics() -> str:
    """The page metrics.md."""
    parts = [METRICS]
    for part, (title, process) in PARTS.items():
        found = [family for family in FAMILIES if family.name.startswith(f"kvrelay_{part}_")]
        parts.append(f"## {title}\n")
        if process:
            common = ", ".join(f"`{label}`" for label in COMMON[found[0].part])
            parts.append(f"Labels of every series: {common}, {process}.\n")
        parts.append("| metric | type | unit | further labels | meaning |\n|---|---|---|---|---|")
        parts += [*map(_metric, found), ""]
    labels = ", ".join(f"`{label}`" for label in BUILD_LABELS)
    parts.append("## Every process\n\n| metric | type | labels | meaning |\n|---|---|---|---|")
    parts.append(f"| `{BUILD_NAME}` | gauge | {labels} | {BUILD_HELP} |\n")
    return "\n".join(parts)


def _metric(family: Family) -> str:
    labels = "; ".join(map(_label, family.labels))
    return f"| `{family.name}` | {family.kind} | {family.unit} | {labels} | {family.help} |"


def _label(label: Label) -> str:
    return f"`{label.name}`: {', '.join(f'`{value}`' for value in label.values) or label.bound}"


def chart_readme() -> str:
    """The chart's README.md, in the form of helm-docs."""
    text = (CHART / "values.yaml").read_text()
    source = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    head = CHART_README.format(**yaml.safe_load((CHART / "Chart.yaml").read_text()), source=source)
    return head + "".join(_values(yaml.compose(text), text.splitlines())) + "\n"


def _values(node: yaml.MappingNode, lines: list[str], above: str = "") -> Iterator[str]:
    """A line for each key that has a comment `# --` or a value without further keys."""
    for key, value in node.value:
        if key.value == "<<":
            yield f"| {above}* | | | The keys of `prefill`. |\n"
            continue
        told = _comment(lines, key.start_mark.line)
        if isinstance(value, yaml.MappingNode) and value.value and not told:
            yield from _values(value, lines, f"{above}{key.value}.")
            continue
        default = yaml.safe_load(yaml.serialize(value))
        kind = {str: "string", bool: "bool", int: "int", list: "list", dict: "object"}[type(default)]
        yield f"| {above}{key.value} | {kind} | `{json.dumps(default)}` | {told} |\n"


def _comment(lines: list[str], line: int) -> str:
    """The text of the comment above a key, from its `# --` on."""
    found: list[str] = []
    while lines[line - 1].lstrip().startswith("#"):
        line -= 1
        found.insert(0, lines[line].strip().removeprefix("#").strip())
        if found[0].startswith("-- "):
            return " ".join(found).removeprefix("-- ").replace("|", "\\|")
    return ""


if __name__ == "__main__":
    for page, text in (("configuration.md", configuration()), ("metrics.md", metrics())):
        (FOLDER / page).write_text(text)
    (CHART / "README.md").write_text(chart_readme())
    write(DASHBOARDS)
