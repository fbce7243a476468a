"""Runs an endpoint on the asyncio event loop: real clock, real links, periodic ticks."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvrelay.rpc.credentials import Credentials
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.frames.frames import PoolFrames
from kvrelay.transfer.links.links import LinkLimits, LinkManager, LinkTimeouts
from kvrelay.transfer.protocol.endpoint import Endpoint, EndpointContext
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.peers import PeerTable
from kvrelay.transfer.protocol.ports import LoopRuntime, every
from kvrelay.transfer.transports.base import Transport


@dataclass(frozen=True, slots=True)
class HandoffSetup:
    """Everything that one worker hands KV over with."""

    local: LocalWorker
    frames: PoolFrames
    """Maker of the jobs on the worker's KV pool."""
    peers: PeerTable
    config: TransferConfig
    transports: Mapping[str, Transport]
    """Transports that this worker can use, best first."""
    credentials: Credentials
    """Credentials for control streams."""


class EndpointLoop:
    """Clock, links and ticks of one endpoint."""

    def __init__(self, setup: HandoffSetup) -> None:
        config, runtime = setup.config, LoopRuntime()
        self._links = LinkManager(
            setup.transports,
            LinkLimits(config.max_links, config.gpu_buffer_bytes),
            LinkTimeouts(config.frame_timeout_seconds, config.dial_timeout_seconds),
            config.transport,
            runtime,
        )
        self.context = EndpointContext(setup.local, setup.peers, config, runtime, self._links)
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
