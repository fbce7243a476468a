"""Who is in the cluster, and who is believed to be alive. No I/O; the clock is injected.

                heartbeat                 silence >= suspect           silence >= dead, or process ended
    (unknown) ------------> as reported ------------------> SUSPECT ------------------------------> DEAD
                             ^  STARTING, READY, DRAINING      |                                     |
                             +---------------------------------+                     a new incarnation under
                                        heartbeat                                    the name replaces it

An incarnation that was declared dead, or whose name another incarnation took, is *fenced*: no heartbeat brings it back.
Silence counts only while this process itself runs: after its own pause (a stopped or starved supervisor) it can't
distinguish the members' silence from its own.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvrelay.engine.config import STRICT, require
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
)
from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.rpc.identity import WorkerId

REPORTABLE = (MEMBER_STATE_STARTING, MEMBER_STATE_READY, MEMBER_STATE_DRAINING)


@dataclass(frozen=True, slots=True)
class HeartbeatConfig:
    """When a silent member is given up; heartbeats come every 0.5 s."""

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    suspect_seconds: float = 1.5
    """Silence after which a member gets no new requests."""

    dead_seconds: float = 3.0
    """Silence after which an incarnation is fenced for good and replaced."""

    def __post_init__(self) -> None:
        for name in ("suspect_seconds", "dead_seconds"):
            require(0.6 <= getattr(self, name) <= 3600, name, getattr(self, name), "0.6 to 3600")
        allowed = f"at least suspect_seconds ({self.suspect_seconds})"
        require(self.dead_seconds >= self.suspect_seconds, "dead_seconds", self.dead_seconds, allowed)


class InvalidMember(ValueError):
    """A heartbeat lacks a required field; the text names it."""


@dataclass(slots=True)
class _Entry:
    member: Member
    """As last reported, except `state`, which is what this process believes."""
    load: Load
    heard: float

    @property
    def id(self) -> WorkerId:
        return WorkerId(self.member.name, self.member.incarnation)


class Membership:
    """The members by name, one incarnation each. `version` grows with every change that members must learn of."""

    def __init__(self, timeouts: HeartbeatConfig | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeouts = timeouts or HeartbeatConfig()
        self._clock = clock
        self._last = clock()
        self._now = 0.0
        self._entries: dict[str, _Entry] = {}
        # Kept for good, about 100 bytes for each replaced process: a forgotten zombie could return.
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
            entry.member.loaded = member.loaded  # only `kvrelay status` shows it
            changed = entry.member != member
        entry.member.CopyFrom(member)
        entry.load, entry.heard = load, self._now
        self.version += changed
        return True

    def gone(self, worker: WorkerId) -> bool:
        """The process of this incarnation has ended; False if it isn't the present one, or is dead already."""
        self._advance()
        self._fenced.add(worker.incarnation)
        entry = self._entries.get(worker.name)
        return entry is not None and entry.id == worker and self._enter(entry, MEMBER_STATE_DEAD)

    def remove(self, name: str) -> None:
        """Forgets a member that was asked to end; its incarnation stays fenced."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._fenced.add(entry.member.incarnation)
            self.version += 1

    def tick(self) -> list[WorkerId]:
        """Applies the silence up to now; returns the incarnations that it declares dead. Call it often."""
        self._advance()
        died = []
        for entry in self._entries.values():
            silence = self._now - entry.heard
            if silence >= self._timeouts.dead_seconds:
                if self._enter(entry, MEMBER_STATE_DEAD):
                    self._fenced.add(entry.member.incarnation)
                    died.append(entry.id)
            elif silence >= self._timeouts.suspect_seconds and entry.member.state != MEMBER_STATE_DEAD:
                self._enter(entry, MEMBER_STATE_SUSPECT)
        return died

    def members(self) -> list[Member]:
        """All members, including dead ones that are not yet replaced; in order of first heartbeat."""
        return [entry.member for entry in self._entries.values()]

    def statuses(self) -> list[MemberStatus]:
        """All members with load and heartbeat age."""
        self._advance()
        return [
            MemberStatus(member=entry.member, load=entry.load, heartbeat_age_seconds=self._now - entry.heard)
            for entry in self._entries.values()
        ]

    def present(self, name: str) -> WorkerId | None:
        """The present incarnation under this name, dead or alive."""
        entry = self._entries.get(name)
        return None if entry is None else entry.id

    def state(self, name: str) -> MemberState | None:
        """The state of the member of this name."""
        entry = self._entries.get(name)
        return None if entry is None else entry.member.state

    @property
    def ready(self) -> bool:
        """A router, and a prefill and a decode worker or a co-located one, are READY."""
        roles = {entry.member.role for entry in self._entries.values() if entry.member.state == MEMBER_STATE_READY}
        return ROLE_ROUTER in roles and (ROLE_COLOCATED in roles or {ROLE_PREFILL, ROLE_DECODE} <= roles)

    def _enter(self, entry: _Entry, state: MemberState) -> bool:
        """Changes the state; False if it is the state already."""
        if entry.member.state == state:
            return False
        entry.member.state = state
        self.version += 1
        return True

    def _advance(self) -> None:
        now = self._clock()
        # A gap between two calls that is longer than a third of the time to suspicion is this process's own pause.
        self._now += min(max(now - self._last, 0.0), self._timeouts.suspect_seconds / 3)
        self._last = now


def _check(member: Member) -> None:
    for field in ("name", "incarnation"):
        if not getattr(member, field):
            raise InvalidMember(f"member.{field} is empty")
    if member.role not in (ROLE_PREFILL, ROLE_DECODE, ROLE_COLOCATED, ROLE_ROUTER):
        raise InvalidMember(f"member.role of {member.name} is {member.role}")
    if member.state not in REPORTABLE:
        raise InvalidMember(f"member.state of {member.name} is {member.state}; reported are {REPORTABLE}")
