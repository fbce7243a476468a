"""A worker in simulated time: the engine's scheduler and block pool, whose steps take what a table of costs says.

    router's session -> SimulatedStream -> SimulatedWorker -> Scheduler -> (a timer instead of a model) -> events back

A hand-off goes as in the product: the prefill worker offers a prompt when it begins to compute it, the decode worker
reserves blocks for it, in the scheduler's order, and the KV of each chunk follows over a link of limited bandwidth.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from kvrelay.costs.handoff import KvBytes
from kvrelay.costs.step import StepWork, pairs
from kvrelay.decode_worker.reservation_queue import ReservationQueue
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv.blocks import BlockPool, Hold
from kvrelay.engine.kv.prefix import PrefixIndex
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.request import Request
from kvrelay.engine.scheduling.progress import Progress, Reservation
from kvrelay.engine.scheduling.room import REPORTED, Room
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.sequence import Sequence as EngineSequence
from kvrelay.internal.v1.worker_pb2 import (
    PHASE_DECODE,
    PHASE_PREFILL,
    WAIT_BLOCKS,
    WAIT_PREEMPTED,
    Costs,
    Failure,
    Holding,
    Load,
    PeerRef,
    Promised,
    RelayRequest,
    RelayResponse,
    RequestEvent,
    Submit,
    TransferReport,
)
from kvrelay.router.placing.worker_stream import WorkerStream
from kvrelay.rpc.identity import WorkerId, WorkerRole
from kvrelay.transfer.protocol.endpoint import TransferStats
from kvrelay.worker.load import CostReports, LoadReports
from kvrelay.worker.relay.events import PlainToken, event_of
from kvrelay.worker.relay.requests import model_info, request_of

if TYPE_CHECKING:
    from simulated.cluster import Cluster, Place

Key = tuple[str, int]

GATHERED_STEPS = 4
"""Steps whose tokens go to the router together, unless one of them has more to tell: a message costs the simulation as
much as many tokens."""


StepSeconds = Callable[[Sequence[tuple[int, int]], Sequence[int]], float]
"""Function that gives the seconds of a step: of (tokens before it, tokens) of each chunk of a prompt, and the tokens of
context of each sequence that decodes."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of worker."""

    seconds: StepSeconds
    spec: ModelSpec
    engine: EngineConfig
    """Options of the engine, without `auto` ones."""
    kv_tokens: int
    """Tokens that the KV pool holds."""
    kv_bytes: float = 0.0
    """Bytes of KV of one token."""
    link_seconds: float = 0.0
    """Seconds for one byte on the link between two workers."""
    handoff_seconds: float = 0.0
    """Seconds of any hand-off behind its last byte."""


@dataclass(slots=True, eq=False)
class Handoff:
    """The KV of one prompt on its way."""

    request: Request
    sender: "SimulatedWorker"
    receiver: "SimulatedWorker"
    began: float
    reservation: Reservation | None = None
    sent: int = 0
    """Leading tokens that the receiver has, or will have when all that was sent has arrived."""
    computed: int = 0
    arrives: float = 0.0
    """Time at which all that was sent has arrived."""
    nbytes: float = 0.0
    last_bytes: float = 0.0
    """Bytes that were sent after the first token."""
    first_token: int | None = None
    first_at: float = 0.0
    hold: Hold | None = None
    """The sender's blocks, from the first token on."""
    offered: bool = False
    over: bool = False


@dataclass(slots=True, eq=False)
class Live:
    """A request of a worker."""

    slot: int
    phase: int
    handoff: Handoff | None = None


