"""The connections of a router's two faces: their deadlines, their limits, and the descriptors that they share."""

import asyncio
import sys
from contextlib import suppress

from kvrelay.router.addresses import Addresses
from kvrelay.router.config import RouterOptions
from kvrelay.router.doors.connections import Connections, Deadlines
from kvrelay.router.doors.sockets import AcceptedSockets, limit, open_descriptors
from kvrelay.router.records.metrics import RouterMetrics

SWEEP_SECONDS = 0.5
"""Seconds between two looks at all connections."""
GAP_SECONDS = 0.05
"""Seconds between two looks while requests come on new gRPC connections, each of which may bring 64 KiB with it."""
ANSWER_SECONDS = 1.0
"""Seconds for a client to read that its request took too long, before its connection is closed."""
LEAST = 8
"""Number of connections that each face takes in any case."""


class Doors:
    """Watches the connections to a router, from `start` on."""

    def __init__(self, config: RouterOptions, addresses: Addresses, metrics: RouterMetrics) -> None:
        header, request = config.header_timeout_seconds, config.request_timeout_seconds
        most, closed = config.max_connections_per_address, metrics.connection_closed
        http = Deadlines(first=header, header=header, request=request + ANSWER_SECONDS, idle=config.http_idle_seconds)
        self.http = Connections("http", http, most, addresses, closed)
        # gRPC closes idle connections itself, and tells their clients before.
        self.grpc = Connections("grpc", Deadlines(first=header + request), most, addresses, closed)
        self._faces = [self.grpc] if config.http_port is None else [self.grpc, self.http]
        self._spare = config.spare_descriptors
        self._sockets: AcceptedSockets | None = None
        self._strangers = asyncio.Event()
        self.grpc.stranger = self._strangers.set
        self._watching: asyncio.Task[None] | None = None
        self._share(open_descriptors())

    def start(self, grpc_port: int) -> None:
        """Closes connections from now on that wait too long, or are too many."""
        if sys.platform == "linux":
            self._sockets = AcceptedSockets(self.grpc, self._share)
        self._watching = asyncio.create_task(self._watch(grpc_port), name="connections")

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None

    async def _watch(self, grpc_port: int) -> None:
        while True:
            await asyncio.sleep(GAP_SECONDS)
            with suppress(TimeoutError):
                # Not `wait_for`, which Python 3.11 lets swallow a cancellation if the event is set at the same time.
                async with asyncio.timeout(SWEEP_SECONDS - GAP_SECONDS):
                    await self._strangers.wait()
            self._strangers.clear()
            if self._sockets is not None:
                await self._sockets.look(grpc_port)
            for face in self._faces:
                face.sweep()

    def _share(self, descriptors: int) -> None:
        """Gives each face half of the descriptors that are not for other things.

        Args:
            descriptors: those that are open.
        """
        others = descriptors - sum(len(face) for face in self._faces)
        for face in self._faces:
            face.most = max(LEAST, (limit() - others - self._spare) // len(self._faces))
