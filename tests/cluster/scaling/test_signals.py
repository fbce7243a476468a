"""Signals: rates from totals, whatever is lost or starts again on the way."""

import pytest

from kvrelay.cluster.scaling.signals import WINDOW_SECONDS, Meter, PoolRole
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    ROLE_ROUTER,
    Member,
    MemberState,
    MemberStatus,
)
from kvrelay.internal.v1.worker_pb2 import Load, Requests, Traffic
from kvrelay.rpc.identity import ROLES

TICK = 0.5


def worker(
    name: str,
    role: PoolRole,
    requests: Requests | None = None,
    state: MemberState = MEMBER_STATE_READY,
    **figures: float,
) -> MemberStatus:
    load = Load(requests=requests, **figures)  # type: ignore[arg-type]  # by name
    return MemberStatus(member=Member(name=name, incarnation="1", role=ROLES[role], state=state), load=load)


def router(incarnation: str = "1", /, **figures: float) -> MemberStatus:
    member = Member(name="router-0", incarnation=incarnation, role=ROLE_ROUTER)
    return MemberStatus(member=member, load=Load(traffic=Traffic(**figures)))  # type: ignore[arg-type]  # by name


def test_rates_are_those_of_the_window() -> None:
    meter = Meter()
    for tick in range(1, 41):
        signals = meter.observe([router(requests=5 * tick, prompt_tokens=500 * tick)], tick * TICK)
    assert signals.arrivals == pytest.approx(10.0)
    assert signals.arrivals_counted == pytest.approx(10 * WINDOW_SECONDS, abs=5)
    assert signals.prompt_tokens == pytest.approx(100.0)
    for tick in range(41, 41 + round(WINDOW_SECONDS / TICK)):
        signals = meter.observe([router(requests=200, prompt_tokens=20_000)], tick * TICK)
    assert signals.arrivals == 0.0
    assert signals.prompt_tokens == pytest.approx(100.0), "the last prompts tell what the next will be like"


def test_a_lost_report_loses_nothing_and_a_new_incarnation_counts_from_its_first() -> None:
    meter = Meter()
    meter.observe([router(requests=1000)], 0.0)
    meter.observe([router(requests=1000)], 0.5)
    counted = meter.observe([router(requests=1040)], 2.0).arrivals_counted
    assert counted == 40
    assert meter.observe([router("2", requests=7)], 2.5).arrivals_counted == 40
    assert meter.observe([router("2", requests=9)], 3.0).arrivals_counted == 42


def test_what_is_in_prefix_caches_is_not_computed() -> None:
    meter = Meter()
    meter.observe([router()], 0.0)
    signals = meter.observe([router(requests=10, prompt_tokens=1000, cached_tokens=600)], 0.5)
    assert signals.prompt_tokens == pytest.approx(40.0)


def test_the_cost_of_a_step_is_found_from_loads_that_differ() -> None:
    meter, steps, tokens, seconds = Meter(), 0, 0, 0.0
    for tick in range(1, 100):
        batch = 4 + tick % 16
        steps, tokens, seconds = steps + 10, tokens + 10 * batch, seconds + 10 * (0.02 + 0.001 * batch)
        report = worker("worker-1", "decode", steps=steps, computed_tokens=tokens, step_seconds=seconds)
        signals = meter.observe([report], tick * TICK)
    assert signals.decode_step is not None
    assert signals.decode_step.fixed == pytest.approx(0.02, rel=0.01)
    assert signals.decode_step.each == pytest.approx(0.001, rel=0.01)
    assert signals.prefill_step is None
    assert not signals.complete


def test_an_idle_role_keeps_what_its_steps_cost() -> None:
    meter = Meter()
    for tick in range(5):
        reports = [worker("w", "prefill", steps=tick, computed_tokens=512 * tick, step_seconds=0.2 * tick)]
        signals = meter.observe(reports, tick * TICK)
    before = signals.prefill_step
    assert before is not None
    signals = meter.observe(reports, 5000.0)
    assert signals.prefill_step == before
    assert signals.chunk_tokens == 512


def test_the_length_of_new_requests_follows_the_young_ones() -> None:
    meter = Meter()
    meter.observe([router()], 0.0)
    ended = {"streams": 20, "completion_tokens": 4000}
    long = meter.observe([router(**ended)], 0.5).young_tokens
    short = meter.observe([router(**ended, young_tokens=600, young_ended=30)], 1.0).young_tokens
    longer = meter.observe([router(**ended, young_tokens=6000, young_ended=0)], 1.5).young_tokens
    assert long == pytest.approx(200.0)
    assert short < 35.0
    assert longer > 1000.0


def test_attained_shares_are_unknown_without_requests() -> None:
    meter = Meter()
    signals = meter.observe([router()], 0.0)
    assert signals.ttft_attained is None
    assert signals.tpot_attained is None
    signals = meter.observe([router(first_tokens=10, ttft_attained=9, streams=4, tpot_attained=1)], 0.5)
    assert signals.ttft_attained == pytest.approx(0.9)
    assert signals.tpot_attained == pytest.approx(0.25)


def test_only_workers_that_take_requests_count() -> None:
    reports = [
        worker("a", "prefill", pending_tokens=70),
        worker("b", "decode", Requests(running=3, free_slots=5)),
        worker("c", "prefill", state=MEMBER_STATE_DRAINING, pending_tokens=30),
        router(queued_tokens=100, queued_streams=2),
    ]
    signals = Meter().observe(reports, 0.0)
    assert (signals.prefill, signals.decode) == (1, 1)
    assert signals.backlog_tokens == 200, "what waits on a worker that ends waits as well"
    assert signals.stream_slots == 8
    assert signals.queued_streams == 2
