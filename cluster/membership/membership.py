"""Who is in the cluster, and who is believed to be alive. No I/O; the clock is injected.

                heartbeat                 silent or stuck >= suspect        gone or stuck >= dead, failed,
    (unknown) ------------> as reported ------------------------> SUSPECT  or process ended
                             ^  STARTING, READY, DRAINING            |  ------------------------------> DEAD
                             +---------------------------------------+                                   |
                                 heartbeat, and steps go on              a new incarnation under the name replaces it

A member is *stuck* if its engine's step, or a turn of its event loop, takes long, as its heartbeats say. A silent one
is *gone* if its connection is closed, as that of a killed or frozen process is within two seconds: gRPC's own threads
answer pings. A process that is silent on an open connection is in one call that holds the interpreter: it is stuck.

Every incarnation gets a *generation* at its first heartbeat: a number that grows over the whole cluster. Of two
incarnations of a name the one with the greater generation counts; the other one is *fenced*: no heartbeat brings it
back, also after a restart of the supervisor (`snapshot`, `restore`). A member repeats its generation in its heartbeats,
so that a supervisor without any record learns the order from the members themselves.

Silence counts only while this process itself runs: after its own pause (a stopped or starved supervisor) it can't
distinguish the members' silence from its own. For the same reason a member that was restored from the record keeps its
state until it has had time to find the supervisor again.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from annotated_types import Interval

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
    ROLE_UNSPECIFIED,
    Member,
    MembershipRecord,
    MemberState,
    MemberStatus,
    NameRecord,
    Role,
)
from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.machine.options import Options, require
from kvrelay.rpc.identity import WorkerId

REPORTABLE = (MEMBER_STATE_STARTING, MEMBER_STATE_READY, MEMBER_STATE_DRAINING)
SUSPECT_FACTOR, DEAD_FACTOR = 5.0, 20.0
"""A running step makes a worker suspect, and dead, that takes so many times as long as its slow ones."""
FAILED_SECONDS = 2.0
"""Seconds for a worker whose engine has failed to return its requests and end by itself."""
DRAIN_MARGIN_SECONDS = 5.0
"""Seconds beyond the cluster's drain_seconds for a member that drains without having been asked to."""


Silence = Annotated[float, Interval(ge=0.6, le=3600)]


@dataclass(frozen=True, slots=True)
class HeartbeatConfig(Options):
    """Options that say when a silent or stuck member is given up; heartbeats come every 0.5 s."""

    suspect_seconds: Silence = 1.5
    """Silence after which a member gets no new requests."""

    dead_seconds: Silence = 3.0
    """Silence after which an incarnation without a connection is fenced for good and replaced."""

    step_suspect_seconds: Silence = 3.0
    """Age of a worker's running step after which it gets no new requests; 5 times its slow steps, if that is longer.
    Also time for which a member's event loop doesn't turn."""

    step_dead_seconds: Silence = 30.0
    """Age of a worker's running step after which it is killed and replaced; 20 times its slow steps, if longer. Also
    time for which a member's event loop doesn't turn, and silence of a member whose connection is open."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        for before, after in (("suspect_seconds", "dead_seconds"), ("step_suspect_seconds", "step_dead_seconds")):
            least = getattr(self, before)
            require(getattr(self, after) >= least, after, getattr(self, after), f"at least {before} ({least})")


class InvalidMember(ValueError):
    """A heartbeat lacks a required field; the text names it."""


class Verdict(NamedTuple):
    """An incarnation that was declared dead."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of what happened to members since this process started, by role where it has one."""

    deaths: Counter[Role] = field(default_factory=Counter)
    """Members that ended without having been asked to, or were declared dead."""
    replacements: Counter[Role] = field(default_factory=Counter)
    """Members that came back as another incarnation."""
    drains: Counter[Role] = field(default_factory=Counter)
    """Members that began to drain."""
    role_changes: Counter[Role] = field(default_factory=Counter)
    """Changes of a worker's role, by the new role."""
    fences: Counter[Role] = field(default_factory=Counter)
    """Heartbeats of fenced incarnations."""


