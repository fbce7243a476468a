"""From the supervisor's membership to the peers of the hand-off."""

from collections.abc import Iterable

from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_SUSPECT,
    Member,
    Role,
)
from kvrelay.transfer.peers import Peer

# A suspect may yet be heard of, and a draining worker finishes what it has; a dead one never comes back.
REACHABLE = frozenset({MEMBER_STATE_READY, MEMBER_STATE_DRAINING, MEMBER_STATE_SUSPECT})


def peers_of(members: Iterable[Member], role: Role) -> list[Peer]:
    """The members of this role that a hand-off may be under way with."""
    return [
        Peer(
            name=member.name,
            incarnation=member.incarnation,
            address=member.address,
            transports=tuple(member.transports),
            store_address=member.store_address,
        )
        for member in members
        if member.role == role and member.state in REACHABLE
    ]
