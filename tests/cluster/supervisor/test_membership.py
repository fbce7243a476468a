"""Membership: whatever members and clocks do, an incarnation that was declared dead never comes back; a worker whose
engine hangs, has failed or drains for too long is given up though it sends heartbeats."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from kvrelay.cluster.membership.membership import (
    DRAIN_MARGIN_SECONDS,
    FAILED_SECONDS,
    InvalidMember,
    Membership,
    Verdict,
)
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DEAD,
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_STARTING,
    MEMBER_STATE_SUSPECT,
    MEMBER_STATE_UNSPECIFIED,
    ROLE_COLOCATED,
    ROLE_DECODE,
    ROLE_PREFILL,
    ROLE_ROUTER,
    ROLE_UNSPECIFIED,
    Member,
    MembershipRecord,
    MemberState,
    Role,
)
from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.rpc.identity import WorkerId

TICK = 0.1
"""Seconds between two ticks of the supervisor."""


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def member(
    name: str = "prefill-0",
    incarnation: str = "a",
    role: Role = ROLE_PREFILL,
    state: MemberState = MEMBER_STATE_READY,
    **more: Any,
) -> Member:
    return Member(name=name, role=role, incarnation=incarnation, address="127.0.0.1:1", state=state, **more)


def state_of(membership: Membership, name: str = "prefill-0") -> MemberState | None:
    return {entry.name: entry.state for entry in membership.members()}.get(name)


def ticks(membership: Membership, clock: Clock, seconds: float) -> list[Verdict]:
    """Lets time pass; returns who was declared dead."""
    died = []
    for _ in range(round(seconds / TICK)):
        clock.now += TICK
        died += membership.tick()
    return died


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def membership(clock: Clock) -> Membership:
    return Membership(clock=clock)


def test_silence_makes_suspect_then_dead_unless_a_heartbeat_comes(membership: Membership, clock: Clock) -> None:
    assert membership.attend(member(), Load())
    assert ticks(membership, clock, 1.4) == []
    assert state_of(membership) == MEMBER_STATE_READY
    assert ticks(membership, clock, 0.2) == []
    assert state_of(membership) == MEMBER_STATE_SUSPECT
    version = membership.version
    assert membership.attend(member(), Load())
    assert state_of(membership) == MEMBER_STATE_READY
    assert membership.version > version
    assert ticks(membership, clock, 2.8) == []
    (verdict,) = ticks(membership, clock, 0.3)
    assert verdict.worker == WorkerId("prefill-0", "a")
    assert state_of(membership) == MEMBER_STATE_DEAD
    assert ticks(membership, clock, 10) == [], "declared dead once"
    version = membership.version
    assert not membership.attend(member(), Load())
    assert (membership.version, state_of(membership)) == (version, MEMBER_STATE_DEAD)


def test_the_version_grows_only_with_changes_that_members_must_learn_of(membership: Membership) -> None:
    membership.attend(member(), Load())
    version = membership.version
    loading = member()
    loading.loaded = 0.5
    membership.attend(loading, Load(pending_tokens=7))
    assert membership.version == version
    assert membership.statuses()[0].member.loaded == 0.5
    assert membership.statuses()[0].load.pending_tokens == 7
    membership.attend(member(step_age_seconds=2, slow_step_seconds=9), Load())
    assert membership.version == version
    assert membership.members() == [member(generation=1)], "the engine's figures are not told to the others"
    for change in (
        {"state": MEMBER_STATE_DRAINING},
        {"address": "127.0.0.1:2"},
        {"transports": ["gloo"]},
    ):
        changed = member()
        for field, value in change.items():
            if field == "transports":
                changed.transports.extend(value)
            else:
                setattr(changed, field, value)
        membership.attend(changed, Load())
        assert membership.version > version, change
        version = membership.version


@pytest.mark.parametrize(
    ("roles", "ready"),
    [
        ((), False),
        ((ROLE_ROUTER,), False),
        ((ROLE_ROUTER, ROLE_PREFILL), False),
        ((ROLE_ROUTER, ROLE_DECODE), False),
        ((ROLE_PREFILL, ROLE_DECODE), False),
        ((ROLE_COLOCATED,), False),
        ((ROLE_ROUTER, ROLE_PREFILL, ROLE_DECODE), True),
        ((ROLE_ROUTER, ROLE_COLOCATED), True),
    ],
)
def test_ready_means_that_a_request_can_be_served(membership: Membership, roles: tuple[Role, ...], ready: bool) -> None:
    for role in roles:
        membership.attend(member(Role.Name(role), Role.Name(role), role, MEMBER_STATE_STARTING), Load())
    assert not membership.ready
    for role in roles:
        membership.attend(member(Role.Name(role), Role.Name(role), role), Load())
    assert membership.ready is ready


@pytest.mark.parametrize(
    "broken",
    [
        member(name=""),
        member(incarnation=""),
        member(role=ROLE_UNSPECIFIED),
        member(state=MEMBER_STATE_UNSPECIFIED),
        member(state=MEMBER_STATE_DEAD),
        member(state=MEMBER_STATE_SUSPECT),
    ],
)
def test_a_heartbeat_without_a_required_field_is_refused(membership: Membership, broken: Member) -> None:
    with pytest.raises(InvalidMember, match=r"member\.\w+"):
        membership.attend(broken, Load())
    assert membership.members() == []


def test_an_old_step_makes_suspect_then_dead(membership: Membership, clock: Clock) -> None:
    def beats(age: float, **more: Any) -> MemberState | None:
        assert membership.attend(member(step_age_seconds=age, **more), Load())
        return state_of(membership)

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
    assert state_of(membership) == MEMBER_STATE_SUSPECT
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


def test_a_failed_engine_is_given_two_seconds(membership: Membership, clock: Clock) -> None:
    for _ in range(round(FAILED_SECONDS / TICK) - 1):
        assert membership.attend(member(failed=True, state=MEMBER_STATE_DRAINING), Load())
        assert state_of(membership) == MEMBER_STATE_SUSPECT
        assert ticks(membership, clock, TICK) == []
    membership.attend(member(failed=True, state=MEMBER_STATE_DRAINING), Load())
    ((_, reason),) = ticks(membership, clock, 2 * TICK)
    assert "engine failed" in reason


@pytest.mark.parametrize("asked", [False, True])
def test_a_drain_that_nobody_asked_for_has_a_deadline(clock: Clock, asked: bool) -> None:
    membership = Membership(clock=clock, drain_seconds=lambda: 7)
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


# Restarts.


def restarted(membership: Membership, clock: Clock) -> Membership:
    """Another supervisor's membership, which continues from the record of this one as it is written."""
    fresh = Membership(clock=clock)
    fresh.restore(MembershipRecord.FromString(membership.snapshot().SerializeToString()))
    return fresh


