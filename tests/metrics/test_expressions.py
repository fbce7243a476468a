"""Dashboards and rules name metrics and labels that exist, and say what Grafana and Prometheus can read."""

import json
import re
import tomllib
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from expressions import KNOWN, dashboards, graphs, mistakes, queries, recorded, rule_groups
from prometheus import promtool

from kvrelay.cluster.grafana.dashboards import RAY_PREFIX
from kvrelay.cluster.grafana.dashboards import dashboards as made
from kvrelay.rpc.metrics.families import FAMILIES

RULES = [rule for group in rule_groups() for rule in group["rules"]]
ROOT = Path(__file__).parents[2]


def test_the_dashboards_are_the_generated_ones() -> None:
    assert dashboards() == {f"kvrelay-{each.name}.json": each.json("") for each in made()}, "run `make docs`"


@pytest.mark.parametrize("name", dashboards())
def test_a_dashboard_names_what_exists(name: str) -> None:
    assert {text: found for text in queries(dashboards()[name]) if (found := mistakes(text, KNOWN))} == {}


def test_a_dashboard_for_rays_own_names_has_the_same_queries() -> None:
    for plain, prefixed in zip(made(), made(RAY_PREFIX), strict=True):
        texts = queries(prefixed.json(RAY_PREFIX))
        assert [found for text in texts for found in mistakes(text, KNOWN, RAY_PREFIX)] == []
        assert [text.replace(RAY_PREFIX, "") for text in texts] == queries(plain.json(""))


def test_every_metric_is_on_a_dashboard() -> None:
    text = json.dumps(dashboards())
    assert [family.name for family in FAMILIES if family.name not in text] == []


@pytest.mark.parametrize("name", dashboards())
def test_grafana_can_show_a_dashboard(name: str) -> None:
    dashboard = dashboards()[name]
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", dashboard["uid"])
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in graphs(dashboard):
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
    for one, other in combinations([panel["gridPos"] for panel in dashboard["panels"]], 2):
        assert not _overlap(one, other), (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in dashboard["panels"])
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert len(variables) == len(dashboard["templating"]["list"])
    used = set(re.findall(r"\$\{?(\w+)", json.dumps([panel.get("targets") for panel in dashboard["panels"]])))
    assert used - {"__rate_interval"} <= variables
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]  # a failure is the test's
            assert label in KNOWN[metric]


def test_grafanas_own_types_accept_the_dashboards() -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="grafana-foundation-sdk is not here")
    for dashboard in dashboards().values():
        read = models.Dashboard.from_json(dashboard)
        assert (read.uid, len(read.panels)) == (dashboard["uid"], len(dashboard["panels"]))


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in (("x", "w"), ("y", "h"))
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("record") or rule.get("alert"))
def test_a_rule_names_what_exists(rule: dict[str, Any]) -> None:
    assert mistakes(rule["expr"], {**KNOWN, **recorded()}) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("record") or rule.get("alert"))
def test_a_rule_keeps_models_apart(rule: dict[str, Any]) -> None:
    if re.search(r"kvrelay_(router|worker|transfer)_", rule["expr"]):
        sums = len(re.findall(r"\b(?:sum|max|min|avg|count)\b", rule["expr"]))
        assert len(re.findall(r"\bby \([^)]*\bmodel_name\b", rule["expr"])) == sums


@pytest.mark.parametrize("rule", [rule for rule in RULES if "alert" in rule], ids=lambda rule: rule["alert"])
def test_an_alert_says_what_it_is_about(rule: dict[str, Any]) -> None:
    assert rule["alert"].startswith("Kvrelay")
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    labels = re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))
    groups = {label.strip() for group in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in group.split(",")}
    labelled = {**KNOWN, **recorded()}
    kept = groups or {label for name in re.findall(r"kvrelay[\w:]+", rule["expr"]) for label in labelled[name]}
    assert set(labels) <= kept, "its series have no such label"


def test_a_recorded_series_is_named_by_level_metric_and_operation() -> None:
    assert all(re.fullmatch(r"kvrelay:[a-z0-9_]+:[a-z0-9_]+", name) for name in recorded())


@pytest.mark.parametrize(
    ("expression", "mistake"),
    [
        ("rate(kvrelay_router_request_total[5m])", "there is no metric kvrelay_router_request_total"),
        ('kvrelay_worker_kv_blocks{stat="free"}', "kvrelay_worker_kv_blocks has no label stat"),
        ("sum by (reason) (kvrelay_worker_kv_blocks)", "no metric has label reason"),
        ("sum(kvrelay_worker_kv_blocks", "( without )"),
        ("up", "names no metric of kvrelay"),
        ("kvrelay_worker_kv_blocks{state=free}", "{state=free} are no matchers"),
    ],
)
def test_a_mistake_is_found(expression: str, mistake: str) -> None:
    assert mistakes(expression, KNOWN) == [mistake]


def test_every_alert_has_its_runbook() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    alerts = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in RULES if "alert" in rule}
    assert alerts == {name: f"{source}/blob/main/docs/observability.md#{name.lower()}" for name in alerts}
    assert set(re.findall(r"^### (Kvrelay\w+)$", page, re.MULTILINE)) == alerts.keys()


def test_prometheus_reads_the_rules(tmp_path: Path) -> None:
    rules = sorted((ROOT / "helm" / "kvrelay" / "rules").glob("*.yaml"))
    assert "SUCCESS" in promtool("check", "rules", *map(str, rules))
    for path in (*rules, *(Path(__file__).parent / "rules").glob("*.yaml")):
        name = path.name if path in rules else f"test-{path.name}"
        (tmp_path / name).write_text(path.read_text())
    for path in sorted(tmp_path.glob("test-*.yaml")):
        assert "SUCCESS" in promtool("test", "rules", path.name, folder=tmp_path)


def test_prometheus_reads_the_queries_of_the_dashboards(tmp_path: Path) -> None:
    rules = [
        {"record": f"dashboards:query{number}", "expr": text}
        for number, text in enumerate(text for each in dashboards().values() for text in queries(each))
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(json.dumps({"groups": [{"name": "dashboards", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(path))
