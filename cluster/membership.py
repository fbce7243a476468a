"""Who is in the cluster, and who is believed to be alive. No I/O; time comes from an injected clock.

                heartbeat                 silence >= suspect           silence >= dead, or known to be gone
    (unknown) ------------> as reported ------------------> SUSPECT ------------------------------> DEAD
                             ^  STARTING, READY, DRAINING      |                                     |
                             +---------------------------------+                     a new incarnation under
                                        heartbeat                                    the name takes its place

An incarnation that was declared dead, or whose name another incarnation took, is *fenced*: no heartbeat brings it back.
Silence counts only the time in which this process itself ran: after its own pause (a stopped or starved supervisor)
it can't tell the members' silence from its own.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DEAD,
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_STARTING,
    MEMBER_STATE_SUSPECT,
    ROLE_COLOCATED,
    ROLE_DECODE,
    ROLE_PREFILL,
    ROLE_ROUTER,
    Member,
    MemberState,
    MemberStatus,
    Role,
)
from kvrelay.internal.v1.worker_pb2 import Load

REPORTABLE = (MEMBER_STATE_STARTING, MEMBER_STATE_READY, MEMBER_STATE_DRAINING)


class InvalidMember(ValueError):
    """A heartbeat that says too little; the text names the field."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One life of one member."""

    name: str
    incarnation: str


@dataclass(slots=True)
class _Entry:
    member: Member
    """As last reported, but for `state`, which is what this process believes."""
    load: Load
    heard: float


class Membership:
    """The members by name, one incarnation each, and a version that grows with every change that members care about."""

    def __init__(
        self,
        suspect_seconds: float = 1.5,
        dead_seconds: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._suspect = suspect_seconds
        self._dead = dead_seconds
        self._clock = clock
        self._last = clock()
        self._now = 0.0
        self._entries: dict[str, _Entry] = {}
        # Kept for good, about 100 bytes for each replaced process: to forget one would let its zombie return.
        self._fenced: set[str] = set()
        self.version = 0

    def attend(self, member: Member, load: Load) -> bool:
        """Takes a heartbeat; False: this incarnation is fenced and must stop.

        Raises:
            InvalidMember: the heartbeat lacks a name, an incarnation, a role or a state.
        """
        _check(member)
        self._advance()
        if member.incarnation in self._fenced:
            return False
        entry = self._entries.get(member.name)
        if entry is None or entry.member.incarnation != member.incarnation:
            if entry is not None:
                self._fenced.add(entry.member.incarnation)
            changed = True
            entry = self._entries[member.name] = _Entry(Member(), load, self._now)
        else:
            changed = _told(entry.member) != _told(member)
        entry.member.CopyFrom(member)
        entry.load, entry.heard = load, self._now
        if changed:
            self.version += 1
        return True

    def gone(self, identity: Identity) -> bool:
        """The process of this incarnation has ended; False if it isn't the present one, or is dead already."""
        self._advance()
        self._fenced.add(identity.incarnation)
        entry = self._entries.get(identity.name)
        if entry is None or entry.member.incarnation != identity.incarnation:
            return False
        return self._enter(entry, MEMBER_STATE_DEAD)

    def remove(self, name: str) -> None:
        """Forgets a member that was told to end; its incarnation stays fenced."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._fenced.add(entry.member.incarnation)
            self.version += 1

    def tick(self) -> list[Identity]:
        """Applies the silence up to now; returns the incarnations that it declares dead. Call it often."""
        self._advance()
        died = []
        for entry in self._entries.values():
            silence = self._now - entry.heard
            if silence >= self._dead:
                if self._enter(entry, MEMBER_STATE_DEAD):
                    self._fenced.add(entry.member.incarnation)
                    died.append(Identity(entry.member.name, entry.member.incarnation))
            elif silence >= self._suspect and entry.member.state != MEMBER_STATE_DEAD:
                self._enter(entry, MEMBER_STATE_SUSPECT)
        return died

    def members(self) -> list[Member]:
        """Everyone, the dead ones not yet replaced among them; in order of first attendance."""
        return [entry.member for entry in self._entries.values()]

    def statuses(self) -> list[MemberStatus]:
        """Everyone with load and heartbeat age."""
        self._advance()
        return [
            MemberStatus(member=entry.member, load=entry.load, heartbeat_age_seconds=self._now - entry.heard)
            for entry in self._entries.values()
        ]

    def incarnation(self, name: str) -> Identity | None:
        """The present incarnation under this name, dead or alive."""
        entry = self._entries.get(name)
        return None if entry is None else Identity(name, entry.member.incarnation)

    def state(self, name: str) -> MemberState | None:
        """What is believed of the member of this name."""
        entry = self._entries.get(name)
        return None if entry is None else entry.member.state

    @property
    def ready(self) -> bool:
        """A router, and a prefill and a decode worker or a co-located one, are READY."""
        roles: set[Role] = {
            entry.member.role for entry in self._entries.values() if entry.member.state == MEMBER_STATE_READY
        }
        return ROLE_ROUTER in roles and (ROLE_COLOCATED in roles or {ROLE_PREFILL, ROLE_DECODE} <= roles)

    def _enter(self, entry: _Entry, state: MemberState) -> bool:
        if entry.member.state == state:
            return False
        entry.member.state = state
        self.version += 1
        return True

    def _advance(self) -> None:
        now = self._clock()
        # A gap between two calls that is longer than a third of the time to suspicion is this process's own pause.
        self._now += min(max(now - self._last, 0.0), self._suspect / 3)
        self._last = now


def _check(member: Member) -> None:
    for field in ("name", "incarnation"):
        if not getattr(member, field):
            raise InvalidMember(f"member.{field} is empty")
    if member.role not in (ROLE_PREFILL, ROLE_DECODE, ROLE_COLOCATED, ROLE_ROUTER):
        raise InvalidMember(f"member.role of {member.name} is {member.role}")
    if member.state not in REPORTABLE:
        raise InvalidMember(f"member.state of {member.name} is {member.state}; reported are {REPORTABLE}")


def _told(member: Member) -> Member:
    """What a change of makes a new membership: all but the progress of loading, which only `kvrelay status` shows."""
    told = Member()
    told.CopyFrom(member)
    told.ClearField("loaded")
    return told
