"""Members as the supervisor's membership sees them, and the clock that it reads."""

from typing import Any

from kvrelay.cluster.membership.membership import Membership, Verdict
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY, ROLE_PREFILL, Member, MemberState, Role

TICK = 0.1


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


def state_of(membership: Membership, name: str) -> MemberState | None:
    return {entry.name: entry.state for entry in membership.members()}.get(name)


def ticks(membership: Membership, clock: Clock, seconds: float) -> list[Verdict]:
    """Lets time pass with a tick every 0.1 s, as the supervisor does. Returns who was declared dead."""
    died = []
    for _ in range(round(seconds / TICK)):
        clock.now += TICK
        died += membership.tick()
    return died
