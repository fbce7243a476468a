"""The router's end of a relay: one gRPC stream to one incarnation of a worker carries all requests placed there."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from kvrelay.costs.step import StepCost
from kvrelay.costs.worker import WorkerCosts
from kvrelay.internal.v1.worker_pb2 import (
    PHASE_DECODE,
    PHASE_PREFILL,
    Answered,
    Begin,
    Cancel,
    ClientCall,
    ForeignPrompt,
    Load,
    ModelInfo,
    RelayRequest,
    RelayResponse,
    RequestEvent,
    RouterHello,
    Submit,
)
from kvrelay.internal.v1.worker_pb2_grpc import WorkerServiceStub
from kvrelay.router.shares import ROUND_SECONDS
from kvrelay.rpc.costs import read_costs
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.identity import WorkerId
from kvrelay.rpc.options import HELLO_SECONDS
from kvrelay.rpc.stream_status import peer_status

END_SECONDS = 0.1
"""A process that ends closes its connections and the port that it listens at one after another."""


TOKENS_AT_ONCE = 64
"""Tokens between two looks at the clock."""


class Listener(Protocol):
    """An attempt, as the streams of its workers call it. Its methods must not raise."""

    def on_token(self, stream: "WorkerStream", index: int, token: int, now: float) -> None:
        """A token has come with nothing else; `now` is the monotonic time."""

    def on_event(self, stream: "WorkerStream", event: RequestEvent) -> None: ...

    def on_lost(self, stream: "WorkerStream") -> None:
        """The stream is lost; its `lost` says why."""

    def on_doubt(self) -> None:
        """The worker has become a suspect."""


OnForeign = Callable[[WorkerId, ForeignPrompt, int], None]
"""Takes a prompt that another router has sent to a worker, and the worker's block size."""


@dataclass(frozen=True, slots=True)
class Unseen:
    """A submit that the worker's latest report doesn't account for."""

    number: int
    """Number of submits so far, this one included."""
    decodes: bool
    """Whether the worker decodes it."""
    blocks: int
    """KV blocks that it is expected to have in the end."""
    holder: int
    """Digest of the holder, as `Submit.holder`."""
    new_tokens: int
    """Tokens that the worker is expected to compute before the first one that it sends."""
    yields: bool
    """Whether the class is less urgent than `interactive`."""


