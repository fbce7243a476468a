"""The dashboards: overview, router, workers, hand-off. `python docs/generate.py` writes them to the Helm chart."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.cluster.grafana.panels import Panel, Panels, Query
from kvrelay.rpc.metrics import families as table
from kvrelay.rpc.metrics.families import COMMON, Part

RAY_PREFIX = "ray_"
COLUMNS, HEIGHT = 24, 8
STAT_HEIGHT = 4
BAD = ((None, "green"), (1.0, "red"))
GOOD = ((None, "red"), (1.0, "green"))
SOURCE = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
"""Variable by which a dashboard's user chooses one of Grafana's sources."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard. Its name is its file's, and a part of its uid."""

    name: str
    title: str
    parts: Sequence[Part]
    """Parts of the cluster whose processes can be selected."""
    rows: Mapping[str, Sequence[Panel]]
    """Panels that are side by side, under their title."""

    def json(self, prefix: str) -> dict[str, Any]:
        """The dashboard as Grafana's JSON."""
        return {
            "uid": f"kvrelay-{self.name}",
            "title": f"kvrelay / {self.title}",
            "tags": ["kvrelay"],
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "schemaVersion": 39,
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "",
            "annotations": {"list": []},
            "links": [{"type": "dashboards", "title": "kvrelay", "tags": ["kvrelay"], "asDropdown": True}],
            "templating": {"list": [SOURCE, *_variables(self.parts, prefix)]},
            "panels": _laid_out(self.rows),
        }


def dashboards(prefix: str = "") -> list[Dashboard]:
    """All dashboards.

    Args:
        prefix: of the metrics' names; RAY_PREFIX where Prometheus scrapes Ray's agents and keeps their names.
    """
    make = Panels(prefix)
    return [_overview(make), _router(make), _workers(make), _handoff(make)]


