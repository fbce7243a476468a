"""Membership: whatever members, silence and clocks do, an incarnation that was given up never comes back."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from kvrelay.cluster.membership import InvalidMember, Membership
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
    MemberState,
    Role,
)
from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.rpc.identity import WorkerId

TICK = 0.1


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def member(
    name: str = "prefill-0",
    incarnation: str = "a",
    role: Role = ROLE_PREFILL,
    state: MemberState = MEMBER_STATE_READY,
) -> Member:
    return Member(name=name, role=role, incarnation=incarnation, address="127.0.0.1:1", state=state)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def membership(clock: Clock) -> Membership:
    return Membership(clock=clock)


@pytest.fixture
def wait(clock: Clock, membership: Membership) -> Callable[[float], list[WorkerId]]:
    """Lets time pass as the supervisor does: with a tick every 0.1 s. Returns who was declared dead."""

    def passes(seconds: float) -> list[WorkerId]:
        died = []
        for _ in range(round(seconds / TICK)):
            clock.now += TICK
            died += membership.tick()
        return died

    return passes


def test_silence_makes_suspect_then_dead(membership: Membership, wait: Callable[[float], list[WorkerId]]) -> None:
    assert membership.attend(member(), Load())
    assert wait(1.4) == []
    assert membership.state("prefill-0") == MEMBER_STATE_READY
    assert wait(0.2) == []
    assert membership.state("prefill-0") == MEMBER_STATE_SUSPECT
    assert wait(1.2) == []
    assert wait(0.3) == [WorkerId("prefill-0", "a")]
    assert membership.state("prefill-0") == MEMBER_STATE_DEAD
    assert wait(10) == [], "declared dead once"


def test_a_heartbeat_brings_a_suspect_back(membership: Membership, wait: Callable[[float], list[WorkerId]]) -> None:
    membership.attend(member(), Load())
    wait(2)
    version = membership.version
    assert membership.attend(member(), Load())
    assert membership.state("prefill-0") == MEMBER_STATE_READY
    assert membership.version > version


def test_the_dead_stay_dead(membership: Membership, wait: Callable[[float], list[WorkerId]]) -> None:
    membership.attend(member(), Load())
    wait(4)
    version = membership.version
    assert not membership.attend(member(), Load())
    assert membership.state("prefill-0") == MEMBER_STATE_DEAD
    assert membership.version == version


def test_a_new_incarnation_takes_the_name_and_fences_the_old(membership: Membership) -> None:
    membership.attend(member(incarnation="a"), Load())
    assert membership.attend(member(incarnation="b", state=MEMBER_STATE_STARTING), Load())
    assert membership.present("prefill-0") == WorkerId("prefill-0", "b")
    assert not membership.attend(member(incarnation="a"), Load())
    assert membership.present("prefill-0") == WorkerId("prefill-0", "b")
    assert len(membership.members()) == 1


def test_a_process_that_is_known_to_be_gone_is_dead_at_once(membership: Membership) -> None:
    membership.attend(member(incarnation="b"), Load())
    assert not membership.gone(WorkerId("prefill-0", "a"))
    assert membership.state("prefill-0") == MEMBER_STATE_READY
    assert membership.gone(WorkerId("prefill-0", "b"))
    assert not membership.gone(WorkerId("prefill-0", "b"))
    assert membership.state("prefill-0") == MEMBER_STATE_DEAD


def test_a_supervisor_that_slept_gives_nobody_up_for_it(clock: Clock, membership: Membership) -> None:
    membership.attend(member(), Load())
    clock.now += 3600
    assert membership.tick() == []
    assert membership.state("prefill-0") == MEMBER_STATE_READY
    assert membership.attend(member(), Load())


def test_the_version_grows_with_what_members_care_about_only(membership: Membership) -> None:
    membership.attend(member(), Load())
    version = membership.version
    loading = member()
    loading.loaded = 0.5
    membership.attend(loading, Load(pending_tokens=7))
    assert membership.version == version
    assert membership.statuses()[0].member.loaded == 0.5
    assert membership.statuses()[0].load.pending_tokens == 7
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
def test_a_heartbeat_that_says_too_little_is_refused(membership: Membership, broken: Member) -> None:
    with pytest.raises(InvalidMember, match=r"member\.\w+"):
        membership.attend(broken, Load())
    assert membership.members() == []


class Fencing(RuleBasedStateMachine):
    """Processes under three names start, beat, fall silent, wake up and are replaced, in any order and rhythm."""

    processes = Bundle("processes")

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.membership = Membership(clock=self.clock)
        self.given_up: set[str] = set()
        self.heard: dict[str, float] = {}
        self.count = 0
        self.version = 0

    @rule(target=processes, name=st.sampled_from(["prefill-0", "decode-0", "router-0"]))
    def spawn(self, name: str) -> WorkerId:
        self.count += 1
        return WorkerId(name, f"{name}#{self.count}")

    @rule(process=processes, state=st.sampled_from([MEMBER_STATE_STARTING, MEMBER_STATE_READY, MEMBER_STATE_DRAINING]))
    def beat(self, process: WorkerId, state: MemberState) -> None:
        before = self.membership.present(process.name)
        admitted = self.membership.attend(member(process.name, process.incarnation, ROLE_PREFILL, state), Load())
        assert admitted == (process.incarnation not in self.given_up)
        if admitted:
            if before is not None and before != process:
                self.given_up.add(before.incarnation)
            assert self.membership.present(process.name) == process
            assert self.membership.state(process.name) == state
            self.heard[process.incarnation] = self.clock.now

    @rule(process=consumes(processes))
    def end(self, process: WorkerId) -> None:
        present = self.membership.present(process.name) == process
        dead = self.membership.state(process.name) == MEMBER_STATE_DEAD
        assert self.membership.gone(process) == (present and not dead)
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
            for worker in self.membership.tick():
                assert self.clock.now - self.heard[worker.incarnation] >= 3.0 - 1e-6
                self.given_up.add(worker.incarnation)

    @rule(seconds=st.floats(0, 1e6))
    @precondition(lambda self: self.count > 0)
    def supervisor_sleeps(self, seconds: float) -> None:
        """Nobody who was heard just before is given up for it."""
        fresh = {name for name, at in self.heard.items() if self.clock.now - at < 1}
        self.clock.now += seconds
        for worker in self.membership.tick():
            assert worker.incarnation not in fresh
            self.given_up.add(worker.incarnation)

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
