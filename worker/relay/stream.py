"""The queue of what is to be written to one router."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable

from kvrelay.internal.v1.worker_pb2 import Costs, ForeignPrompt, Load, RelayResponse, RequestEvent, WorkerHello
from kvrelay.worker.relay.events import PlainToken

logger = logging.getLogger(__name__)

MAX_PENDING_EVENTS = 65536
MAX_FOREIGN = 64
"""Largest number of other routers' prompts in one message: that of a long context has 32 KiB. What is too much is left
out."""


class RelayStream:
    """The worker's half of one relay. Producer: the worker, on the event loop. Consumer: the stream's writer.

    What comes during a write is merged into one message where its order allows it, so a slow reader costs memory but
    few messages. Past MAX_PENDING_EVENTS the stream is closed, which cancels its requests.
    """

    def __init__(self, router: str, load: Callable[[], Load], costs: Callable[[], Costs | None] = lambda: None) -> None:
        """
        Args:
            load: returns the worker's current load, which every message carries.
            costs: returns its costs, a new object when they have changed; the next message carries them.
        """
        self.router = router
        self.submits_seen = 0
        """Number of Submits that have come on this stream."""
        self._load, self._costs = load, costs
        self._costs_told: Costs | None = None
        self._told: tuple[Load, int] | None = None
        """Load and `submits_seen` of the last report."""
        self._pending: deque[RelayResponse] = deque((RelayResponse(),))
        """Messages to be written; new events are merged into the last one."""
        self._count = 0
        """Number of events and tokens in them."""
        self._with_events: set[tuple[str, int]] = set()
        """Requests that have events in the last message. Tokens in it would come before these."""
        self._ready = asyncio.Event()
        self._closed = False

    def push(self, event: RequestEvent) -> None:
        """Queues an event."""
        if self._takes_more():
            self._pending[-1].events.append(event)
            self._with_events.add((event.request_id, event.attempt))

    def push_token(self, slot: int, token: PlainToken) -> None:
        """Queues the next token of the request that the router has given this slot."""
        if not self._takes_more():
            return
        if token.key in self._with_events:
            self._pending.append(RelayResponse())
            self._with_events.clear()
        last = self._pending[-1]
        last.slots.append(slot)
        last.indices.append(token.token_index)
        last.token_ids.append(token.token)

    def tell(self, prompt: ForeignPrompt) -> None:
        """Queues another router's prompt; it may be left out."""
        if not self._closed and len(self._pending[-1].foreign) < MAX_FOREIGN:
            self._pending[-1].foreign.append(prompt)
            self._ready.set()

    def _takes_more(self) -> bool:
        if not self._closed and self._count >= MAX_PENDING_EVENTS:
            logger.error("router reads too slowly; its stream is closed", extra={"router": self.router})
            self.close()
        if self._closed:
            return False
        self._count += 1
        self._ready.set()
        return True

    def report(self) -> None:
        """Sends the load even without an event, unless the router knows it already: the router may be waiting for
        it."""
        if (self._load(), self.submits_seen) != self._told:
            self._ready.set()

    def close(self) -> None:
        """Ends `messages`, and drops what is queued."""
        self._closed = True
        self._ready.set()

    async def messages(self) -> AsyncIterator[RelayResponse]:
        """The messages to write, in order, until the stream is closed."""
        while True:
            await self._ready.wait()
            if self._closed:
                return
            message = self._pending.popleft()
            self._count -= len(message.events) + len(message.slots)
            if not self._pending:
                self._pending.append(RelayResponse())
                self._with_events.clear()
                self._ready.clear()
            self._report_in(message)
            yield message

    def first(self, hello: WorkerHello) -> RelayResponse:
        """The stream's first message. It has the costs, too: without those of every worker, routers can't predict."""
        message = RelayResponse(hello=hello)
        self._report_in(message)
        return message

    def _report_in(self, message: RelayResponse) -> None:
        load = self._load()
        message.load.CopyFrom(load)
        costs = self._costs()
        if costs is not None and costs is not self._costs_told:
            message.load.costs.CopyFrom(costs)
            self._costs_told = costs
        message.submits_seen = self.submits_seen
        self._told = load, self.submits_seen