def write(folder: Path, prefix: str = "") -> None:
    """Writes each dashboard to a file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for dashboard in dashboards(prefix):
        text = json.dumps(dashboard.json(prefix), indent=1)
        (folder / f"kvrelay-{dashboard.name}.json").write_text(text + "\n")


def _overview(make: Panels) -> Dashboard:
    failed = "unavailable|deadline|internal"
    requests, tokens = make.increase(table.REQUESTS), make.increase(table.COMPLETION_TOKENS)
    deaths = make.value(table.DEATHS)
    bad = requests.replace("}[", f', outcome=~"{failed}"}}[')
    return Dashboard(
        "overview",
        "Overview",
        ("router", "worker"),
        {
            "Now": [
                make.stat(table.READY, "Ready", make.value(table.READY), thresholds=GOOD),
                make.stat(table.REQUESTS, "Requests per second", f"sum({requests})", "reqps"),
                Panel(
                    "Failed share",
                    [Query(f"sum({bad}) / (sum({requests}) > 0) or vector(0)")],
                    "percentunit",
                    "Requests that ended as unavailable, deadline or internal.",
                    "stat",
                    thresholds=((None, "green"), (0.01, "orange"), (0.05, "red")),
                ),
                make.stat(table.COMPLETION_TOKENS, "Tokens per second", f"sum({tokens})"),
                make.stat(table.QUEUE_REQUESTS, "Waiting requests", f"sum({make.value(table.QUEUE_REQUESTS)})"),
                make.stat(table.DEATHS, "Members lost, 1 h", f"sum(increase({deaths}[1h]))", thresholds=BAD),
            ],
            "Service": [
                make.rate(table.REQUESTS, "Requests by outcome", "outcome", stacked=True),
                make.quantiles(table.TTFT, "Time to first token"),
                make.quantiles(table.TPOT, "Time per output token"),
                make.quantiles(table.E2E, "End to end"),
            ],
            "Load": [
                make.gauge(table.RUNNING_REQUESTS, "Running requests", "router", stacked=True),
                make.gauge(table.QUEUE_REQUESTS, "Waiting requests", "queue", stacked=True),
                make.rate(table.COMPUTED_TOKENS, "Tokens computed", "role", "worker", stacked=True),
                make.gauge(table.KV_BLOCKS, "KV blocks", "state", stacked=True),
            ],
            "Members": [
                make.gauge(table.MEMBERS, "Members by state", "state", stacked=True),
                make.rate(table.DEATHS, "Lost", "role"),
                make.rate(table.REPLACEMENTS, "Replaced", "role"),
                make.rate(table.DRAINS, "Drains", "role"),
                make.rate(table.ROLE_CHANGES, "Role changes", "role"),
                make.rate(table.SCALING_DECISIONS, "Decisions of scaling", "kind"),
                make.gauge(table.PRESSURE, "Predicted latency / target", "role"),
                make.gauge(table.ATTAINED, "Requests within their targets", "latency"),
                make.rate(table.POOL_QUEUE_SECONDS, "Requests that wait", "role"),
                make.gauge(table.HEARTBEAT_AGE, "Heartbeat age", "member"),
                make.rate(table.INCARNATION_FENCES, "Fenced heartbeats"),
            ],
        },
    )


def _router(make: Panels) -> Dashboard:
    return Dashboard(
        "router",
        "Router",
        ("router",),
        {
            "Requests": [
                make.rate(table.REQUESTS, "By outcome", "outcome", stacked=True),
                make.rate(table.REQUESTS, "By class", "class", stacked=True),
                make.rate(table.TENANT_REQUESTS, "By tenant", "tenant", stacked=True),
                make.rate(table.TENANT_TOKENS, "Tokens by tenant", "tenant", "kind", stacked=True),
            ],
            "Latency": [
                make.quantiles(table.TTFT, "Time to first token", "class"),
                make.quantiles(table.TPOT, "Time per output token", "class"),
                *(
                    make.share(
                        f"{name} within the target",
                        make.increase(attained),
                        make.increase(measured, "_count"),
                        attained.help,
                        "class",
                    )
                    for name, attained, measured in (
                        ("TTFT", table.TTFT_ATTAINED, table.TTFT),
                        ("TPOT", table.TPOT_ATTAINED, table.TPOT),
                    )
                ),
                make.rate(table.REFUSED, "Refused, as targets would be missed", "class", stacked=True),
                make.quantiles(table.ITL, "Time between messages with tokens"),
                make.quantiles(table.E2E, "End to end", "class"),
                make.quantiles(table.QUEUE, "Wait for workers", "class"),
                make.gauge(table.QUEUE_REQUESTS, "Waiting requests", "queue", "router"),
            ],
            "Placement": [
                make.rate(table.ATTEMPTS, "Attempts", "router"),
                make.rate(table.ATTEMPT_FAILURES, "Failed attempts", "reason", stacked=True),
                make.rate(table.RETRIES, "Retries", "router"),
                make.rate(table.MIGRATIONS, "Migrations", "router"),
                make.rate(table.RESUMES, "Resumed calls", "router"),
                make.rate(table.FENCES, "Superseded calls", "router"),
                make.gauge(table.READY_WORKERS, "Workers that take requests", "role", "router"),
                make.gauge(table.API_KEY_MISTAKES, "Unreadable lines of API keys", "router"),
                make.gauge(table.CONNECTIONS, "Connections of clients", "router", "face", stacked=True),
                make.rate(table.CLOSED_CONNECTIONS, "Connections closed by routers", "face", "reason"),
                make.quantiles(table.PREDICTION_ERROR, "Error of the expected prefix hit"),
                make.quantiles(table.LATENCY_ERROR, "Error of predicted latencies", "latency"),
            ],
            "Tokens": [
                make.rate(table.PROMPT_TOKENS, "Prompt tokens", "router"),
                make.rate(table.COMPLETION_TOKENS, "Completion tokens", "router"),
                make.share(
                    "Cached share of prompts",
                    make.increase(table.CACHED_TOKENS),
                    make.increase(table.PROMPT_TOKENS),
                    table.CACHED_TOKENS.help,
                ),
                make.quantiles(table.REQUEST_PROMPT, "Prompt length"),
                make.quantiles(table.REQUEST_COMPLETION, "Completion length"),
                make.gauge(table.RUNNING_REQUESTS, "Running requests", "router"),
            ],
        },
    )


def _workers(make: Panels) -> Dashboard:
    return Dashboard(
        "workers",
        "Workers",
        ("worker",),
        {
            "Steps": [
                make.quantiles(table.STEP_SECONDS, "Step time", "kind"),
                make.rate(table.LAUNCHES, "Launches", "mode", "worker"),
                make.quantiles(table.BATCH_SEQUENCES, "Sequences per step", "role"),
                make.quantiles(table.BATCH_TOKENS, "Tokens per step", "role"),
                make.rate(table.COMPUTED_TOKENS, "Tokens computed", "worker", stacked=True),
                make.gauge(table.PENDING_TOKENS, "Tokens to compute", "worker"),
                make.gauge(table.COST_ERROR, "Error of predicted times", "cost", "worker"),
            ],
            "Speculative decoding": [
                make.rate(table.DRAFTS, "Guessed tokens", "event", "worker"),
                make.rate(table.DRAFT_STEPS, "Steps with guesses", "worker"),
                make.rate(table.DRAFT_STEP_TOKENS, "Tokens of steps with guesses", "worker"),
                make.rate(table.DRAFT_SECONDS, "Time of steps with guesses", "case"),
            ],
            "Experts": [
                make.rate(table.EXPERT_TOKENS, "Tokens of experts", "expert", stacked=True),
                make.gauge(table.EXPERT_IMBALANCE, "Busiest expert of each layer", "worker", "layer"),
                make.gauge(table.EXPERT_RANK_IMBALANCE, "Busiest rank", "worker", "copies"),
            ],
            "Requests": [
                make.gauge(table.WORKER_REQUESTS, "Requests", "worker", "state"),
                make.quantiles(table.PREFILL_QUEUE, "Wait for prefill"),
                make.quantiles(table.PREFILL, "Prefill"),
                make.quantiles(table.DECODE_QUEUE, "Wait for decode"),
                make.rate(table.REQUEST_FAILURES, "Requests given back", "code", "worker"),
            ],
            "KV memory": [
                make.gauge(table.KV_BLOCKS, "Blocks", "worker", "state", stacked=True),
                make.share(
                    "Prefix cache hits",
                    make.increase(table.PREFIX_HITS),
                    make.increase(table.PREFIX_QUERIES),
                    table.PREFIX_HITS.help,
                ),
                make.rate(table.EVICTIONS, "Evictions", "worker"),
                make.rate(table.PREEMPTIONS, "Preemptions", "worker"),
            ],
        },
    )


def _handoff(make: Panels) -> Dashboard:
    return Dashboard(
        "handoff",
        "KV hand-off",
        ("worker",),
        {
            "Transfers": [
                make.rate(table.SENT_BYTES, "Sent", "worker", stacked=True),
                make.rate(table.IN_PLACE_BYTES, "Sent without a copy", "worker", stacked=True),
                make.rate(table.RECEIVED_BYTES, "Received", "worker", stacked=True),
                make.rate(table.SENT_STATES, "Hidden states sent", "worker", stacked=True),
                make.rate(table.RECEIVED_STATES, "Hidden states received", "worker", stacked=True),
                make.quantiles(table.TRANSFER, "Time of a hand-off", role="prefill"),
                make.quantiles(table.EXPOSED, "Exposed time", role="prefill"),
                make.share(
                    "Hidden behind prefill",
                    f"{make.increase(table.TRANSFER, '_sum', role='prefill')} - "
                    f"{make.increase(table.EXPOSED, '_sum', role='prefill')}",
                    make.increase(table.TRANSFER, "_sum", role="prefill"),
                    "Share of the hand-offs' time in which the prefill worker still computed.",
                ),
                make.gauge(table.LEASES, "Leases outstanding", "worker"),
            ],
            "Trust": [
                make.rate(table.HANDOFF_FAILURES, "Failures", "reason", "worker"),
                make.rate(table.CHECKSUM_FAILURES, "Checksum failures", "worker"),
                make.rate(table.LEASES_EXPIRED, "Leases and deadlines that passed", "worker"),
                make.rate(table.FENCED_MESSAGES, "Fenced messages", "worker"),
                make.rate(table.LINKS_ENDED, "Links ended", "worker"),
                make.gauge(table.WORKER_REQUESTS, "Hand-offs expected", "worker", state="promised"),
            ],
        },
    )


def _variables(parts: Sequence[Part], prefix: str) -> list[dict[str, Any]]:
    """A variable for each label of the parts' processes, by which they can be selected."""
    sources = {"router": table.RUNNING_REQUESTS, "worker": table.KV_BLOCKS}
    # The values of a label that several parts have are those of the first part.
    part_of: dict[str, Part] = {}
    for part in parts:
        for label in COMMON[part]:
            part_of.setdefault(label, part)
    return [
        {
            "name": label,
            "label": label,
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": f"label_values({prefix}{sources[part].name}, {label})",
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        for label, part in part_of.items()
    ]


def _laid_out(rows: Mapping[str, Sequence[Panel]]) -> list[dict[str, Any]]:
    """Four graphs side by side at most; all stats of a row in one line."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in rows.items():
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        head = {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place}
        panels.append(head | {"collapsed": False, "panels": []})
        top += 1
        stats = row[0].kind == "stat"
        count = len(row) if stats else min(4, -(-len(row) // -(-len(row) // 4)))
        width, height = COLUMNS // count, STAT_HEIGHT if stats else HEIGHT
        for index, panel in enumerate(row):
            x, y = index % count * width, top + index // count * height
            panels.append(panel.json(len(panels) + 1, {"x": x, "y": y, "w": width, "h": height}))
        top += -(-len(row) // count) * height
    return panels