@dataclass(slots=True)
class _Name:
    """The part of a name's state that is kept for good."""

    generation: int = 0
    """Generation of its latest incarnation."""
    fenced: set[str] = field(default_factory=set)
    """Earlier incarnations that never sent their generation. The others are recognized by it, so this stays small."""


@dataclass(slots=True)
class _Entry:
    """The present incarnation under a name."""

    member: Member
    """Last report, except `state`, which is what this process believes; without the figures of the engine."""
    load: Load
    heard: float
    report: Member
    """Last heartbeat as it came."""
    acknowledged: bool = False
    """Whether it has sent its generation."""
    leaving: float | None = None
    """Monotonic time since which it reports that it drains, or has failed; None if it doesn't."""
    asked: bool = False
    """Whether it was asked to end."""
    restored: bool = False
    """Whether it is known from the record only."""
    connections: int = 0
    """Number of its open streams of heartbeats."""

    @property
    def id(self) -> WorkerId:
        return WorkerId(self.member.name, self.member.incarnation)


class Membership:
    """The members by name, one incarnation each. `version` grows with every change that members must learn of."""

    def __init__(
        self,
        timeouts: HeartbeatConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        drain_seconds: Callable[[], float] = lambda: 30.0,
    ) -> None:
        self._timeouts = timeouts or HeartbeatConfig()
        self._clock = clock
        self._drain_seconds = drain_seconds
        self._last = clock()
        self._now = 0.0
        self._generation = 0
        self._names: dict[str, _Name] = {}
        self._entries: dict[str, _Entry] = {}
        self.version = 0
        self.counts = Counts()
        self.complete = False
        """Whether every living member is known: a member that was silent since the start would count as dead by now."""

    # The record.

    def snapshot(self) -> MembershipRecord:
        """All that a restarted supervisor must know."""
        record = MembershipRecord(generation=self._generation)
        for name, known in self._names.items():
            entry = self._entries.get(name)
            record.names.append(
                NameRecord(
                    name=name,
                    generation=known.generation,
                    member=None if entry is None else entry.member,
                    acknowledged=entry is not None and entry.acknowledged,
                    fenced=sorted(known.fenced),
                )
            )
        return record

    def restore(self, record: MembershipRecord) -> None:
        """Continues from a record; for a membership that has heard nobody yet."""
        self._generation = record.generation
        for name in record.names:
            self._names[name.name] = _Name(name.generation, set(name.fenced))
            if name.HasField("member"):
                # The member hasn't been heard yet: its silence counts from the time on when it had dead_seconds to find
                # this supervisor.
                entry = _Entry(name.member, Load(), self._now + self._timeouts.dead_seconds, Member())
                entry.report.CopyFrom(name.member)
                entry.acknowledged, entry.restored = name.acknowledged, True
                self._entries[name.name] = entry
        self.version += 1

    # Changes.

    def attend(self, member: Member, load: Load) -> bool:
        """Takes a heartbeat; False: this incarnation is fenced and must stop.

        Raises:
            InvalidMember: the heartbeat lacks a name, an incarnation, a role or a state.
        """
        _check(member)
        self._advance()
        entry = self._entries.get(member.name)
        if entry is not None and entry.member.incarnation == member.incarnation:
            if entry.member.state == MEMBER_STATE_DEAD:
                self.counts.fences[member.role] += 1
                return False
        elif (entry := self._admit(member)) is None:
            self.counts.fences[member.role] += 1
            return False
        before = entry.member
        if before.role not in (ROLE_UNSPECIFIED, member.role):
            self.counts.role_changes[member.role] += 1
        entry.report, entry.load, entry.heard = Member(), load, self._now
        entry.report.CopyFrom(member)
        entry.acknowledged |= member.generation != 0
        entry.restored = False
        leaving = member.failed or member.state == MEMBER_STATE_DRAINING
        if not leaving:
            entry.leaving = None
        elif entry.leaving is None:
            entry.leaving = self._now
            self.counts.drains[member.role] += member.state == MEMBER_STATE_DRAINING
        entry.member = self._public(entry)
        entry.member.state = self._believed(entry)
        before.loaded = member.loaded  # only `kvrelay status` shows it
        self.version += before != entry.member
        return True

    def connected(self, worker: WorkerId) -> None:
        """Notes that an incarnation has opened another stream of heartbeats, whose connection is watched."""
        if (entry := self._entries.get(worker.name)) is not None and entry.id == worker:
            entry.connections += 1

    def disconnected(self, worker: WorkerId) -> None:
        """Notes that a stream of heartbeats has ended."""
        if (entry := self._entries.get(worker.name)) is not None and entry.id == worker and entry.connections:
            entry.connections -= 1

    def gone(self, name: str) -> None:
        """Notes that the process of the present incarnation under this name has ended."""
        self._advance()
        if (entry := self._entries.get(name)) is not None:
            self._enter(entry, MEMBER_STATE_DEAD)

    def leave(self, name: str) -> None:
        """Notes that a member was asked to end, so that it isn't killed while it drains."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.asked = True

    def remove(self, name: str) -> None:
        """Forgets a member that was asked to end; its incarnation stays fenced."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._fence(entry)
            self.version += 1

    def tick(self) -> list[Verdict]:
        """Applies the time up to now; returns the incarnations that it declares dead. Call it often."""
        self._advance()
        if not self.complete and self._now >= 2 * self._timeouts.dead_seconds:
            self.complete = True
            self.version += 1
        died = []
        for entry in self._entries.values():
            if entry.member.state == MEMBER_STATE_DEAD:
                continue
            if reason := self._death(entry):
                self._enter(entry, MEMBER_STATE_DEAD)
                died.append(Verdict(entry.id, reason))
            else:
                self._enter(entry, self._believed(entry))
        return died

    # What is known.

    def members(self) -> list[Member]:
        """All members, including dead ones that are not yet replaced; in order of first heartbeat."""
        return [entry.member for entry in self._entries.values()]

    def statuses(self) -> list[MemberStatus]:
        """All members with load and heartbeat age."""
        self._advance()
        return [
            MemberStatus(
                member=entry.member,
                load=entry.load,
                heartbeat_age_seconds=max(0.0, self._now - entry.heard),
                restored=entry.restored,
            )
            for entry in self._entries.values()
        ]

    def present(self, name: str) -> WorkerId | None:
        """The present incarnation under this name, dead or alive."""
        entry = self._entries.get(name)
        return None if entry is None else entry.id

    @property
    def ready(self) -> bool:
        """Whether a router is READY, and so are a prefill and a decode worker or a co-located one."""
        return ROLE_ROUTER in self._ready_roles() and self.paired

    @property
    def paired(self) -> bool:
        """Whether a prefill and a decode worker, or a co-located one, are READY."""
        roles = self._ready_roles()
        return ROLE_COLOCATED in roles or {ROLE_PREFILL, ROLE_DECODE} <= roles

    def _ready_roles(self) -> set[Role]:
        return {entry.member.role for entry in self._entries.values() if entry.member.state == MEMBER_STATE_READY}

    def _admit(self, member: Member) -> _Entry | None:
        """The entry of an incarnation that is new here; None if it is an earlier one than the present."""
        known = self._names.setdefault(member.name, _Name())
        if member.incarnation in known.fenced or 0 < member.generation <= known.generation:
            return None
        if (before := self._entries.get(member.name)) is not None:
            self._fence(before)
            self.counts.replacements[member.role] += 1
            self.counts.role_changes[member.role] += before.member.role != member.role
        # A generation that this supervisor has no record of was issued by one whose record is lost.
        known.generation = member.generation or self._generation + 1
        self._generation = max(self._generation, known.generation)
        entry = self._entries[member.name] = _Entry(Member(), Load(), self._now, Member())
        return entry

    def _fence(self, entry: _Entry) -> None:
        if not entry.acknowledged:
            self._names[entry.member.name].fenced.add(entry.member.incarnation)

    def _public(self, entry: _Entry) -> Member:
        """The last heartbeat as the others get it: without what changes with every heartbeat."""
        member = Member()
        member.CopyFrom(entry.report)
        for figure in ("step_age_seconds", "slow_step_seconds", "failed"):
            member.ClearField(figure)
        member.generation = self._names[member.name].generation
        return member

    def _believed(self, entry: _Entry) -> MemberState:
        """The state of a member that isn't dead."""
        silent = self._now - entry.heard >= self._timeouts.suspect_seconds
        if silent or entry.report.failed or _stuck(entry.report, self._timeouts.step_suspect_seconds, SUSPECT_FACTOR):
            return MEMBER_STATE_SUSPECT
        return entry.report.state

    def _death(self, entry: _Entry) -> str:
        """The reason why this member is to be declared dead; empty if it isn't."""
        limits, report = self._timeouts, entry.report
        patience = max(limits.dead_seconds, limits.step_dead_seconds) if entry.connections else limits.dead_seconds
        if self._now - entry.heard >= patience:
            return f"no heartbeat for {patience:g} s"
        if _stuck(report, limits.step_dead_seconds, DEAD_FACTOR):
            what = "event loop has been held" if report.role == ROLE_ROUTER else "step has been running"
            return f"its {what} for {report.step_age_seconds:.1f} s"
        if entry.leaving is not None and not entry.asked:
            stay = self._now - entry.leaving
            if report.failed and stay >= FAILED_SECONDS:
                return f"its engine failed {stay:.1f} s ago, and it hasn't ended"
            if stay >= self._drain_seconds() + DRAIN_MARGIN_SECONDS:
                return f"it has been draining for {stay:.1f} s"
        return ""

    def _enter(self, entry: _Entry, state: MemberState) -> None:
        if entry.member.state != state:
            entry.member.state = state
            self.version += 1
            self.counts.deaths[entry.member.role] += state == MEMBER_STATE_DEAD and not entry.asked

    def _advance(self) -> None:
        now = self._clock()
        # A gap between two calls that is longer than a third of the time to suspicion is this process's own pause.
        self._now += min(max(now - self._last, 0.0), self._timeouts.suspect_seconds / 3)
        self._last = now


