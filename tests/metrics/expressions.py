"""Checks of PromQL without Prometheus: which metrics and labels an expression names. promtool checks the grammar."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvrelay.rpc.metrics.families import FAMILIES, Family

CHART = Path(__file__).parents[2] / "helm" / "kvrelay"
RULES, DASHBOARDS = CHART / "rules", CHART / "dashboards"
_METRIC = re.compile(r"\b(?P<name>(?:ray_)?kvrelay[a-zA-Z0-9_:]*)(?:\s*\{(?P<matchers>[^}]*)\})?")
_MATCHER = re.compile(r'\s*(?P<label>[a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)\s*"(?:[^"\\]|\\.)*"\s*(?:,|$)')
_GROUP = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")


def series(family: Family) -> list[str]:
    """The names of a metric's series."""
    suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
    return [family.name + suffix for suffix in suffixes]


KNOWN = {name: {*family.label_names, "le"} for family in FAMILIES for name in series(family)}
"""The labels of each series."""


def rule_groups() -> list[dict[str, Any]]:
    """All groups of the chart's rules."""
    return [group for path in sorted(RULES.glob("*.yaml")) for group in yaml.safe_load(path.read_text())["groups"]]


def dashboards() -> dict[str, dict[str, Any]]:
    """The chart's dashboards by file."""
    return {path.name: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def graphs(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A dashboard's panels that have queries."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard: Mapping[str, Any]) -> list[str]:
    """A dashboard's expressions with its variables filled in, as Prometheus takes them."""
    found = [target["expr"] for panel in graphs(dashboard) for target in panel["targets"]]
    return [
        re.sub(r"\$(router|worker|role|model_name)\b", ".*", text.replace("$__rate_interval", "30s")) for text in found
    ]


def recorded() -> dict[str, set[str]]:
    """Labels of the series that the rules record."""
    return {
        rule["record"]: {label.strip() for group in _GROUP.findall(rule["expr"]) for label in group.split(",")} - {"le"}
        for group in rule_groups()
        for rule in group["rules"]
        if "record" in rule
    }


def mistakes(expression: str, known: Mapping[str, Iterable[str]], prefix: str = "") -> list[str]:
    """Names in an expression that don't exist."""
    wrong = []
    labels: set[str] = set()
    names = list(_METRIC.finditer(expression))
    if not names:
        wrong.append("names no metric of kvrelay")
    for found in names:
        name = found["name"].removeprefix(prefix)
        if name not in known or not found["name"].startswith(prefix):
            wrong.append(f"there is no metric {found['name']}")
            continue
        labels |= set(known[name])
        matchers = found["matchers"] or ""
        if _MATCHER.sub("", matchers).strip():
            wrong.append(f"{{{matchers}}} are no matchers")
        wrong += [
            f"{name} has no label {matcher['label']}"
            for matcher in _MATCHER.finditer(matchers)
            if matcher["label"] not in known[name]
        ]
    for group in _GROUP.findall(expression):
        wrong += [f"no metric has label {label}" for label in map(str.strip, group.split(",")) if label not in labels]
    for opening, closing in ("()", "[]", "{}"):
        if expression.count(opening) != expression.count(closing):
            wrong.append(f"{opening} without {closing}")
    return wrong
