"""Workers that this worker may speak to, as the supervisor knows them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """One incarnation of another worker. Comes from the supervisor's membership only, never from a request."""

    name: str
    incarnation: str
    """Drawn when its process started; a restarted worker is another incarnation."""
    address: str
    """host:port of its internal gRPC."""
    transports: tuple[str, ...] = ()
    """What its links can do, best first."""


class PeerTable:
    """The membership as the hand-off needs it. Touched by the event loop only."""

    def __init__(self, peers: Iterable[Peer] = ()) -> None:
        self._peers: dict[str, Peer] = {}
        self.update(peers)

    def update(self, peers: Iterable[Peer]) -> None:
        """Replaces the membership. A name has one incarnation at a time; the last one given counts."""
        self._peers = {peer.name: peer for peer in peers}

    def get(self, name: str, incarnation: str) -> Peer | None:
        """This very incarnation of the worker; None if it isn't, or is no longer, a member."""
        peer = self._peers.get(name)
        return peer if peer is not None and peer.incarnation == incarnation else None

    def __contains__(self, peer: Peer) -> bool:
        return self.get(peer.name, peer.incarnation) is not None

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def __len__(self) -> int:
        return len(self._peers)
