"""Messages that wait to be written to one control stream."""

import asyncio
import logging
from collections.abc import AsyncIterator

from kvrelay.transfer.protocol.messages import Message, batches

logger = logging.getLogger(__name__)

MAX_PENDING = 65536
WRITE_TIMEOUT_SECONDS = 5.0


class Outbox:
    """Queue of one stream. Producer: the endpoint, on the event loop. Consumer: the stream's writer.

    Messages that arrive during a write leave together in the next batch. A peer that reads so slowly that MAX_PENDING
    messages wait loses the stream.
    """

    def __init__(self) -> None:
        self._pending: list[Message] = []
        self._ready = asyncio.Event()
        self.closed = False

    def put(self, *messages: Message) -> None:
        """Queues messages; drops them once the stream is closed."""
        if self.closed:
            return
        self._pending += messages
        if len(self._pending) > MAX_PENDING:
            logger.error("a peer reads its control stream too slowly; the stream is closed")
            self.close()
        self._ready.set()

    def close(self) -> None:
        """Ends `batches` after what is queued."""
        self.closed = True
        self._ready.set()

    async def batches(self) -> AsyncIterator[bytes]:
        """The batches to write, in order, until the outbox is closed."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            while self._pending:
                waiting, self._pending = self._pending, []
                for batch in batches(waiting):
                    yield batch
            if self.closed:
                return