def test_a_lost_record_is_learned_from_the_members(clock: Clock) -> None:
    membership = Membership(clock=clock)
    assert membership.attend(member(incarnation="zombie", generation=3), Load())
    assert membership.attend(member(incarnation="present", generation=7), Load())
    assert not membership.attend(member(incarnation="zombie", generation=3), Load())
    assert not membership.attend(member(incarnation="other", generation=7), Load()), "the same number twice"
    assert membership.attend(member("decode-0", "new", ROLE_DECODE), Load())
    assert [each.generation for each in membership.members()] == [7, 8]


def test_restored_members_keep_their_state_until_they_had_time_to_come(membership: Membership, clock: Clock) -> None:
    membership.attend(member(), Load())
    fresh = restarted(membership, clock)
    assert not fresh.complete
    assert ticks(fresh, clock, 3 + 1.4) == []
    assert state_of(fresh, "prefill-0") == MEMBER_STATE_READY
    assert fresh.statuses()[0].heartbeat_age_seconds >= 0
    assert fresh.statuses()[0].restored
    ticks(fresh, clock, 0.2)
    assert state_of(fresh, "prefill-0") == MEMBER_STATE_SUSPECT
    assert not fresh.complete
    (verdict,) = ticks(fresh, clock, 1.6)
    assert verdict.worker == WorkerId("prefill-0", "a")
    assert fresh.complete