class WorkerStream:
    """One stream, used once: up after the worker's hello, lost for ever when it ends.

    Submits, begins, cancels and fences go out in order, through a queue that holds at most one of each for every
    attempt that the router has in flight. What comes goes to the listener of its (request_id, attempt) or slot; that of
    an attempt that was cancelled or forgotten is dropped.
    """

    def __init__(
        self,
        worker: WorkerId,
        address: str,
        credentials: Credentials,
        hello: RouterHello,
        on_change: Callable[[], None],
        on_load: Callable[[], None] = lambda: None,
        on_foreign: OnForeign = lambda worker, prompt, block_size: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            on_change: called when the stream comes up and when it is lost.
            on_load: called at every load report.
            on_foreign: called with each prompt of another router whose KV the worker has now.
            clock: the router's.
        """
        self.worker = worker
        self.model: ModelInfo | None = None
        """The worker's model, from its hello on."""
        self.lost: str | None = None
        """Reason why the stream ended; None while it has not."""
        self.suspected = False
        """Whether the supervisor suspects the worker; `set_suspected` changes it."""
        self.requests = 0
        """Number of this router's live attempts on the worker; kept by the attempts."""
        self.suspects = 0
        """Number of these attempts that are suspects there (`router/session/suspects.py`)."""
        self.last_load: Load | None = None
        """The worker's latest load report. A worker reports every change, soon."""
        self.costs: WorkerCosts | None = None
        """The worker's latest costs; None before it has reported some."""
        self.heard = 0.0
        """Monotonic time of its latest message. A worker whose engine computes sends some."""
        self.changes = 0
        """Number of changes of `last_load`, and of what it doesn't account for."""
        self._submits = 0
        self.outstanding_tokens = 0
        """Tokens to compute of the live submits that `last_load` doesn't account for."""
        self._unseen_yielding = 0
        """Tokens among `outstanding_tokens` that belong to requests of classes less urgent than `interactive`."""
        self.unseen_requests = 0
        """Live submits that decode here and that `last_load` doesn't account for."""
        self.unseen_blocks: Counter[int] = Counter()
        """Blocks that the submits of `unseen_requests` are expected to have in the end, by holder."""
        self._unseen: dict[tuple[str, int], Unseen] = {}
        """Live submits that `last_load` doesn't account for, in order. The four above are sums over them: each
        placement reads them."""
        self._address = address
        self._credentials = credentials
        self._hello = hello
        self._on_change = on_change
        self._on_load = on_load
        self._on_foreign = on_foreign
        self._clock = clock
        self._listeners: dict[tuple[str, int], tuple[int, Listener]] = {}
        """Slot and listener of each attempt, by (request_id, attempt)."""
        self._by_slot: dict[int, Listener] = {}
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
    def yielding_tokens(self) -> int:
        """Tokens among `pending_tokens` and `outstanding_tokens` that belong to requests of classes less urgent than
        `interactive`."""
        return self._unseen_yielding + (0 if self.last_load is None else self.last_load.yielding_tokens)

    @property
    def block_size(self) -> int:
        """Tokens of a block of the worker's KV pool; 0 before its first report."""
        return 0 if self.last_load is None else self.last_load.blocks.size

    @property
    def running(self) -> int:
        """Requests there from all routers, waiting ones too: by the latest load report, and since."""
        load = self.last_load
        reported = 0 if load is None else load.requests.waiting + load.requests.running + load.promised.requests
        return reported + len(self._unseen)

    def submit(self, submit: Submit, listener: Listener, *, cached_tokens: int = 0) -> None:
        """Sends one part of an attempt, and gives it a slot.

        Args:
            listener: told of what the worker sends, until `forget` or `cancel`.
            cached_tokens: how many of the tokens the worker is expected to have computed already.
        """
        key = submit.request_id, submit.attempt
        self._submits += 1
        submit.slot = self._submits
        self._listeners[key] = self._submits, listener
        self._by_slot[self._submits] = listener
        tokens, decodes = len(submit.token_ids), submit.phase != PHASE_PREFILL
        new = 0 if submit.phase == PHASE_DECODE else max(1, tokens - cached_tokens)
        expected = max(tokens, submit.prompt_tokens + submit.expected_tokens - 1) + 1
        # Before the worker's first report, no block size is known, and nothing is placed by its blocks.
        blocks = -(-expected // self.block_size) if self.block_size else 0
        self._unseen[key] = Unseen(self._submits, decodes, blocks, submit.holder, new, submit.urgency.yields)
        self._count(self._unseen[key], 1)
        self._outgoing.put_nowait(RelayRequest(submit=submit))

    def set_suspected(self, suspected: bool) -> None:
        """Takes the supervisor's opinion of the worker."""
        news = suspected and not self.suspected
        self.suspected = suspected
        if news:
            for _, listener in list(self._listeners.values()):
                listener.on_doubt()

    def suspect_gone(self) -> None:
        """One suspect less is here: another one may come."""
        self.suspects -= 1
        self._on_load()

    def begin(self, key: tuple[str, int]) -> None:
        """Lets the worker compute (request_id, attempt), a suspect that it has taken."""
        if self.lost is None:
            self._outgoing.put_nowait(RelayRequest(begin=Begin(request_id=key[0], attempt=key[1])))

    def forget(self, key: tuple[str, int]) -> None:
        """Drops the listener of (request_id, attempt), which has ended on the worker."""
        self._drop(key)

    def cancel(self, key: tuple[str, int]) -> None:
        """Ends (request_id, attempt) on the worker. Safe to call at any time, and more than once."""
        if self._drop(key) and self.lost is None:
            self._outgoing.put_nowait(RelayRequest(cancel=Cancel(request_id=key[0], attempt=key[1])))

    def fence(self, call: ClientCall) -> None:
        """Ends on the worker what earlier calls of the client's request have submitted, through whichever router."""
        if self.lost is None:
            self._outgoing.put_nowait(RelayRequest(fence=call))

    def answered(self, chain: Sequence[int]) -> None:
        """Lets the worker tell other routers that it has the KV of a prompt and its answer, whose units these are."""
        if self.lost is None:
            self._outgoing.put_nowait(RelayRequest(answered=Answered(chain=chain)))

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

    async def ended(self) -> bool:
        """Whether the worker has ended, since the stream is lost. One that listens at its address has not: it was
        frozen, or neither end got any CPU, or the network was cut for a while."""
        await asyncio.sleep(END_SECONDS)
        host, _, port = self._address.rpartition(":")
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                _, writer = await asyncio.open_connection(host.strip("[]"), port)
        except (OSError, TimeoutError):
            return True
        writer.close()
        return False

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
                with peer_status(call):
                    async for response in call:
                        first = self.model is None
                        self.heard = self._clock()
                        if first:
                            limit.reschedule(None)
                            found = WorkerId(response.hello.name, response.hello.incarnation)
                            if found != self.worker:
                                return f"{self._address} is {found}"
                            self.model = response.hello.model
                        if not len(response.slots) == len(response.indices) == len(response.token_ids):
                            return "the worker sent lists of different lengths"
                        await self._deliver(response)
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

    async def _deliver(self, response: RelayResponse) -> None:
        """Gives a message's parts to their listeners; others have their turn on the event loop now and then, since a
        message may have tokens of hundreds of requests."""
        if response.HasField("load"):
            self.last_load = response.load
            if response.load.HasField("costs"):
                costs = read_costs(response.load.costs)
                self.costs = costs if costs.step != StepCost() else None
            self.changes += 1
            while self._unseen and next(iter(self._unseen.values())).number <= response.submits_seen:
                self._account_for(next(iter(self._unseen)))
            self._on_load()
        if response.slots:
            # One look at the clock for many of them: there may be tens of thousands a second.
            now, by_slot = self._clock(), self._by_slot
            tokens = zip(response.slots, response.indices, response.token_ids, strict=True)
            while part := list(itertools.islice(tokens, TOKENS_AT_ONCE)):
                for slot, index, token in part:
                    if (listener := by_slot.get(slot)) is not None:
                        listener.on_token(self, index, token, now)
                now = await self._pause(now)
        now = self._clock()
        for event in response.events:
            found = self._listeners.get((event.request_id, event.attempt))
            if found is not None:
                found[1].on_event(self, event)
                now = await self._pause(now)
        for prompt in response.foreign:
            self._on_foreign(self.worker, prompt, self.block_size)
            now = await self._pause(now)

    async def _pause(self, since: float) -> float:
        """Lets others have their turn on the event loop if ROUND_SECONDS have passed since the time `since`; returns
        from when on to count again."""
        if self._clock() - since < ROUND_SECONDS:
            return since
        await asyncio.sleep(0)
        return self._clock()

    def _count(self, unseen: Unseen, sign: int) -> None:
        """Adds a submit to the sums, or takes it away from them."""
        self.changes += 1
        self.outstanding_tokens += sign * unseen.new_tokens
        self._unseen_yielding += sign * unseen.new_tokens * unseen.yields
        if unseen.decodes:
            self.unseen_requests += sign
            self.unseen_blocks[unseen.holder] += sign * unseen.blocks
            if not self.unseen_blocks[unseen.holder]:
                del self.unseen_blocks[unseen.holder]

    def _account_for(self, key: tuple[str, int]) -> None:
        """The latest load report accounts for (request_id, attempt), or it has ended here."""
        unseen = self._unseen.pop(key, None)
        if unseen is not None:
            self._count(unseen, -1)

    def _drop(self, key: tuple[str, int]) -> bool:
        """Returns whether there was a listener."""
        if key in self._unseen:
            self._account_for(key)
            self._on_load()  # no load report need follow
        slot, listener = self._listeners.pop(key, (0, None))
        self._by_slot.pop(slot, None)
        return listener is not None

    def _lose(self, reason: str) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        listeners = list(self._listeners.values())
        self._listeners.clear()
        self._by_slot.clear()
        for _, listener in listeners:
            listener.on_lost(self)
        self._on_change()
