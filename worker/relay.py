"""The worker's end of the relay: one stream per router, one message per engine step."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc

from kvrelay.internal.v1.worker_pb2 import (
    Cancel,
    Load,
    RelayRequest,
    RelayResponse,
    RequestEvent,
    Submit,
    WorkerHello,
)
from kvrelay.internal.v1.worker_pb2_grpc import WorkerServiceServicer

logger = logging.getLogger(__name__)

MAX_PENDING_EVENTS = 65536
WRITE_TIMEOUT_SECONDS = 5.0


class RelayStream:
    """What waits to be written to one router.

    Events that come while a write is under way are merged into one message, so a slow reader costs memory and not
    messages; past MAX_PENDING_EVENTS the stream is closed, which cancels its requests.
    """

    def __init__(self, router: str, load: Callable[[], Load]) -> None:
        """`load` gives the worker's load now: every message carries it."""
        self.router = router
        self.submits_seen = 0
        """Submits that have come on this stream."""
        self._load = load
        self._pending = RelayResponse()
        self._ready = asyncio.Event()
        self._closed = False

    def push(self, event: RequestEvent) -> None:
        if len(self._pending.events) >= MAX_PENDING_EVENTS:
            logger.error("router reads too slowly; its stream is given up", extra={"router": self.router})
            self.close()
        if not self._closed:
            self._pending.events.append(event)
            self._ready.set()

    def report(self) -> None:
        """Sends the load, though nothing else is to be said: a router may wait for it."""
        self._ready.set()

    def close(self) -> None:
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
            message.load.CopyFrom(self._load())
            message.submits_seen = self.submits_seen
            yield message


class RelayHost(Protocol):
    """The worker, as the relay sees it. All of it runs on the event loop."""

    def hello(self) -> WorkerHello:
        """What the worker is."""

    def load(self) -> Load:
        """How much the worker has to do."""

    def attach(self, stream: RelayStream) -> None:
        """A router has come; it is told of the load whenever there is more room."""

    def submit(self, submit: Submit, stream: RelayStream) -> None: ...

    def cancel(self, key: tuple[str, int]) -> None: ...

    def abandon(self, stream: RelayStream) -> None:
        """The stream is gone: forgets it, and cancels every request that was submitted on it."""


class RelayService(WorkerServiceServicer):
    """Serves `kvrelay.internal.v1.WorkerService` for one worker."""

    def __init__(self, host: RelayHost) -> None:
        self._host = host

    async def Relay(
        self,
        request_iterator: AsyncIterator[RelayRequest],
        context: "grpc.aio.ServicerContext[RelayRequest, RelayResponse]",
    ) -> None:
        hello = self._host.hello()
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a relay must be hello")
        if first.hello.worker_incarnation != hello.incarnation:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this is {hello.name} {hello.incarnation}, not incarnation {first.hello.worker_incarnation!r}",
            )
        stream = RelayStream(first.hello.router, self._host.load)
        reader = asyncio.create_task(self._read(request_iterator, stream), name=f"relay {stream.router}")
        try:
            await context.write(RelayResponse(hello=hello, load=self._host.load()))
            self._host.attach(stream)
            async for message in stream.messages():
                await asyncio.wait_for(context.write(message), WRITE_TIMEOUT_SECONDS)
        except (TimeoutError, grpc.RpcError, grpc.aio.BaseError) as error:
            # A client that dies during a write shows as one of these, not as a cancellation.
            logger.warning("router lost", extra={"router": stream.router, "reason": type(error).__name__})
        finally:
            reader.cancel()
            self._host.abandon(stream)
            await asyncio.wait((reader,))
            if not reader.cancelled() and (failure := reader.exception()) is not None:
                logger.error("reading a relay failed", extra={"router": stream.router}, exc_info=failure)

    async def _read(self, requests: AsyncIterator[RelayRequest], stream: RelayStream) -> None:
        try:
            async for request in requests:
                match request.WhichOneof("message"):
                    case "submit":
                        stream.submits_seen += 1
                        self._host.submit(request.submit, stream)
                    case "cancel":
                        self._host.cancel(key_of(request.cancel))
        finally:
            stream.close()


def key_of(message: Cancel | Submit | RequestEvent) -> tuple[str, int]:
    """(request_id, attempt)."""
    return message.request_id, message.attempt