def ready_routers(members: Iterable[Member]) -> tuple[str, ...]:
    """host:port of the public gRPC of each router that is ready, in the order of their names; each address once, which
    several of them may share."""
    return tuple(dict.fromkeys(member.address for member in _ready_routers(members)))


def ready_http(members: Iterable[Member]) -> tuple[str, ...]:
    """host:port of the HTTP of each router that is ready and has one, as `ready_routers`."""
    return tuple(dict.fromkeys(member.http_address for member in _ready_routers(members) if member.http_address))


def _ready_routers(members: Iterable[Member]) -> list[Member]:
    ready = [member for member in members if member.role == ROLE_ROUTER and member.state == MEMBER_STATE_READY]
    return sorted(ready, key=lambda member: (len(member.name), member.name))


def _stuck(report: Member, seconds: float, factor: float) -> bool:
    """Whether a step has been running for `seconds`, and `factor` times as long as a slow one.

    Also if the worker has no requests left: the router has taken them away, and a step that is stuck stays stuck.
    """
    return report.step_age_seconds >= max(seconds, factor * report.slow_step_seconds)


def _check(member: Member) -> None:
    for text in ("name", "incarnation"):
        if not getattr(member, text):
            raise InvalidMember(f"member.{text} is empty")
    if member.role not in (ROLE_PREFILL, ROLE_DECODE, ROLE_COLOCATED, ROLE_ROUTER):
        raise InvalidMember(f"member.role of {member.name} is {member.role}")
    if member.state not in REPORTABLE:
        raise InvalidMember(f"member.state of {member.name} is {member.state}; reported are {REPORTABLE}")
