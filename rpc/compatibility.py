"""Finds the workers that can hand KV over to one another: those whose digests in the membership are equal.

A digest covers all that two workers must have in common: protocol version, model, options of the hand-off. It is
compared as a whole; an empty one equals an empty one only. The members with one digest form a group; requests go to the
group that can serve most of them at once.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DEAD,
    MEMBER_STATE_STARTING,
    ROLE_COLOCATED,
    ROLE_DECODE,
    ROLE_PREFILL,
    Member,
)
from kvrelay.rpc.identity import WORKER_ROLES, WORKERS

SHOWN_CHARACTERS = 8
UNKNOWN = (MEMBER_STATE_DEAD, MEMBER_STATE_STARTING)
"""States of members without a digest: a starting worker has none before its model is loaded."""


def rank(workers: Iterable[tuple[str, str]]) -> list[str]:
    """The digests of `workers`, each (role, digest), the preferred one first.

    Args:
        workers: roles are "prefill", "decode" and "colocated".

    Returns:
        Digests by the number of complete pairs (a co-located worker counts as one), then by the number of workers, then
        in the order of the alphabet, so that every router prefers the same.
    """
    counts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(WORKER_ROLES, 0))
    for role, digest in workers:
        counts[digest][role] += 1
    return sorted(counts, key=lambda digest: (-_pairs(counts[digest]), -sum(counts[digest].values()), digest))


def groups(members: Iterable[Member]) -> list[list[Member]]:
    """The workers in groups that can be paired, the preferred group first.

    Args:
        members: of the whole cluster, in any state; routers, dead and starting members are in no group.
    """
    workers = [member for member in members if member.role in WORKERS and member.state not in UNKNOWN]
    digests = rank((WORKERS[member.role], member.compatibility) for member in workers)
    return [[member for member in workers if member.compatibility == digest] for digest in digests]


def unpaired(members: Iterable[Member]) -> list[str]:
    """One sentence for each group of workers that can't be paired with the preferred group; empty if all can.

    Args:
        members: as of `groups`.
    """
    preferred, *others = groups(members) or [[]]
    sentences = []
    for group in others:
        sentence = (
            f"{_list(group)} (digest {_shown(group)}) can't be paired with {_list(preferred)} (digest "
            f"{_shown(preferred)}): they differ in version, model or options of the hand-off"
        )
        here, there = _kv_dtypes(group), _kv_dtypes(preferred)
        if here and there and here != there:
            sentence += f" (KV is {here} and {there}: converted only where transfer.convert_dtype is on)"
        roles = {member.role for member in group}
        if ROLE_COLOCATED not in roles and not {ROLE_PREFILL, ROLE_DECODE} <= roles:
            missing = "decode" if ROLE_PREFILL in roles else "prefill"
            sentence += f"; without a {missing} worker of the same digest, no request is placed there"
        sentences.append(sentence)
    return sentences


def _pairs(counts: Mapping[str, int]) -> int:
    return min(counts["prefill"], counts["decode"]) + counts["colocated"]


def _list(members: Sequence[Member]) -> str:
    return ", ".join(sorted(member.name for member in members))


def _kv_dtypes(members: Sequence[Member]) -> str:
    return ", ".join(sorted({member.kv_dtype for member in members if member.kv_dtype}))


def _shown(group: Sequence[Member]) -> str:
    return group[0].compatibility[:SHOWN_CHARACTERS] or "none"
