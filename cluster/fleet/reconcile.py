"""How a cluster gets to its desired state: one small step after another, each safe by itself. No I/O.

    advance     desired + seen -> desired     what has ended is forgotten; a rolling change goes on
    reconcile   desired + seen -> names       whose processes are to start, and to end, now

A rolling change replaces one member at a time: its successor starts, serves, and then the old one leaves. If the
successor can't hand KV over with the old workers (their digests differ), a successor of the other role starts too, and
nobody leaves before both serve: no request is ever without a pair. A member that is cycled instead ends first, and only
while others serve. A successor that doesn't come up halts the change; the old members go on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from kvrelay.cluster.fleet.desired import Desired, Seen, Stage, Wanted, able, leave, new_name, serving, spared
from kvrelay.rpc.identity import MemberRole

NOTHING = Seen()


def reconcile(desired: Desired, seen: Mapping[str, Seen]) -> tuple[list[str], list[str]]:
    """The names under which processes are to be kept running that aren't yet, and those of members that are to finish
    or return their requests and end. A worker's change of role is no action: it comes with the membership."""
    stay = {name: seen.get(name, NOTHING) for name, wanted in desired.members.items() if not wanted.stage.ends}
    starts = [name for name, now in stay.items() if not now.kept]
    return starts, [name for name, now in seen.items() if name not in stay and now.kept and not now.ending]


def settled(desired: Desired, seen: Mapping[str, Seen]) -> bool:
    """Whether every member serves as desired, and nothing is to change any more."""
    return seen.keys() <= desired.members.keys() and all(
        wanted.stage is Stage.SERVE and not wanted.replaces and _serves(wanted, seen.get(name, NOTHING))
        for name, wanted in desired.members.items()
    )


def advance(desired: Desired, seen: Mapping[str, Seen]) -> Desired:
    """The desired state, updated by what the members have done."""
    members = dict(_without_ended(desired, seen))
    desired = desired.having(members)
    if failed := _failed(desired, seen):
        name, reason = failed
        if members[name].replaces:
            leave(members, name)
        return desired.having(members, halted=f"{name} does not come up: {reason}")
    for name, wanted in desired.members.items():
        if wanted.replaces and _serves(wanted, seen.get(name, NOTHING)):
            _on_successor(desired, seen, name, members)
    desired = desired.having(members)
    if _may_begin(desired, seen):
        _begin(desired, seen, members)
    return desired.having(members)


def _without_ended(desired: Desired, seen: Mapping[str, Seen]) -> Iterator[tuple[str, Wanted]]:
    for name, wanted in desired.members.items():
        if not wanted.stage.ends or seen.get(name, NOTHING).kept:
            yield name, wanted
        elif wanted.stage is Stage.RETURN:
            yield name, Wanted(wanted.role, desired.config)


def _failed(desired: Desired, seen: Mapping[str, Seen]) -> tuple[str, str] | None:
    """A member whose trouble halts the rolling change, and the trouble."""
    if not desired.rolling:
        return None
    for name, wanted in desired.members.items():
        newly = wanted.replaces or (wanted.stage is Stage.SERVE and wanted.config == desired.config)
        if newly and (reason := seen.get(name, NOTHING).trouble):
            return name, reason
    return None


def _on_successor(desired: Desired, seen: Mapping[str, Seen], name: str, members: dict[str, Wanted]) -> None:
    """A successor serves: the member before it leaves, or a successor that it can be paired with is needed first."""
    wanted = members[name]
    before, now = seen.get(wanted.replaces, NOTHING), seen[name]
    alike = wanted.role == "router" or before.digest == now.digest or not before.ready
    there = able(desired, seen)
    complete = serving(entry for entry in there if entry[1] == now.digest)
    partners: tuple[MemberRole, ...] = ("decode" if wanted.role == "prefill" else "prefill", "colocated")
    begun = any(each.replaces and each.role in partners for other, each in members.items() if other != name)
    partner = next((role for role in partners if _to_succeed(members, role)), None)
    alone = not begun and partner is None
    # Those that leave in this very step are left out by `members`, not yet by `desired`.
    if (alike or complete or alone) and spared(desired.having(members), seen, wanted.replaces):
        members[wanted.replaces] = replace(members[wanted.replaces], stage=Stage.LEAVE)
        members[name] = replace(wanted, replaces="")
    elif not (alike or complete or begun) and partner is not None:
        _succeed(desired, seen, members, partner)


def _may_begin(desired: Desired, seen: Mapping[str, Seen]) -> bool:
    """Whether the next member's turn has come: what was begun is over, and all that was renewed serves."""
    if not desired.rolling:
        return False
    for name, wanted in desired.members.items():
        if wanted.replaces or wanted.stage.ends:
            return False
        renewed = wanted.stage is Stage.SERVE and wanted.config == desired.config
        if renewed and not _serves(wanted, seen.get(name, NOTHING)):
            return False
    return True


def _begin(desired: Desired, seen: Mapping[str, Seen], members: dict[str, Wanted]) -> None:
    """Starts to replace the next member: one of the role that has most of them left, routers last."""
    left = [name for name, wanted in members.items() if wanted.stage in (Stage.REPLACE, Stage.CYCLE)]
    roles = [members[name].role for name in left]
    for name in sorted(left, key=lambda name: (members[name].role == "router", -roles.count(members[name].role))):
        wanted = members[name]
        if wanted.stage is Stage.REPLACE:
            _succeed(desired, seen, members, wanted.role)
            return
        if spared(desired, seen, name) or desired.count(wanted.role) == 1:
            members[name] = replace(wanted, stage=Stage.RETURN)
            return


def _succeed(desired: Desired, seen: Mapping[str, Seen], members: dict[str, Wanted], role: MemberRole) -> None:
    """Adds a successor of a member `_to_succeed`: of one that doesn't serve, if there is one."""
    before = min(_to_succeed(members, role), key=lambda name: seen.get(name, NOTHING).ready)
    members[new_name(members, role)] = Wanted(role, desired.config, replaces=before)


def _to_succeed(members: Mapping[str, Wanted], role: MemberRole) -> list[str]:
    """The members of this role that a successor is to replace and that have none yet."""
    succeeded = {wanted.replaces for wanted in members.values()}
    return [
        name
        for name, wanted in members.items()
        if wanted.role == role and wanted.stage is Stage.REPLACE and name not in succeeded
    ]


def _serves(wanted: Wanted, now: Seen) -> bool:
    return now.ready and now.role == wanted.role and not now.ending
