"""The router's end of a relay: one stream to one life of a worker, carrying every request that it has there."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import grpc

from kvrelay.internal.v1.worker_pb2 import (
    PHASE_DECODE,
    Cancel,
    Load,
    ModelInfo,
    RelayRequest,
    RelayResponse,
    RequestEvent,
    RouterHello,
    Submit,
)
from kvrelay.internal.v1.worker_pb2_grpc import WorkerServiceStub
from kvrelay.router.placement import WorkerKey
from kvrelay.rpc.options import channel_options

HELLO_SECONDS = 5.0
FRESH_SECONDS = 1.0
MAX_MESSAGE_BYTES = 64 * 2**20


class Listener(Protocol):
    """One attempt of one request, as a link sees it."""

    def on_event(self, link: "WorkerStream", event: RequestEvent) -> None: ...

    def on_lost(self, link: "WorkerStream") -> None:
        """No event will come any more; `link.lost` says why."""


class WorkerStream:
    """One stream, made once: up after the worker's hello, lost for ever when it ends.

    What is submitted goes out in order, through a queue that holds at most a Submit and a Cancel of each attempt that
    the router has in flight. Events go to the listener of their (request, attempt); those of an attempt
    that nobody listens to any more are dropped.
    """

    def __init__(
        self,
        key: WorkerKey,
        address: str,
        hello: RouterHello,
        on_change: Callable[[], None],
        on_load: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when the link comes up and when it is lost, `on_load` at each report of its load."""
        self.key = key
        self.model: ModelInfo | None = None
        """What the worker serves, once the link is up."""
        self.lost: str | None = None
        """Why the link is gone; None while it is not."""
        self.outstanding_tokens = 0
        """Tokens that this router's live attempts have given it to compute; kept by them."""
        self.room: Load | None = None
        """As the worker last reported it, however long ago: it tells whenever it has more room."""
        self._submits = 0
        self._unseen: deque[tuple[int, int]] = deque()
        """Decode submits that no load knows of yet: their number, and the tokens of the KV that they will get."""
        self._load = Load()
        self._load_time = -math.inf
        self._address = address
        self._hello = hello
        self._on_change = on_change
        self._on_load = on_load
        self._listeners: dict[tuple[str, int], Listener] = {}
        self._outgoing: asyncio.Queue[RelayRequest] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        return self.model is not None and self.lost is None

    @property
    def load(self) -> Load:
        """As the worker last reported it; nothing if that was too long ago, for an idle worker doesn't report."""
        return self._load if time.monotonic() - self._load_time < FRESH_SECONDS else Load()

    @property
    def unseen(self) -> Iterable[int]:
        """Tokens of each prompt that was announced to a decode worker after its last report."""
        return (tokens for _, tokens in self._unseen)

    def submit(self, submit: Submit, listener: Listener) -> None:
        """Sends a request's part; `listener` is told of its events until `forget` or `cancel`."""
        self._listeners[submit.request_id, submit.attempt] = listener
        self._submits += 1
        if submit.phase == PHASE_DECODE:
            self._unseen.append((self._submits, len(submit.token_ids)))
        self._outgoing.put_nowait(RelayRequest(submit=submit))

    def forget(self, key: tuple[str, int]) -> None:
        """The worker has said its last about (request, attempt)."""
        self._listeners.pop(key, None)

    def cancel(self, key: tuple[str, int]) -> None:
        """Ends (request, attempt) on the worker. Safe to call at any time, and more than once."""
        if self._listeners.pop(key, None) is not None and self.lost is None:
            self._outgoing.put_nowait(RelayRequest(cancel=Cancel(request_id=key[0], attempt=key[1])))

    async def run(self) -> None:
        """Dials, and carries requests until the stream ends or `close` is called."""
        task = self._task = asyncio.current_task()
        reason = "closed"
        try:
            async with grpc.aio.insecure_channel(self._address, options=channel_options(MAX_MESSAGE_BYTES)) as channel:
                stub = WorkerServiceStub(channel)
                reason = await self._relay(stub.Relay())
        except TimeoutError:
            reason = f"no hello within {HELLO_SECONDS:g} s"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            # grpc.aio raises it as well when the other end cancels the stream.
            if task is None or task.cancelling():
                raise
            reason = "CANCELLED by the worker"
        finally:
            self._lose(reason)

    def close(self, reason: str) -> None:
        """Gives the worker up: tells every listener at once."""
        self._lose(reason)
        if self._task is not None:
            self._task.cancel()

    async def _relay(self, call: "grpc.aio.StreamStreamCall[RelayRequest, RelayResponse]") -> str:
        writing = asyncio.create_task(self._write(call), name=f"relay to {self.key.name}")
        try:
            async with asyncio.timeout(HELLO_SECONDS) as limit:
                async for response in call:
                    if self.model is None:
                        limit.reschedule(None)
                        met = WorkerKey(response.hello.name, response.hello.incarnation)
                        if met != self.key:
                            return f"{self._address} is {met.name!r} {met.incarnation!r}"
                        self.model = response.hello.model
                        self._deliver(response)
                        self._on_change()
                        continue
                    self._deliver(response)
            return "the worker ended the stream"
        finally:
            call.cancel()
            writing.cancel()
            # Not `await writing` with its CancelledError suppressed: that would swallow this task's own as well.
            await asyncio.wait((writing,))

    async def _write(self, call: "grpc.aio.StreamStreamCall[RelayRequest, RelayResponse]") -> None:
        try:
            await call.write(RelayRequest(hello=self._hello))
            while True:
                await call.write(await self._outgoing.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reading side of the same call says why

    def _deliver(self, response: RelayResponse) -> None:
        if response.HasField("load"):
            self.room = self._load = response.load
            self._load_time = time.monotonic()
            while self._unseen and self._unseen[0][0] <= response.submits_seen:
                self._unseen.popleft()
            self._on_load()
        for event in response.events:
            listener = self._listeners.get((event.request_id, event.attempt))
            if listener is not None:
                listener.on_event(self, event)

    def _lose(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        listeners = list(self._listeners.values())
        self._listeners.clear()
        for listener in listeners:
            listener.on_lost(self)
        self._on_change()
