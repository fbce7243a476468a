"""Membership: a worker whose engine hangs, has failed or drains for too long is given up though it sends heartbeats."""

from typing import Any

import pytest

from kvrelay.cluster.membership.membership import DRAIN_MARGIN_SECONDS, FAILED_SECONDS, Membership, Verdict
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_SUSPECT,
    MemberState,
)
from kvrelay.internal.v1.worker_pb2 import Load
from support.members import TICK, Clock, member, state_of, ticks


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def membership(clock: Clock) -> Membership:
    return Membership(clock=clock)


def test_an_old_step_makes_suspect_then_dead(membership: Membership, clock: Clock) -> None:
    def beats(age: float, **more: Any) -> MemberState | None:
        assert membership.attend(member(step_age_seconds=age, **more), Load())
        return state_of(membership, "prefill-0")

    assert beats(2.9) == MEMBER_STATE_READY
    assert beats(3.0) == MEMBER_STATE_SUSPECT
    assert beats(0.0) == MEMBER_STATE_READY
    assert beats(19.0, slow_step_seconds=4.0) == MEMBER_STATE_READY
    assert beats(20.0, slow_step_seconds=4.0) == MEMBER_STATE_SUSPECT
    assert beats(79.0, slow_step_seconds=4.0) == MEMBER_STATE_SUSPECT
    assert ticks(membership, clock, TICK) == []
    assert beats(30.1) == MEMBER_STATE_SUSPECT
    ((worker, reason),) = ticks(membership, clock, TICK)
    assert (worker.incarnation, reason) == ("a", "its step has been running for 30.1 s")
    assert not membership.attend(member(), Load())


@pytest.mark.parametrize("connections", [0, 1, 2])
def test_silence_on_an_open_connection_is_that_of_a_busy_process(
    membership: Membership, clock: Clock, connections: int
) -> None:
    assert membership.attend(member(), Load())
    worker = membership.present("prefill-0")
    assert worker is not None
    for _ in range(connections):
        membership.connected(worker)
    assert ticks(membership, clock, 2.9) == []
    assert state_of(membership, "prefill-0") == MEMBER_STATE_SUSPECT
    if connections:
        assert ticks(membership, clock, 20.0) == []
        for _ in range(connections - 1):
            membership.disconnected(worker)
        assert ticks(membership, clock, 6.0) == []
        if connections == 1:
            assert membership.attend(member(), Load())
            membership.disconnected(worker)
            assert ticks(membership, clock, 2.9) == []
    ((dead, reason),) = ticks(membership, clock, 2.0)
    assert dead == worker
    assert reason == f"no heartbeat for {30 if connections == 2 else 3} s"


def test_the_engines_figures_are_not_told_to_the_others(membership: Membership) -> None:
    membership.attend(member(step_age_seconds=1, slow_step_seconds=9), Load())
    version = membership.version
    membership.attend(member(step_age_seconds=2, slow_step_seconds=9), Load())
    assert membership.version == version
    (published,) = membership.members()
    assert published == member(generation=1)


def test_a_failed_engine_is_given_two_seconds(membership: Membership, clock: Clock) -> None:
    for _ in range(round(FAILED_SECONDS / TICK) - 1):
        assert membership.attend(member(failed=True, state=MEMBER_STATE_DRAINING), Load())
        assert state_of(membership, "prefill-0") == MEMBER_STATE_SUSPECT
        assert ticks(membership, clock, TICK) == []
    membership.attend(member(failed=True, state=MEMBER_STATE_DRAINING), Load())
    ((_, reason),) = ticks(membership, clock, 2 * TICK)
    assert "engine failed" in reason


@pytest.mark.parametrize("asked", [False, True])
def test_a_drain_that_nobody_asked_for_has_a_deadline(clock: Clock, asked: bool) -> None:
    membership = Membership(clock=clock, drain_seconds=7)
    membership.attend(member(), Load())
    if asked:
        membership.leave("prefill-0")
    died: list[Verdict] = []
    seconds = 0.0
    while not died and seconds < 60:
        membership.attend(member(state=MEMBER_STATE_DRAINING), Load())
        died = ticks(membership, clock, TICK)
        seconds += TICK
    assert bool(died) is not asked
    if not asked:
        assert seconds == pytest.approx(7 + DRAIN_MARGIN_SECONDS, abs=2 * TICK)
        assert "draining" in died[0].reason
