"""The desired state of a cluster: its members by name, their roles, configurations and stages. No I/O.

    stage      the member                                          ends as
    SERVE      runs                                                -
    REPLACE    runs until its successor serves                     LEAVE
    CYCLE      runs until it can be spared                         RETURN
    LEAVE      finishes or returns its requests, and ends          gone
    RETURN     finishes or returns its requests, and ends          SERVE, with the present configuration

A name is not tied to a role. The commands below return the state with the change, or refuse; `reconcile` says how the
cluster gets there. A command that is repeated returns the same state.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from kvrelay.cluster.errors import listed
from kvrelay.internal.v1.supervisor_pb2 import Refusal
from kvrelay.rpc.identity import MemberRole

MOST_MEMBERS = 1024
"""Most members of one role."""


class Stage(Enum):
    """Stage of a member: whether it stays, and how it is replaced or ends."""

    SERVE = "serve"
    REPLACE = "replace"
    CYCLE = "cycle"
    LEAVE = "leave"
    RETURN = "return"

    @property
    def ends(self) -> bool:
        """Whether the process is to end now."""
        return self in (Stage.LEAVE, Stage.RETURN)


class Refused(ValueError):
    """A command can't be followed; nothing has changed."""

    def __init__(self, code: "Refusal.Code", message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Wanted:
    """One desired member."""

    role: MemberRole
    config: int
    """Generation of the configuration that it is started with."""
    stage: Stage = Stage.SERVE
    replaces: str = ""
    """Name of the member that leaves when this one serves. Until then this one isn't counted. Empty for none."""

    @property
    def counted(self) -> bool:
        """Whether it is one of the members of its role that there are to be."""
        return self.stage is not Stage.LEAVE and not self.replaces


@dataclass(frozen=True, slots=True)
class Seen:
    """State of one member's process, as far as the supervisor knows it."""

    kept: bool = False
    """Whether the process runs, or is about to be started again."""
    ending: bool = False
    """Whether it was asked to end."""
    ready: bool = False
    role: MemberRole | None = None
    """Role that the process reports."""
    roles: frozenset[str] = frozenset()
    """Roles that the process can take."""
    digest: str = ""
    """Workers with equal digests can hand KV over to each other."""
    requests: int = 0
    """Number of requests that wait and run there."""
    trouble: str = ""
    """Reason why it can't be expected to serve without help; empty if it can."""


@dataclass(frozen=True, slots=True)
class Desired:
    """The desired state of a cluster."""

    members: Mapping[str, Wanted]
    config: int = 1
    """Generation of the configuration that all members are to have."""
    previous: int = 0
    """Generation of the configuration before, for a rollback; 0 if there is none."""
    revision: int = 1
    """Number that grows with every change."""
    halted: str = ""
    """Reason why a rolling change has stopped; empty if none has."""
    restart_id: str = ""
    """Id of the last restart."""
    configs: Mapping[int, str] = field(default_factory=dict)
    """Texts of the configurations by generation: the present one, the one before, and those that members have."""

    def count(self, role: MemberRole) -> int:
        """The number of members of the role that there are to be."""
        return len(self.counted(role))

    def counted(self, role: MemberRole) -> list[str]:
        """The members that `count` counts."""
        return [name for name, wanted in self.members.items() if wanted.role == role and wanted.counted]

    @property
    def rolling(self) -> bool:
        """Whether members are still to be replaced."""
        stages = {wanted.stage for wanted in self.members.values()}
        return bool(stages & {Stage.REPLACE, Stage.CYCLE, Stage.RETURN}) and not self.halted

    @property
    def fresh_config(self) -> int:
        """Generation for a member that is added: not that of an upgrade that has failed.

        Members with the configuration before are left then; after a restart that has failed there are none.
        """
        left = any(
            wanted.config == self.previous for wanted in self.members.values() if wanted.stage is not Stage.LEAVE
        )
        return self.previous if self.halted and left else self.config

    def having(self, members: Mapping[str, Wanted], **fields: object) -> "Desired":
        """This state with other members, and the next revision; itself if nothing differs."""
        changed: Desired = replace(self, members=dict(members), **fields)  # type: ignore[arg-type]  # dataclass fields
        if changed == self:
            return self
        used = {changed.config, changed.previous, *(wanted.config for wanted in members.values())}
        configs = {generation: text for generation, text in changed.configs.items() if generation in used}
        return replace(changed, configs=configs, revision=self.revision + 1)


@dataclass(frozen=True, slots=True)
class Rolling:
    """Options of a change that gives members other processes."""

    cycled: Collection[MemberRole] = frozenset()
    """Roles whose members end before their successors start."""
    kept: Collection[MemberRole] = frozenset()
    """Roles whose members are started as before with the other configuration; they stay."""
    gaps: bool = False
    """Whether the only member of a cycled role may end: nothing is served until it is back."""


def scaled(desired: Desired, seen: Mapping[str, Seen], counts: Mapping[MemberRole, int]) -> Desired:
    """The desired state with so many members of each of these roles. Members that serve least leave first.

    Raises:
        Refused: a number is too large, or no router would be left.
    """
    members = dict(desired.members)
    for role, count in counts.items():
        least = 1 if role == "router" else 0
        if not least <= count <= MOST_MEMBERS:
            raise Refused(Refusal.CODE_INVALID, f"{role} is {count}; allowed: {least} to {MOST_MEMBERS}")
        present = desired.counted(role)
        for _ in range(count - len(present)):
            members[new_name(members, role)] = Wanted(role, desired.fresh_config)
        surplus = sorted(present, key=lambda name: _worth(name, members[name], seen.get(name, Seen())))
        for name in surplus[: max(0, len(present) - count)]:
            leave(members, name)
    return desired.having(members)


def drained(desired: Desired, seen: Mapping[str, Seen], name: str, *, replaced: bool, force: bool) -> Desired:
    """The desired state without this member; with `replaced`, another one takes its place first.

    Raises:
        Refused: it is unknown, or without `force`, no request could be served without it; with `replaced`, also if an
            upgrade has stopped.
    """
    wanted = _known(desired, name)
    _check_no_successor(name, wanted)
    if wanted.stage is Stage.LEAVE or (replaced and wanted.stage in (Stage.REPLACE, Stage.RETURN)):
        return desired
    members = dict(desired.members)
    if replaced:
        _check_not_halted(desired)
        members[name] = replace(wanted, stage=Stage.REPLACE)
        return desired.having(members)
    if not force:
        _check_spared(desired, seen, name, "`drain --replace` starts another one first")
    leave(members, name)
    return desired.having(members)


def with_role(desired: Desired, seen: Mapping[str, Seen], name: str, role: MemberRole, *, force: bool) -> Desired:
    """The desired state with another role of a worker.

    Raises:
        Refused: it is unknown, is about to end, or can't have the role; without `force`, also if no request could be
            served meanwhile.
    """
    wanted, now = _known(desired, name), seen.get(name, Seen())
    _check_no_successor(name, wanted)
    if wanted.role == role:
        return desired
    if "router" in (wanted.role, role):
        raise Refused(
            Refusal.CODE_INVALID, f"role of {name} is {wanted.role}; a worker can't become a router, nor the reverse"
        )
    if wanted.stage.ends:
        raise Refused(Refusal.CODE_BUSY, f"{name} is about to end")
    if now.roles and role not in now.roles:
        able = ", ".join(sorted(now.roles))
        raise Refused(Refusal.CODE_INVALID, f"role is {role}; allowed: {able}, which the process of {name} can take")
    if not force:
        _check_spared(desired, seen, name, f"`scale {wanted.role}=...` starts another one")
    members = dict(desired.members)
    for other, each in desired.members.items():
        if other == name or each.replaces == name:
            members[other] = replace(each, role=role)
    return desired.having(members)


def upgraded(desired: Desired, text: str, counts: Mapping[MemberRole, int], how: Rolling) -> Desired:
    """The desired state with another configuration for all members; unchanged if they have or are getting this one.

    Args:
        counts: numbers of members that change with it.

    Raises:
        Refused: nothing would be served for a while.
    """
    if desired.configs.get(desired.config) == text and not desired.halted:
        return desired
    generation = max(desired.configs, default=0) + 1
    configs = {**desired.configs, generation: text}
    members = {name: wanted for name, wanted in desired.members.items() if not wanted.replaces}
    previous = desired.fresh_config
    rolled = {name: _reconfigured(wanted, previous, generation, how) for name, wanted in members.items()}
    for name in desired.members.keys() - members.keys():  # a successor with a configuration between the two
        rolled[name] = replace(desired.members[name], stage=Stage.LEAVE, replaces="")
    changed = desired.having(rolled, config=generation, previous=previous, configs=configs, halted="")
    return _without_gap(scaled(changed, {}, counts) if counts else changed, how)


def rolled_back(desired: Desired, how: Rolling) -> Desired:
    """The desired state with the configuration before the present one; unchanged if a rollback has made it the present
    one already, unless that has stopped.

    Raises:
        Refused: there is none, or nothing would be served for a while.
    """
    if not desired.previous:
        raise Refused(Refusal.CODE_INVALID, "there is no configuration before the present one")
    if desired.previous > desired.config and not desired.halted:
        return desired
    target = desired.previous
    members = {}
    for name, wanted in desired.members.items():
        if wanted.stage is Stage.LEAVE:
            members[name] = wanted
        elif wanted.replaces:
            members[name] = replace(wanted, stage=Stage.LEAVE, replaces="")
        elif wanted.config == target and wanted.stage is not Stage.RETURN:
            members[name] = replace(wanted, stage=Stage.SERVE)
        else:
            members[name] = _reconfigured(wanted, desired.config, target, how)
    return _without_gap(desired.having(members, config=target, previous=desired.config, halted=""), how)


def restarted(desired: Desired, names: Collection[str], how: Rolling, restart_id: str) -> Desired:
    """The desired state with these members (all, if there are none) replaced by ones of the same configuration.

    Raises:
        Refused: one is unknown or about to end, an upgrade has stopped, or nothing would be served for a while.
    """
    if restart_id and restart_id == desired.restart_id:
        return desired
    _check_not_halted(desired)
    members = dict(desired.members)
    for name in names or [name for name, wanted in members.items() if wanted.stage is not Stage.LEAVE]:
        wanted = _known(desired, name)
        if wanted.stage is Stage.LEAVE:
            raise Refused(Refusal.CODE_BUSY, f"{name} is about to end")
        if not wanted.replaces:
            members[name] = _rolled(wanted, how)
    return _without_gap(desired.having(members, restart_id=restart_id), how)


def leave(members: dict[str, Wanted], name: str) -> None:
    """Has a member leave, and with it the one that was to take its place."""
    for other, wanted in list(members.items()):
        if other == name or wanted.replaces == name:
            members[other] = replace(wanted, stage=Stage.LEAVE, replaces="")


def new_name(members: Collection[str], role: MemberRole) -> str:
    """The first free name: `worker-0`, `worker-1`, ... or `router-0`, `router-1`, ..."""
    kind = "router" if role == "router" else "worker"
    return next(name for number in range(len(members) + 1) if (name := f"{kind}-{number}") not in members)


def serving(workers: Iterable[tuple[MemberRole | None, str]]) -> bool:
    """Whether requests can be computed by some of the workers, each (role, digest): by a pair with equal digests, or by
    a co-located one."""
    known = set(workers)
    return any(role == "colocated" or (role == "prefill" and ("decode", digest) in known) for role, digest in known)


def able(desired: Desired, seen: Mapping[str, Seen], but: Collection[str] = ()) -> list[tuple[MemberRole | None, str]]:
    """(role, digest) of each worker, except `but`, that serves in its desired role and is to go on."""
    return [
        (now.role, now.digest)
        for name, wanted in desired.members.items()
        if name not in but and wanted.role != "router" and not wanted.stage.ends
        if (now := seen.get(name, Seen())).ready and now.role == wanted.role
    ]


def spared(desired: Desired, seen: Mapping[str, Seen], name: str) -> bool:
    """Whether requests that can be served now can be served without this member."""
    if desired.members[name].role == "router":
        return any(
            other != name and wanted.role == "router" and not wanted.stage.ends and seen.get(other, Seen()).ready
            for other, wanted in desired.members.items()
        )
    return serving(able(desired, seen, [name])) or not serving(able(desired, seen))


def _check_spared(desired: Desired, seen: Mapping[str, Seen], name: str, instead: str) -> None:
    planned = [wanted.role for other, wanted in desired.members.items() if wanted.counted and other != name]
    role = desired.members[name].role
    # Checked for now, and for the time when all earlier changes are done: nothing may serve at this moment.
    later = serving((each, "") for each in planned) or not serving((each, "") for each in (*planned, role))
    if not spared(desired, seen, name) or not (later or role == "router"):
        raise Refused(
            Refusal.CODE_UNSAFE,
            f"{name}: without this {role} member no request can be served; {instead}, --force does it now",
        )


def _check_no_successor(name: str, wanted: Wanted) -> None:
    if wanted.replaces:
        raise Refused(
            Refusal.CODE_BUSY, f"{name} is about to take the place of {wanted.replaces}; name that one, or wait"
        )


def _check_not_halted(desired: Desired) -> None:
    if desired.halted:
        raise Refused(
            Refusal.CODE_BUSY,
            f"a rolling change has stopped: {desired.halted}; `upgrade` again, or `upgrade --rollback`, first",
        )


def _rolled(wanted: Wanted, how: Rolling) -> Wanted:
    """The member marked to get another process."""
    if wanted.stage.ends:
        return wanted
    return replace(wanted, stage=Stage.CYCLE if wanted.role in how.cycled else Stage.REPLACE)


def _reconfigured(wanted: Wanted, present: int, config: int, how: Rolling) -> Wanted:
    """The member with a configuration other than the `present` one, in the same process where its role allows that."""
    if wanted.role in how.kept and wanted.config == present and wanted.stage is Stage.SERVE:
        return replace(wanted, config=config)
    return _rolled(wanted, how)


def _without_gap(desired: Desired, how: Rolling) -> Desired:
    """Returns `desired` if it never leaves a role without a serving member; else raises Refused."""
    for name, wanted in desired.members.items():
        if wanted.stage is Stage.CYCLE and desired.count(wanted.role) == 1 and not how.gaps:
            raise Refused(
                Refusal.CODE_UNSAFE,
                f"{name} is the only {wanted.role} member and has a port of its own, so it would end before its "
                f"successor starts. `scale {wanted.role}=2` first; --in-place does it with a gap",
            )
    return desired


def _known(desired: Desired, name: str) -> Wanted:
    if name not in desired.members:
        raise Refused(Refusal.CODE_UNKNOWN_MEMBER, f"{name} is no member; there are {listed(sorted(desired.members))}")
    return desired.members[name]


def _worth(name: str, wanted: Wanted, now: Seen) -> tuple[bool, bool, int, int, str]:
    """Sort key by which members leave a role that shrinks, the first to leave first."""
    number = name.rpartition("-")[2]
    return now.ready, wanted.stage is Stage.SERVE, now.requests, -int(number) if number.isdecimal() else 0, name
