"""Workers of several ranks, all in this process."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgpack  # type: ignore[import-untyped]  # it ships no types

from kvrelay.engine.degree import Degree
from kvrelay.engine.kv.layout import CacheLayout, KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.kv.writes import RankWrites
from kvrelay.transfer.frames.frames import PoolFrames
from kvrelay.transfer.links.endpoint_loop import HandoffSetup
from kvrelay.transfer.links.links import LinkManager
from kvrelay.transfer.links.rank_links import COMMITTED, Command
from kvrelay.transfer.links.rank_transfers import RankTransfers
from kvrelay.transfer.protocol.ports import LoopRuntime
from kvrelay.transfer.protocol.routes import held_by, unsuited


class MemoryChannel:
    """One end of a channel between two ranks of one process; implements `RankChannel`."""

    committed_step = COMMITTED

    def __init__(self) -> None:
        self.other: MemoryChannel
        self._listeners: tuple[Callable[[Command], None], Callable[[str], None]] | None = None
        self._lost = False

    @classmethod
    def pair(cls) -> tuple["MemoryChannel", "MemoryChannel"]:
        one, other = cls(), cls()
        one.other, other.other = other, one
        return one, other

    def listen(self, on_message: Callable[[Command], None], on_lost: Callable[[str], None]) -> None:
        self._listeners = on_message, on_lost

    def send(self, message: Command) -> None:
        asyncio.get_running_loop().call_soon(self.other._take, msgpack.packb(message))

    def lose(self) -> None:
        """The connection is lost, at both ends."""
        for end in (self, self.other):
            end._lost = True
            if end._listeners is not None:
                end._listeners[1]("the connection is lost")

    def _take(self, packed: bytes) -> None:
        if not self._lost and self._listeners is not None:
            self._listeners[0](msgpack.unpackb(packed))


class Ranks:
    """The other ranks of a worker, in this process, and the channels to them."""

    def __init__(self, setup: HandoffSetup, pools: Sequence[KVPool]) -> None:
        """`pools` are those of all ranks; `setup` is of rank 0."""
        runtime = LoopRuntime()
        self.channels: dict[int, MemoryChannel] = {}
        self.managers: list[LinkManager] = []
        self.transfers: list[RankTransfers] = []
        self.writes: dict[int, RankWrites] = {}
        """KV writes of the other ranks' steps."""
        for rank, pool in list(enumerate(pools))[1:]:
            self.channels[rank], far = MemoryChannel.pair()
            manager, frames = setup.link_manager(runtime, rank), PoolFrames([pool], setup.config.checksum)
            self.managers.append(manager)
            self.writes[rank] = RankWrites()
            self.transfers.append(RankTransfers(far, manager, frames, runtime, self.writes[rank]))
        self.setup = replace(setup, ranks=self.channels)

    async def close(self) -> None:
        for manager in self.managers:
            await manager.shut_down()


def pools_of(layout: KVLayout, degree: Degree, blocks: int) -> list[KVPool]:
    """The pools of a worker's ranks."""
    return [KVPool(held_by(layout, degree, rank).of(layout), blocks) for rank in range(degree.ranks)]


def rank_cache(cache: CacheLayout, degree: Degree, rank: int) -> CacheLayout:
    """The layout of what a rank holds of a model's `cache`; it has all of its groups and tracks.

    Raises:
        ValueError: `unsuited` says why.
    """
    if (reason := unsuited(cache, degree)) is not None:
        raise ValueError(reason)
    groups = tuple(
        replace(group, tracks=tuple(held_by(track, degree, rank).of(track) for track in group.tracks))
        for group in cache.groups
    )
    return replace(cache, groups=groups)
