"""What waits to be written to one router."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from kvrelay.internal.v1.worker_pb2 import Load, RelayResponse, RequestEvent

logger = logging.getLogger(__name__)

MAX_PENDING_EVENTS = 65536


class RelayStream:
    """The worker's half of one relay. Producer: the worker, on the event loop. Consumer: the stream's writer.

    Events that come during a write are merged into one message, so a slow reader costs memory but no messages. Past
    MAX_PENDING_EVENTS the stream is closed, which cancels its requests.
    """

    def __init__(self, router: str, load: Callable[[], Load]) -> None:
        """`load` returns the worker's current load, which every message carries."""
        self.router = router
        self.submits_seen = 0
        """Submits that have come on this stream."""
        self._load = load
        self._told: tuple[Load, int] | None = None
        """The load and `submits_seen` that the router was told last."""
        self._pending = RelayResponse()
        self._ready = asyncio.Event()
        self._closed = False

    def push(self, event: RequestEvent) -> None:
        """Queues an event."""
        if len(self._pending.events) >= MAX_PENDING_EVENTS:
            logger.error("router reads too slowly; its stream is closed", extra={"router": self.router})
            self.close()
        if not self._closed:
            self._pending.events.append(event)
            self._ready.set()

    def report(self) -> None:
        """Sends the load even without an event, unless the router knows it: it may wait for it."""
        if (self._load(), self.submits_seen) != self._told:
            self._ready.set()

    def close(self) -> None:
        """Ends `messages`, and drops what is queued."""
        self._closed = True
        self._ready.set()

    async def messages(self) -> AsyncIterator[RelayResponse]:
        """What to write, in order, until the stream is closed."""
        while True:
            await self._ready.wait()
            if self._closed:
                return
            self._ready.clear()
            message, self._pending = self._pending, RelayResponse()
            load = self._load()
            message.load.CopyFrom(load)
            message.submits_seen = self.submits_seen
            self._told = load, self.submits_seen
            yield message
