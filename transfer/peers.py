"""Workers that this worker may speak to, as the supervisor knows them."""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

MEET_SECONDS = 1.0
"""How far one worker's news of the membership may be behind another's."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One incarnation of another worker. Comes from the supervisor's membership only, never from a request."""

    name: str
    incarnation: str
    """Drawn when its process started; a restarted worker is another incarnation."""
    address: str
    """host:port of its internal gRPC."""
    transports: tuple[str, ...] = ()
    """What its links can do, best first; as `kvrelay.transfer.transports.registry.entries` lists it."""


class PeerTable:
    """The membership as the hand-off needs it. Touched by the event loop only."""

    def __init__(self, peers: Iterable[Peer] = ()) -> None:
        self._peers: dict[str, Peer] = {}
        # For good, about 100 bytes for each worker that was replaced: nobody waits for one that is gone.
        self._former: set[str] = set()
        self._changed = asyncio.Event()
        self.update(peers)

    def update(self, peers: Iterable[Peer]) -> None:
        """Replaces the membership. A name has one incarnation at a time; the last one given counts."""
        before = {peer.incarnation for peer in self}
        self._peers = {peer.name: peer for peer in peers}
        self._former = (self._former | before) - {peer.incarnation for peer in self}
        self._changed.set()
        self._changed = asyncio.Event()

    async def met(self, name: str, incarnation: str, timeout: float) -> Peer | None:
        """As `get`, but waits up to `timeout` seconds for one that was never a member: others may have heard first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.is_news(name, incarnation):
                    await self._changed.wait()
        return self.get(name, incarnation)

    def is_news(self, name: str, incarnation: str) -> bool:
        """Whether this incarnation neither is nor was a member, so that it may yet become one."""
        return self.get(name, incarnation) is None and incarnation not in self._former

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
