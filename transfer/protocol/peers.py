"""Workers that this worker may talk to, as the supervisor knows them."""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvrelay.engine.degree import ONE, Degree
from kvrelay.engine.states import StatesLayout
from kvrelay.rpc.identity import WorkerId

NEWS_SECONDS = 1.0
"""Longest time in seconds that the membership known to one worker may be behind that of another worker."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker. Comes from the supervisor's membership only, never from a field of a request."""

    id: WorkerId
    address: str
    """host:port of its internal gRPC."""
    transports: tuple[str, ...] = ()
    """The transports of its links, best first; the form is that of `kvrelay.transfer.transports.registry.entries`."""
    states: StatesLayout | None = None
    """Hidden states that it wants with the KV of a prompt. Its hello says the same, but may come too late."""
    degree: Degree = ONE
    """Ranks that hold its KV, as its hello says too."""

    @property
    def name(self) -> str:
        return self.id.name

    @property
    def incarnation(self) -> str:
        return self.id.incarnation


class PeerTable:
    """The membership as far as the hand-off needs it. Used on the event loop only."""

    def __init__(self, peers: Iterable[Peer] = ()) -> None:
        self._peers: dict[str, Peer] = {}
        # Kept for ever: about 100 bytes for each worker that was lost.
        self._former: set[str] = set()
        self._changed = asyncio.Event()
        self.update(peers)

    def update(self, peers: Iterable[Peer], dead: Iterable[WorkerId] = ()) -> None:
        """Takes a new membership. A name has one incarnation at a time; the last one given counts.

        A peer leaves the table only if it is `dead`, or if another incarnation has its name. One that is merely not
        listed stays: a supervisor that has just started does not know every member yet.
        """
        before = {peer.incarnation for peer in self}
        self._peers |= {peer.name: peer for peer in peers if peer.incarnation not in self._former}
        for worker in dead:
            if self.get(worker) is not None:
                del self._peers[worker.name]
            self._former.add(worker.incarnation)
        self._former |= before - {peer.incarnation for peer in self}
        self._changed.set()
        self._changed = asyncio.Event()

    async def met(self, worker: WorkerId, timeout: float) -> Peer | None:
        """As `get`, but waits up to `timeout` seconds for a worker that was never a member: its news may be late."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.is_news(worker):
                    await self._changed.wait()
        return self.get(worker)

    def is_news(self, worker: WorkerId) -> bool:
        """Whether this worker is unknown here, so that it may still become a member."""
        return self.get(worker) is None and worker.incarnation not in self._former

    def get(self, worker: WorkerId) -> Peer | None:
        """Exactly this incarnation of the worker; None if it is unknown, dead or replaced."""
        peer = self._peers.get(worker.name)
        return peer if peer is not None and peer.incarnation == worker.incarnation else None

    def __contains__(self, peer: Peer) -> bool:
        return self.get(peer.id) is not None

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def __len__(self) -> int:
        return len(self._peers)
