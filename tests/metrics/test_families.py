"""The table of metrics follows Prometheus' conventions, and its labels have the values that the code knows."""

import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from expressions import series

from kvrelay.internal.v1.supervisor_pb2 import MemberState, Role
from kvrelay.internal.v1.worker_pb2 import Blocks, Failure, Load
from kvrelay.router.records.metrics import MAX_TENANTS, RouterMetrics
from kvrelay.router.session.attempt import AttemptFailure
from kvrelay.router.trace import Outcome, RequestTrace
from kvrelay.rpc.metrics import families
from kvrelay.rpc.metrics import families as table
from kvrelay.rpc.metrics.families import FAMILIES, SECONDS, Family
from kvrelay.rpc.metrics.metric_set import MetricSet
from kvrelay.transfer.protocol.endpoint import TransferStats
from kvrelay.transfer.protocol.messages import Code
from kvrelay.worker.metrics import WorkerMetrics

COMMON = {
    "router": {"router": "router-0", "model_name": "pico"},
    "worker": {"worker": "decode-0", "role": "decode", "model_name": "pico"},
    "supervisor": {},
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_follows_the_conventions(family: Family) -> None:
    part = {"transfer": "worker"}.get(family.name.split("_")[1], family.name.split("_")[1])
    assert re.fullmatch(r"kvrelay_(router|worker|transfer|supervisor)(_[a-z0-9]+)+", family.name)
    assert part == family.part
    assert (family.kind == "counter") == family.name.endswith("_total")
    assert family.help.endswith(".")
    assert family.help[0].isupper() or family.help[0].isdigit()
    assert len(set(family.label_names)) == len(family.label_names)
    assert (family.kind == "histogram") == bool(family.buckets)
    assert list(family.buckets) == sorted(set(family.buckets))
    for unit in ("seconds", "bytes"):
        assert (unit in family.name.split("_")) == (family.unit == unit)
    assert not {"le", "quantile", "job", "instance"} & set(family.label_names)
    assert all(label.values or label.bound for label in family.labels), "nothing bounds a label's values"


def test_names_are_given_once() -> None:
    names = [name for family in FAMILIES for name in series(family)]
    assert len(set(names)) == len(names)


def test_latencies_are_told_apart_from_a_millisecond_to_a_hundred_seconds() -> None:
    assert (SECONDS[0], SECONDS[-1]) == (0.001, 100.0)
    assert all(after / before <= 2.51 for before, after in pairwise(SECONDS))


def test_the_labels_have_the_values_that_the_code_knows() -> None:
    reasons = set(table.ATTEMPT_REASON.values)
    failures = [
        AttemptFailure(code, "", frozenset(), lost=lost, silent=silent, cause=cause)
        for code in Failure.Code.values()
        for cause in Failure.Cause.values()
        for lost, silent in ((False, False), (True, False), (False, True))
    ]
    assert {failure.reason for failure in failures} == reasons
    assert set(table.OUTCOMES) == set(get_args(Outcome))
    assert set(table.HANDOFF_REASON.values) == {code.value for code in Code}
    codes = {label for family in FAMILIES for label in family.labels if label.name == "code"}
    assert [set(label.values) for label in codes] == [_names(Failure.Code.keys(), "CODE_")]
    assert set(table.MEMBER_ROLE.values) == _names(Role.keys(), "ROLE_")
    assert set(table.STATES) == _names(MemberState.keys(), "MEMBER_STATE_")


def _names(names: list[str], prefix: str) -> set[str]:
    return {name.removeprefix(prefix).lower() for name in names} - {"unspecified"}


@pytest.mark.parametrize("part", COMMON)
def test_series_whose_labels_are_known_exist_before_their_first_event(part: str) -> None:
    metrics = MetricSet(part, **COMMON[part])  # type: ignore[arg-type]  # parametrized
    exported = {sample.name for metric in metrics.registry.collect() for sample in metric.samples}
    known = [family for family in FAMILIES if family.part == part and all(label.values for label in family.labels)]
    assert {name for family in known for name in series(family)} <= exported


def watched(expert_loads: object = None) -> tuple[WorkerMetrics, Any]:
    """Metrics of a prefill worker with four free blocks, and what stands for its engine."""
    prefix = SimpleNamespace(queried_tokens=0, hit_tokens=0, pool=SimpleNamespace(evictions=0))
    engine: Any = SimpleNamespace(
        scheduler=SimpleNamespace(prefix=prefix, preemptions=0, speculation=None),
        runner=SimpleNamespace(expert_loads=expert_loads),
        on_step=None,
    )
    metrics = WorkerMetrics("worker-0", "prefill", "pico")
    metrics.watch(engine, lambda: Load(blocks=Blocks(total=4, free=4)), None, dict)
    return metrics, engine


def test_a_worker_in_another_role_counts_on_under_its_name() -> None:
    metrics, engine = watched()
    prefix = engine.scheduler.prefix

    def values(name: str) -> dict[str, float]:
        """Values by role: of the series without further labels, or of free blocks."""
        return {
            sample.labels["role"]: sample.value
            for metric in metrics.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == name and sample.labels.get("state", "free") == "free"
        }

    prefix.hit_tokens = 10
    metrics.sent(TransferStats(1.0, 0.5, 100))
    assert values("kvrelay_worker_prefix_hit_tokens_total") == {"prefill": 10}
    prefix.hit_tokens = 15
    metrics.take_role("decode", engine, None)
    prefix.hit_tokens = 17
    metrics.received(TransferStats(1.0, 0.5, 7))
    assert values("kvrelay_worker_prefix_hit_tokens_total") == {"prefill": 15, "decode": 2}
    assert values("kvrelay_transfer_sent_bytes_total") == {"prefill": 100, "decode": 0}
    assert values("kvrelay_transfer_received_bytes_total") == {"prefill": 0, "decode": 7}
    assert values("kvrelay_transfer_duration_seconds_count") == {"prefill": 1, "decode": 1}
    assert values("kvrelay_worker_kv_blocks") == {"decode": 4}, "a worker has one role at a time"


def test_loads_of_experts_are_those_since_the_worker_counts_in_its_role() -> None:
    loads = SimpleNamespace(
        ranks=2, totals=np.array([[5, 5, 5, 5], [7, 7, 7, 7]]), rank_totals=np.array([[10, 10], [14, 14]])
    )
    metrics, engine = watched(loads)

    def values(name: str, *labels: str) -> dict[tuple[str, ...], float]:
        return {
            tuple(sample.labels[label] for label in labels): sample.value
            for metric in metrics.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == name
        }

    loads.totals = loads.totals + np.array([[6, 2, 0, 0], [1, 1, 1, 1]])
    loads.rank_totals = loads.rank_totals + np.array([[5, 3], [2, 2]])
    tokens = "kvrelay_worker_expert_tokens_total"
    assert values(tokens, "expert") == {("0",): 7, ("1",): 3, ("2",): 1, ("3",): 1}
    assert values("kvrelay_worker_expert_imbalance_ratio", "layer") == {("0",): 3, ("1",): 1}
    # Ranks wait for each other in each layer: 8 tokens and 2 on the busiest, 4 and 2 on average.
    busiest = values("kvrelay_worker_expert_rank_imbalance_ratio", "copies")
    assert busiest == {("without",): pytest.approx(10 / 6), ("with",): pytest.approx(7 / 6)}
    metrics.take_role("decode", engine, None)
    loads.totals = loads.totals + 1
    assert values(tokens, "role", "expert")["decode", "0"] == 2
    assert values(tokens, "role", "expert")["prefill", "0"] == 7


def test_tenants_beyond_a_bound_share_a_series() -> None:
    metrics = RouterMetrics("router-0", "pico", {})
    for number in range(3 * MAX_TENANTS):
        metrics.ended(RequestTrace(0.0, tenant=f"tenant-{number}", completion_tokens=2, outcome="stop"))
    metrics.ended(RequestTrace(0.0, tenant="tenant-0", outcome="stop"))
    metrics.ended(RequestTrace(0.0, outcome="stop"))
    values = {
        sample.labels["tenant"]: sample.value
        for metric in metrics.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == families.TENANT_REQUESTS.name
    }
    assert len(values) == MAX_TENANTS + 2
    assert (values["tenant-0"], values["other"], values["anonymous"]) == (2, 2 * MAX_TENANTS, 1)