class Fencing(RuleBasedStateMachine):
    """Processes of three names start, send heartbeats, fall silent, wake up and are replaced, in any order, while the
    supervisor restarts."""

    processes = Bundle("processes")

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.membership = Membership(clock=self.clock)
        self.given_up: set[str] = set()
        self.heard: dict[str, float] = {}
        self.generations: dict[str, int] = {}
        """Generation that each incarnation has been told."""
        self.count = 0
        self.version = 0
        self.issued = 0

    @rule(target=processes, name=st.sampled_from(["prefill-0", "decode-0", "router-0"]))
    def spawn(self, name: str) -> WorkerId:
        self.count += 1
        return WorkerId(name, f"{name}#{self.count}")

    @rule(
        process=processes,
        state=st.sampled_from([MEMBER_STATE_STARTING, MEMBER_STATE_READY, MEMBER_STATE_DRAINING]),
        answered=st.booleans(),
    )
    def beat(self, process: WorkerId, state: MemberState, answered: bool) -> None:
        before = self.membership.present(process.name)
        known = self.generations.get(process.incarnation, 0)
        beat = member(process.name, process.incarnation, ROLE_PREFILL, state, generation=known)
        admitted = self.membership.attend(beat, Load())
        assert admitted == (process.incarnation not in self.given_up)
        if admitted:
            if before is not None and before != process:
                self.given_up.add(before.incarnation)
            assert self.membership.present(process.name) == process
            assert state_of(self.membership, process.name) == state
            generation = next(each.generation for each in self.membership.members() if each.name == process.name)
            if before != process and not known:
                assert generation > self.issued, "issued in order"
                self.issued = generation
            assert generation <= self.issued
            assert known in (0, generation)
            self.heard[process.incarnation] = self.clock.now
            if answered:
                self.generations[process.incarnation] = generation

    @rule(seconds=st.floats(0, 100))
    def supervisor_restarts(self, seconds: float) -> None:
        self.clock.now += seconds
        self.membership = restarted(self.membership, self.clock)
        self.version = 0

    @rule(process=consumes(processes))
    def end(self, process: WorkerId) -> None:
        if self.membership.present(process.name) == process:
            self.membership.gone(process.name)
            assert state_of(self.membership, process.name) == MEMBER_STATE_DEAD
        self.given_up.add(process.incarnation)

    @rule(name=st.sampled_from(["prefill-0", "decode-0"]))
    def stop(self, name: str) -> None:
        worker = self.membership.present(name)
        self.membership.remove(name)
        if worker is not None:
            self.given_up.add(worker.incarnation)
        assert self.membership.present(name) is None

    @rule(seconds=st.sampled_from([TICK, 0.5, 1.0, 1.6, 3.1, 7.0]))
    def time_passes(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK)):
            self.clock.now += TICK
            for worker, _ in self.membership.tick():
                assert self.clock.now - self.heard[worker.incarnation] >= 3.0 - 1e-6
                self.given_up.add(worker.incarnation)

    @rule(seconds=st.floats(0, 1e6))
    @precondition(lambda self: self.count > 0)
    def supervisor_sleeps(self, seconds: float) -> None:
        """The supervisor's own pause changes nothing for a member that sent a heartbeat just before it."""
        fresh = {name for name, at in self.heard.items() if self.clock.now - at < 1} - self.given_up
        before = {entry.incarnation: entry.state for entry in self.membership.members()}
        self.clock.now += seconds
        for worker, _ in self.membership.tick():
            self.given_up.add(worker.incarnation)
        after = {entry.incarnation: entry.state for entry in self.membership.members()}
        assert {name: after.get(name) for name in fresh} == {name: before.get(name) for name in fresh}

    @invariant()
    def names_are_unique_and_the_given_up_are_not_served(self) -> None:
        members = self.membership.members()
        assert len({entry.name for entry in members}) == len(members)
        for entry in members:
            assert (entry.incarnation in self.given_up) == (entry.state == MEMBER_STATE_DEAD)

    @invariant()
    def the_version_never_falls(self) -> None:
        assert self.membership.version >= self.version
        self.version = self.membership.version


Fencing.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFencing = Fencing.TestCase
