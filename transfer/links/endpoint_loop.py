"""Runs an endpoint on the asyncio event loop: real clock, real links, periodic ticks."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvrelay.rpc.credentials import Credentials
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.frames.frames import PoolFrames
from kvrelay.transfer.links.links import LinkLimits, LinkManager, LinkTimeouts
from kvrelay.transfer.links.rank_links import RankChannel, RankFrames, RankLinks
from kvrelay.transfer.protocol.endpoint import Endpoint, EndpointContext
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.peers import PeerTable
from kvrelay.transfer.protocol.ports import LoopRuntime, Runtime, every
from kvrelay.transfer.transports.base import Transport


@dataclass(frozen=True, slots=True)
class HandoffSetup:
    """Everything that one worker hands KV over with."""

    local: LocalWorker
    frames: PoolFrames
    """Maker of the jobs on the worker's KV pools, those of rank 0."""
    peers: PeerTable
    config: TransferConfig
    transports: Mapping[str, Transport]
    """Transports that this worker can use, best first."""
    credentials: Credentials
    """Credentials for control streams."""
    ranks: Mapping[int, RankChannel] = field(default_factory=dict)
    """Channels to the other ranks of the worker, each of which has a `RankTransfers`; none if it has one rank."""

    def link_manager(self, runtime: Runtime, rank: int = 0) -> LinkManager:
        """The links of one rank, of this process."""
        config = self.config
        limits = LinkLimits(config.max_links, config.gpu_buffer_bytes)
        timeouts = LinkTimeouts(config.frame_timeout_seconds, config.dial_timeout_seconds)
        return LinkManager(self.transports, limits, timeouts, config.transport, runtime, rank)


class EndpointLoop:
    """Clock, links and ticks of one endpoint."""

    def __init__(self, setup: HandoffSetup) -> None:
        runtime = LoopRuntime()
        links, frames = setup.link_manager(runtime), setup.frames
        self._links = RankLinks(links, setup.ranks, runtime) if setup.ranks else links
        self.frames: Any = RankFrames(frames) if setup.ranks else frames
        """Maker of the endpoint's jobs."""
        self.context = EndpointContext(setup.local, setup.peers, setup.config, runtime, self._links)
        self._ticker: asyncio.Task[None] | None = None

    def start(self, endpoint: Endpoint[Any]) -> None:
        """Ticks `endpoint` until `stop`, so that no wait of it is without a deadline."""
        self._ticker = asyncio.create_task(every(endpoint.tick_seconds, endpoint.tick), name="hand-off deadlines")

    async def stop(self) -> None:
        """Ends the ticks and the links."""
        if self._ticker is not None:
            self._ticker.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticker
        await self._links.shut_down()