class SimulatedWorker:
    """One worker. Everything runs on the simulated event loop."""

    def __init__(self, cluster: "Cluster", identity: WorkerId, place: "Place") -> None:
        machine = place.machine
        self.id, self.role, self.machine, self.slowdown = identity, place.role, machine, place.slowdown
        self.link_factors = place.slow_links
        self.steps, self.step_seconds = 0, 0.0
        self.computed_tokens = self.prompt_tokens = 0
        self.busy_seconds = 0.0
        """Seconds in which a step ran."""
        self.stream: SimulatedStream | None = None
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()
        engine = machine.engine
        pool = BlockPool(machine.kv_tokens // engine.block_size)
        prefix = PrefixIndex(pool, engine.block_size, b"simulated", enabled=engine.prefix_cache)
        self.scheduler = Scheduler(engine, prefix, machine.spec, clock=self._loop.time)
        self.scheduler.on_start, self.scheduler.on_preempt = self._on_start, self._on_preempt
        self._live: dict[Key, Live] = {}
        self._room = Room(pool.total, engine.block_size)
        self._coming: dict[Key, Holding] = {}
        """Requests whose KV comes from elsewhere and that have no blocks yet, each with those that it needs."""
        self._offers = ReservationQueue()
        self._offered: dict[Key, Handoff] = {}
        """Hand-offs to this worker that wait for blocks."""
        self._link_free = 0.0
        """Time from which on the worker's network is free."""
        self._running = self._beginning = self.draining = False
        """Whether a step runs; whether one is about to begin."""
        self._submits_seen = 0
        self._tokens: list[tuple[int, int, int]] = []
        """(slot, index, token) of tokens that wait to be sent."""
        self._gathered = 0
        self._events: list[RequestEvent] = []
        self._sending = False
        self._costs = CostReports(self, KvBytes(machine.kv_bytes), self._loop.time)  # type: ignore[arg-type]  # a part of Engine
        self._costs_told: Costs | None = None
        self._measure()
        self._loads = LoadReports(self, engine.block_size, self._promised)  # type: ignore[arg-type]  # a part of Engine
        self._loads.attach(self)  # type: ignore[arg-type]  # a part of RelayStream

    # From the router.

    def attach(self, stream: "SimulatedStream") -> RelayResponse:
        """Takes a router's stream; returns its first message."""
        self.stream, self._submits_seen, self._costs_told = stream, 0, None
        return RelayResponse(load=self._load())

    def submit(self, submit: Submit) -> None:
        """Takes a part of a request, or returns it."""
        key = submit.request_id, submit.attempt
        self._submits_seen += 1
        if self.draining:
            self._send(RequestEvent(request_id=key[0], attempt=key[1], failure=self._moving))
            return
        request = request_of(submit, self.machine.spec, self._loop.time())
        live = self._live[key] = Live(submit.slot, submit.phase)
        if submit.phase == PHASE_DECODE:
            blocks = self._room.wanted(request, len(request.tokens))
            self._coming[key] = Holding(holder=request.holder, blocks=blocks)
            self._loads.changed()
            return
        if submit.phase == PHASE_PREFILL and submit.peer.name:
            receiver = self._cluster.worker(WorkerId(submit.peer.name, submit.peer.incarnation))
            if receiver is None:
                blamed = [PeerRef(name=submit.peer.name, incarnation=submit.peer.incarnation)]
                failure = Failure(code=Failure.CODE_RETRY, cause=Failure.CAUSE_PEER_LOST, blamed=blamed)
                self._fail(key, failure)
                return
            live.handoff = Handoff(request, self, receiver, self._loop.time())
        self._loads.give(request)
        self._loads.take(request)
        self.scheduler.add(request, handoff=live.handoff is not None)
        self._loads.changed()
        self._wake()

    def cancel(self, key: Key) -> None:
        """Ends a request without another event."""
        live = self._live.pop(key, None)
        if live is not None:
            self._coming.pop(key, None)
            if live.handoff is not None:
                self._end_handoff(live.handoff)
            self.scheduler.cancel(key)
            self._blocks_freed()

    def drain(self) -> None:
        """Takes nothing more, and returns all requests to the router."""
        self.draining = True
        for key in list(self._live):
            self._fail(key, self._moving)

    def take_role(self, identity: WorkerId, role: WorkerRole) -> None:
        """Goes on as another incarnation after `drain`; the prefix cache stays."""
        self.id, self.role, self.draining, self.stream = identity, role, False, None
        self.steps, self.step_seconds = 0, 0.0
        self.computed_tokens = self.prompt_tokens = 0

    # Load.

    def load(self) -> Load:
        """The worker's load and costs, as its heartbeat tells them."""
        load = self._loads.now()
        if (costs := self._costs.now()) is not None:
            load.costs.CopyFrom(costs)
        return load

    def report(self) -> None:
        """Tells the router the load now."""
        self._flush()

    def _load(self) -> Load:
        load = self._loads.now()
        costs = self._costs.now()
        if costs is not None and costs is not self._costs_told:
            load.costs.CopyFrom(costs)
            self._costs_told = costs
        return load

    def _promised(self) -> Promised:
        """Requests that decode here and have no blocks yet."""
        blocks: Counter[int] = Counter()
        for each in self._coming.values():
            blocks[each.holder] += each.blocks
        holdings = [Holding(holder=holder, blocks=count) for holder, count in blocks.most_common(REPORTED)]
        return Promised(requests=len(self._coming), blocks=blocks.total(), holdings=holdings)

    def _measure(self) -> None:
        """Fits a few steps, as a worker does before it is ready."""
        seconds, most = self.machine.seconds, self.machine.engine.max_batch_tokens
        for _ in range(2):
            for tokens in (most // 16, most // 4, most // 2, most):
                for start in (0, 4 * most):
                    work = StepWork(tokens, pairs(start, tokens))
                    self.scheduler.fit.add(work, self.slowdown * seconds([(start, tokens)], []))
            for rows in (1, 8, self.machine.engine.max_sequences // 2):
                for context in (64, 1024, 4096):
                    if rows * context <= self.machine.kv_tokens:
                        work = StepWork(sequences=rows, context_tokens=rows * context)
                        self.scheduler.fit.add(work, self.slowdown * seconds([], [context] * rows))

    # Steps.

    def _wake(self) -> None:
        """Begins a step when all that happens at this moment has happened, unless one runs."""
        if not self._running and not self._beginning:
            self._beginning = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._beginning = False
        if self._running:
            return
        plan = self.scheduler.plan()
        if plan is None and self._grant():
            plan = self.scheduler.plan()
        if plan is None:
            return
        rows = list(zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True))
        chunks = [(start, length) for start, length in rows if length > 1]
        contexts = [start + 1 for start, length in rows if length == 1]
        seconds = self.slowdown * self.machine.seconds(chunks, contexts)
        self._running = True
        self._loop.call_later(seconds, self._end, plan, seconds)

    def _end(self, plan: StepPlan, seconds: float) -> None:
        self._running = False
        rows = zip(self.scheduler.newest(), plan.sample.tolist(), strict=True)
        tokens = tuple([self._cluster.token(row) if yields else None for row, yields in rows])
        progress = self.scheduler.commit(plan, StepOutput(tokens))
        self.steps += 1
        self.step_seconds += seconds
        self.busy_seconds += seconds
        self.computed_tokens += plan.num_tokens
        self.prompt_tokens += int(plan.work.prompt_tokens)
        self.scheduler.fit.add(plan.work, seconds)
        self.scheduler.fit.add_interval(plan.work, seconds)
        told = self._take(progress)
        self._gathered += 1
        self._grant()
        if told or self._gathered >= GATHERED_STEPS:
            self._loads.update(self._loads.read())
            self._flush()
        self._begin()

    def _take(self, progress: Iterable[Progress]) -> bool:
        """Queues what a step has yielded; returns whether it is more than plain tokens."""
        told = False
        for each in progress:
            key = each.sequence.request.key
            live = self._live.get(key)
            if live is None:
                if each.hold is not None:
                    each.hold.release()
                continue
            if live.handoff is not None:
                self._advance(live.handoff, each)
            event = event_of(each)
            if isinstance(event, PlainToken):
                self._tokens.append((live.slot, event.token_index, event.token))
                continue
            told = True
            self._events.append(event)
            if event.finish_reason or event.HasField("failure"):
                del self._live[key]
        return told

    def _on_start(self, sequence: EngineSequence) -> None:
        live = self._live.get(sequence.request.key)
        if live is not None and live.handoff is not None and not live.handoff.offered:
            live.handoff.offered = True
            live.handoff.receiver.offer(live.handoff)

    def _on_preempt(self, sequence: EngineSequence) -> None:
        request = sequence.request
        self._send(RequestEvent(request_id=request.request_id, attempt=request.attempt, waits=WAIT_PREEMPTED))

    # Hand-offs.

    def offer(self, handoff: Handoff) -> None:
        """A prefill worker begins to compute a prompt for this worker."""
        if (live := self._live.get(handoff.request.key)) is not None:
            live.handoff = handoff
        request_id, attempt = key = handoff.request.key
        self._offered[key] = handoff
        if not self._reserve(handoff):
            self._offers.wait(key, handoff.request.urgency)
            self._send(RequestEvent(request_id=request_id, attempt=attempt, waits=WAIT_BLOCKS))

    def _grant(self) -> bool:
        """Reserves blocks for the offers that wait; returns whether one got some."""
        granted = False
        while (key := self._offers.first) is not None and self._reserve(self._offered[key]):
            granted = True
        return granted

    def _reserve(self, handoff: Handoff) -> bool:
        key, urgency = handoff.request.key, handoff.request.urgency
        reservation = self.scheduler.reserve(handoff.request, passing=self._offers.passing(key, urgency))
        if reservation is None:
            return False
        self._forget_offer(handoff)
        self._coming.pop(key, None)
        self._loads.update(self._loads.read())
        handoff.reservation, handoff.sent = reservation, reservation.have[0]
        handoff.sender.push(handoff)
        return True

    def _advance(self, handoff: Handoff, progress: Progress) -> None:
        """This worker has computed a part of a prompt that it hands over, or goes on with one that it was handed."""
        if handoff.sender is not self or handoff.over:
            return
        handoff.computed = progress.computed
        if progress.token is not None:
            if progress.hold is None:  # its first token is its last one
                self._end_handoff(handoff)
                return
            handoff.hold, handoff.first_token, handoff.first_at = progress.hold, progress.token, self._loop.time()
        self.push(handoff)

    def push(self, handoff: Handoff) -> None:
        """Sends what is computed and not sent, once there are blocks for it."""
        if handoff.reservation is None or handoff.over:
            return
        now, receiver = self._loop.time(), handoff.receiver
        if (tokens := handoff.computed - handoff.sent) > 0:
            nbytes = tokens * self.machine.kv_bytes
            factor = self.link_factors.get(receiver.id.name, 1.0)
            begin = max(now, self._link_free, receiver._link_free)
            handoff.arrives = begin + nbytes * self.machine.link_seconds * factor
            self._link_free = receiver._link_free = handoff.arrives
            handoff.sent = handoff.computed
            handoff.nbytes += nbytes
            if handoff.first_token is not None:
                handoff.last_bytes += nbytes
        if handoff.first_token is not None:
            self._loop.call_at(max(now, handoff.arrives) + self.machine.handoff_seconds, receiver.receive, handoff)

    def receive(self, handoff: Handoff) -> None:
        """All of a prompt's KV is here."""
        if handoff.over or handoff.reservation is None or handoff.first_token is None:
            return
        now, sender, request = self._loop.time(), handoff.sender, handoff.request
        handoff.over = True
        self.scheduler.resume(request, handoff.first_token, handoff.reservation.hold)
        took, exposed, nbytes = now - handoff.began, now - handoff.first_at, int(handoff.nbytes)
        last = int(handoff.last_bytes)
        self._costs.received(TransferStats(took, exposed, nbytes, sender=sender.id.name, exposed_nbytes=last))
        report = TransferReport(transfer_seconds=took, handoff_seconds=exposed, transfer_bytes=nbytes)
        sender.handed_over(handoff, report)
        self._loads.changed()
        self._wake()

    def handed_over(self, handoff: Handoff, report: TransferReport) -> None:
        """The decode worker has taken a prompt over: its blocks here are free."""
        if handoff.hold is not None:
            handoff.hold.release()
        request_id, attempt = key = handoff.request.key
        if self._live.pop(key, None) is not None:
            self._send(RequestEvent(request_id=request_id, attempt=attempt, transfer=report))
        self._blocks_freed()

    def _end_handoff(self, handoff: Handoff) -> None:
        """Gives up a hand-off, at either end."""
        if handoff.over:
            return
        handoff.over = True
        handoff.receiver._forget_offer(handoff)
        if handoff.reservation is not None:
            handoff.reservation.release()
        if handoff.hold is not None:
            handoff.hold.release()
        for worker in (handoff.sender, handoff.receiver):
            worker._blocks_freed()

    def _forget_offer(self, handoff: Handoff) -> None:
        self._offered.pop(handoff.request.key, None)
        self._offers.leave(handoff.request.key)

    def _blocks_freed(self) -> None:
        self._loads.update(self._loads.read(), tell=True)
        self._grant()
        self._wake()

    # Towards the router.

    @property
    def _moving(self) -> Failure:
        me = PeerRef(name=self.id.name, incarnation=self.id.incarnation)
        return Failure(
            code=Failure.CODE_RETRY, cause=Failure.CAUSE_DRAINING, message=f"{self.id.name} drains", blamed=[me]
        )

    def _fail(self, key: Key, failure: Failure) -> None:
        self.cancel(key)
        self._send(RequestEvent(request_id=key[0], attempt=key[1], failure=failure))

    def _send(self, event: RequestEvent) -> None:
        """Sends an event soon: it may be the router that calls."""
        self._events.append(event)
        if not self._sending:
            self._sending = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._sending, self._gathered = False, 0
        events, tokens, stream = self._events, self._tokens, self.stream
        self._events, self._tokens = [], []
        if stream is None or stream.lost is not None:
            return
        response = RelayResponse(load=self._load(), submits_seen=self._submits_seen, events=events)
        if tokens:
            slots, indices, ids = zip(*tokens, strict=True)
            response.slots.extend(slots)
            response.indices.extend(indices)
            response.token_ids.extend(ids)
        stream.take(response)


class SimulatedStream(WorkerStream):
    """The router's stream to a simulated worker. Nothing takes time on the way."""

    def __init__(self, cluster: "Cluster", *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]  # those of WorkerStream
        self._cluster = cluster
        self._ended = asyncio.Event()
        self._simulated: SimulatedWorker | None = None
        # What is put into the queue is taken at once.
        self._outgoing = SimpleNamespace(put_nowait=self._forward)  # type: ignore[assignment]  # a part of asyncio.Queue

    async def run(self) -> None:
        """Carries requests until the worker has another incarnation, or `close` is called."""
        self._simulated = worker = self._cluster.worker(self.worker)
        if worker is None:
            self._lose("the worker is gone")
            return
        self.model = model_info("simulated", worker.machine.spec)
        self.take(worker.attach(self))
        self._on_change()
        await self._ended.wait()

    def take(self, response: RelayResponse) -> None:
        """Delivers a message of the worker."""
        self.heard = self._clock()
        delivery = self._deliver(response)
        try:
            delivery.send(None)
        except StopIteration:
            return
        raise RuntimeError("the delivery of a message waits, although no time passes")

    def close(self, reason: str) -> None:
        self._lose(reason)
        self._ended.set()

    async def ended(self) -> bool:
        return True

    def _forward(self, request: RelayRequest) -> None:
        worker = self._simulated
        if worker is None:
            return
        match request.WhichOneof("message"):
            case "submit":
                worker.submit(request.submit)
            case "cancel":
                worker.cancel((request.cancel.request_id, request.cancel.attempt))
