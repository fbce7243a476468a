"""The router's end of a relay: one gRPC stream to one incarnation of a worker carries all requests placed there."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

import grpc

from kvrelay.internal.v1.worker_pb2 import (
    PHASE_DECODE,
    Cancel,
    ClientCall,
    Load,
    ModelInfo,
    RelayRequest,
    RelayResponse,
    RequestEvent,
    RouterHello,
    Submit,
)
from kvrelay.internal.v1.worker_pb2_grpc import WorkerServiceStub
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.identity import WorkerId
from kvrelay.rpc.options import HELLO_SECONDS

OnEvent = Callable[[RequestEvent], None]
OnLost = Callable[[], None]
OnDoubt = Callable[[], None]


class WorkerStream:
    """One stream, used once: up after the worker's hello, lost for ever when it ends.

    Submits, cancels and fences go out in order, through a queue that holds at most one of each for every attempt that
    the router has in flight. An event goes to the attempt that was submitted under its (request_id, attempt); events of
    an attempt that was cancelled or forgotten are dropped.
    """

    def __init__(
        self,
        worker: WorkerId,
        address: str,
        credentials: Credentials,
        hello: RouterHello,
        on_change: Callable[[], None],
        on_load: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            on_change: called when the stream comes up and when it is lost.
            on_load: called at every load report.
        """
        self.worker = worker
        self.model: ModelInfo | None = None
        """The worker's model, from its hello on."""
        self.lost: str | None = None
        """Why the stream ended; None while it has not."""
        self.suspected = False
        """Whether the supervisor suspects the worker; `set_suspected` changes it."""
        self.outstanding_tokens = 0
        """Tokens that this router's live attempts have yet to get from the worker; kept by the attempts."""
        self.requests = 0
        """This router's live attempts on the worker; kept by the attempts."""
        self.trials = 0
        """Those of them that are on trial (`router/suspects.py`)."""
        self.trials_begun = 0
        """How many trials have begun here so far."""
        self.last_load: Load | None = None
        """The worker's latest load report. A worker reports every change, soon."""
        self._submits = 0
        self._unseen: deque[tuple[int, int]] = deque()
        """Decode submits that `last_load` doesn't account for: (number of the submit, prompt tokens)."""
        self._address = address
        self._credentials = credentials
        self._hello = hello
        self._on_change = on_change
        self._on_load = on_load
        self._listeners: dict[tuple[str, int], tuple[OnEvent, OnLost, OnDoubt]] = {}
        self._outgoing: asyncio.Queue[RelayRequest] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    @property
    def serving(self) -> ModelInfo | None:
        """The worker's model while the stream is up; None before and after."""
        return self.model if self.lost is None else None

    @property
    def pending_tokens(self) -> int:
        """Tokens that the worker has yet to compute, by its latest report."""
        return 0 if self.last_load is None else self.last_load.pending_tokens

    @property
    def unseen(self) -> Iterable[int]:
        """Prompt tokens of each decode submit that the latest load report doesn't account for."""
        return (tokens for _, tokens in self._unseen)

    def submit(self, submit: Submit, on_event: OnEvent, on_lost: OnLost, on_doubt: OnDoubt) -> None:
        """Sends one part of an attempt.

        Args:
            on_event: called with each of its events, until `forget` or `cancel`.
            on_lost: called when the stream is lost before that; `lost` then says why.
            on_doubt: called whenever the worker becomes a suspect before that.
        """
        self._listeners[submit.request_id, submit.attempt] = on_event, on_lost, on_doubt
        self._submits += 1
        if submit.phase == PHASE_DECODE:
            self._unseen.append((self._submits, len(submit.token_ids)))
        self._outgoing.put_nowait(RelayRequest(submit=submit))

    def set_suspected(self, suspected: bool) -> None:
        """Takes the supervisor's opinion of the worker."""
        news = suspected and not self.suspected
        self.suspected = suspected
        if news:
            for _, _, on_doubt in list(self._listeners.values()):
                on_doubt()

    def end_trial(self) -> None:
        """One attempt less is on trial here: another may begin."""
        self.trials -= 1
        self._on_load()

    def forget(self, key: tuple[str, int]) -> None:
        """Drops the callbacks of (request_id, attempt), which has ended on the worker."""
        self._listeners.pop(key, None)

    def cancel(self, key: tuple[str, int]) -> None:
        """Ends (request_id, attempt) on the worker. Safe to call at any time, and more than once."""
        if self._listeners.pop(key, None) is not None and self.lost is None:
            self._outgoing.put_nowait(RelayRequest(cancel=Cancel(request_id=key[0], attempt=key[1])))

    def fence(self, call: ClientCall) -> None:
        """Ends on the worker what earlier calls of the client's request have submitted, through whichever router."""
        if self.lost is None:
            self._outgoing.put_nowait(RelayRequest(fence=call))

    async def run(self) -> None:
        """Connects, then carries requests until the stream ends or `close` is called."""
        task = self._task = asyncio.current_task()
        reason = "closed"
        try:
            async with self._credentials.channel(self._address, "worker") as channel:
                stub = WorkerServiceStub(channel)
                reason = await self._relay(stub.Relay(metadata=self._credentials.metadata))
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
        """Ends the stream and calls every `on_lost` at once."""
        self._lose(reason)
        if self._task is not None:
            self._task.cancel()

    async def _relay(self, call: "grpc.aio.StreamStreamCall[RelayRequest, RelayResponse]") -> str:
        """Reads until the stream ends; returns why it did."""
        writing = asyncio.create_task(self._write(call), name=f"relay to {self.worker.name}")
        try:
            async with asyncio.timeout(HELLO_SECONDS) as limit:
                async for response in call:
                    first = self.model is None
                    if first:
                        limit.reschedule(None)
                        found = WorkerId(response.hello.name, response.hello.incarnation)
                        if found != self.worker:
                            return f"{self._address} is {found}"
                        self.model = response.hello.model
                    self._deliver(response)
                    if first:
                        self._on_change()
            return "the worker ended the stream"
        finally:
            call.cancel()
            writing.cancel()
            # Not `await writing` with its CancelledError suppressed: that would suppress this task's own as well.
            await asyncio.wait((writing,))

    async def _write(self, call: "grpc.aio.StreamStreamCall[RelayRequest, RelayResponse]") -> None:
        try:
            await call.write(RelayRequest(hello=self._hello))
            while True:
                await call.write(await self._outgoing.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reading side of the same call reports why

    def _deliver(self, response: RelayResponse) -> None:
        if response.HasField("load"):
            self.last_load = response.load
            while self._unseen and self._unseen[0][0] <= response.submits_seen:
                self._unseen.popleft()
            self._on_load()
        for event in response.events:
            listener = self._listeners.get((event.request_id, event.attempt))
            if listener is not None:
                listener[0](event)

    def _lose(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        listeners = list(self._listeners.values())
        self._listeners.clear()
        for _, on_lost, _ in listeners:
            on_lost()
        self._on_change()
