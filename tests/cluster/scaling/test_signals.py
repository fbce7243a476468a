"""Signals: rates from totals, whatever is lost or starts again on the way."""

import pytest

from kvrelay.cluster.scaling.signals import WINDOW_SECONDS, Meter, PoolRole
from kvrelay.costs.step import StepCost
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    ROLE_ROUTER,
    Member,
    MemberState,
    MemberStatus,
)
from kvrelay.internal.v1.worker_pb2 import Costs, Load, Requests, Traffic
from kvrelay.rpc.identity import ROLES

TICK = 0.5


def worker(
    name: str,
    role: PoolRole,
    requests: Requests | None = None,
    state: MemberState = MEMBER_STATE_READY,
    costs: Costs | None = None,
    **figures: float,
) -> MemberStatus:
    load = Load(requests=requests, costs=costs, **figures)  # type: ignore[arg-type]  # by name
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
    assert signals.cached_tokens == pytest.approx(60.0)


def test_the_costs_are_the_means_of_those_that_workers_report() -> None:
    costs = [Costs(fixed=fixed, token=fixed / 4, chunk=512) for fixed in (0.25, 0.75)]
    reports = [worker(f"prefill-{number}", "prefill", costs=each) for number, each in enumerate(costs)]
    signals = Meter().observe([*reports, worker("prefill-2", "prefill"), worker("decode-0", "decode")], 0.0)
    assert signals.prefill_step == StepCost(fixed=0.5, token=0.125), "one that hasn't measured yet says nothing"
    assert signals.chunk_tokens == 512
    assert signals.decode_step is None
    assert not signals.complete


def test_prompts_that_decode_workers_compute_are_no_work_of_prefill_and_no_tokens_of_streams() -> None:
    def reports(done: int) -> list[MemberStatus]:
        return [
            router(requests=10 * done, prompt_tokens=1000 * done, streams=10 * done),
            worker("prefill-0", "prefill", computed_tokens=750 * done, prompt_tokens=750 * done),
            worker("decode-0", "decode", computed_tokens=450 * done, prompt_tokens=250 * done),
        ]

    meter = Meter()
    meter.observe(reports(0), 0.0)
    signals = meter.observe(reports(1), 0.5)
    assert signals.prompt_tokens == pytest.approx(75.0)
    assert signals.stream_tokens == pytest.approx(20.0)
    assert signals.in_place_tokens == pytest.approx(250 / 200)
    assert signals.context_tokens == pytest.approx(110.0)


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
