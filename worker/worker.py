"""One worker, from the moment its model is loaded: its requests, its engine, its load.

A request lives here from its Submit until its last event is queued for its router, or until it is cancelled. Everything
here runs on the event loop, except the methods in the section "Engine thread".
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvrelay.engine.constrain.compiler import ConstraintCompiler, ConstraintLimits
from kvrelay.engine.constrain.grammar import ConstraintError
from kvrelay.engine.degree import ONE
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv.blocks import Hold
from kvrelay.engine.kv.layout import CacheLayout
from kvrelay.engine.lifetime import now
from kvrelay.engine.request import Request
from kvrelay.engine.runner.base import Runner
from kvrelay.engine.scheduling.progress import Progress, Reservation
from kvrelay.engine.sequence import Sequence as EngineSequence
from kvrelay.engine.states import StatesLayout
from kvrelay.internal.v1.supervisor_pb2 import Member
from kvrelay.internal.v1.worker_pb2 import (
    PHASE_COLOCATED,
    WAIT_PREEMPTED,
    WAIT_TURN,
    Answered,
    ClientCall,
    Costs,
    Failure,
    Load,
    PeerRef,
    RequestEvent,
    Submit,
    Wait,
    WorkerHello,
)
from kvrelay.models import model_name, resolve
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.identity import WorkerId, context_limit
from kvrelay.rpc.log import reason
from kvrelay.transfer.protocol.endpoint import TransferStats
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.peers import NEWS_SECONDS
from kvrelay.transfer.protocol.ports import LoopRuntime
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.engine_thread import EngineThread
from kvrelay.worker.first_costs import keep_costs
from kvrelay.worker.load import CostReports, LoadReading, LoadReports, kv_bytes
from kvrelay.worker.metrics import WorkerMetrics
from kvrelay.worker.ranks.group import RankGroup
from kvrelay.worker.relay.events import PlainToken, event_of
from kvrelay.worker.relay.fences import Fences
from kvrelay.worker.relay.foreign_prompts import ForeignPrompts
from kvrelay.worker.relay.live_request import LiveRequest, refused_suspect
from kvrelay.worker.relay.requests import key_of, model_info, peer_of, request_of, states_message
from kvrelay.worker.relay.stream import RelayStream
from kvrelay.worker.role import Key, Role

logger = logging.getLogger(__name__)

_FENCED = Failure(code=Failure.CODE_FENCED, message="a later call of the client continues this request")

CHECK_SECONDS = 10.0
"""Seconds between two integrity checks of the block pool; a check takes a moment if the pool is large."""
SETTLE_SECONDS = 10.0
"""Seconds for the hand-offs of a role that the worker gives up to release their blocks."""
SETTLE_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class WorkerHooks:
    """Calls by which a worker reaches the process around it. `failed` may be called on any thread."""

    load_changed: Callable[[], None]
    """Called when blocks were freed: sends a heartbeat now."""
    failed: Callable[[BaseException], None]
    """Called when the worker can't go on."""
    metrics: WorkerMetrics


class Worker:
    """Serves the requests of all routers. Roles use the methods of the section "For the role"."""

    def __init__(
        self,
        config: WorkerConfig,
        identity: WorkerId,
        engine: Engine,
        runner: Runner,
        role: Callable[["Worker"], Role],
        hooks: WorkerHooks,
        credentials: Credentials,
        ranks: RankGroup | None = None,
    ) -> None:
        """Starts the engine thread.

        Args:
            ranks: of the worker, if it has several.
        """
        self.ranks = ranks
        self._whole_cache: CacheLayout = runner.whole_cache_layout
        self.config = config
        self.id = identity
        self.credentials = credentials
        self.metrics = hooks.metrics
        self._runner, self.spec = runner, runner.spec
        self.pools = runner.pools
        self.cache = runner.cache_layout
        self.states_shape = runner.states_shape
        self.fetch = runner.fetch
        guesses = engine.scheduler.speculation
        self.states = None if guesses is None else guesses.states(runner)
        """Hidden states of prompts that its proposer guesses from."""
        self._prefill_attention = runner.prefill_attention
        self._loop = asyncio.get_running_loop()
        self.post_to_loop = LoopRuntime().post
        """Runs a call with its arguments on the event loop. Any thread."""
        self.engine = engine
        self.hooks = hooks
        self._live: dict[Key, LiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._checked = 0.0
        self._submitted = 0
        """Number of requests that have come so far."""
        self._fences = Fences()
        self._foreign = ForeignPrompts()
        self._loads = LoadReports(engine, self.cache.block_size, lambda: self.role.promised())
        self._costs = CostReports(engine, kv_bytes(self.cache))
        self._constraints = ConstraintCompiler(
            resolve(config.model),
            self.spec.vocab_size,
            self.spec.eos_token_ids,
            ConstraintLimits(config.engine.constraint_seconds, config.engine.constraint_bytes),
            lambda: self.thread.post(_nothing),
        )
        self.thread = EngineThread(engine, self._on_step, hooks.failed)
        engine.scheduler.on_preempt = self._on_preempt
        self.role = role(self)
        self.metrics.watch(engine, self.load, self.role.endpoint, self._costs.errors)
        self.thread.start()

    async def drain(self, grace: float) -> None:
        """Takes nothing new, gives live requests `grace` seconds to end, then returns them: they move elsewhere."""
        self._draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace)
        for key in list(self._live):
            self.fail(key, Failure(**self._moving))
        await self.role.stop(self._moving["cause"])

    @property
    def _failed(self) -> bool:
        """Whether the engine can't go on. Its thread may still be in a step when a rank is lost."""
        return self.thread.ended or (self.ranks is not None and self.ranks.failure is not None)

    @property
    def _moving(self) -> dict[str, Any]:
        """The failure of a request that this worker returns because it ends."""
        why = "its engine has failed" if self._failed else "is draining"
        cause = Failure.CAUSE_PEER_LOST if self._failed else Failure.CAUSE_DRAINING
        me = PeerRef(name=self.id.name, incarnation=self.id.incarnation)
        return {"code": Failure.CODE_RETRY, "message": f"worker {self.id.name}: {why}", "cause": cause, "blamed": [me]}

    async def take_role(self, identity: WorkerId, config: WorkerConfig, role: Callable[["Worker"], Role]) -> None:
        """Goes on after `drain` as another incarnation with another role; weights, KV pool and prefix cache stay.

        Args:
            identity: with another incarnation, so that whatever is still under way for the one before is refused.

        Raises:
            RuntimeError: the role before holds blocks for longer than SETTLE_SECONDS.
            IntegrityError: a block is lost.
            EngineEndedError: the engine has ended.
        """
        deadline = self._loop.time() + SETTLE_SECONDS
        await self.thread.call(_nothing)  # what the engine thread has posted to this loop comes before the answer
        while self._live or self.role.active:
            if self._loop.time() > deadline:
                raise RuntimeError(f"{self.role.active} hand-offs of the {self.config.role} role don't end")
            await asyncio.sleep(SETTLE_POLL_SECONDS)
        await self.thread.call(partial(self.engine.scheduler.check_integrity, idle=True))
        self.id, self.config = identity, config
        self.engine.scheduler.on_start = self.engine.on_launch = None
        self.role = role(self)
        self.metrics.take_role(config.role, self.engine, self.role.endpoint)
        self._draining = False

    async def stop(self) -> None:
        """Ends the engine thread."""
        if not await asyncio.to_thread(self.thread.stop, 5.0):
            logger.error("the engine's step did not end within 5 s")
        self._constraints.close()

    # For the role.

    def local(self, *, takes_states: bool = False) -> LocalWorker:
        """This worker, as it introduces itself to its peers; with `takes_states`, hidden states may come from them."""
        return LocalWorker(
            self.id,
            self._whole_cache,
            self.spec.fingerprint,
            self.pools[0].bytes.is_cuda,
            self.states if takes_states and self.config.transfer.states_bytes else None,
            self.states_shape,
            degree=ONE if self.ranks is None else self.ranks.degree,
        )

    def request(self, key: Key) -> Request | None:
        """The live request of this key."""
        live = self._live.get(key)
        return None if live is None else live.request

    def peer(self, key: Key) -> PeerRef:
        """The other worker of a live request's hand-off; without a name if there is none."""
        live = self._live.get(key)
        return PeerRef() if live is None else live.peer

    def compute(self, request: Request, *, handoff: bool = False, states: StatesLayout | None = None) -> None:
        """Gives the request to the engine; with `handoff` it leaves the engine after its first token, with these hidden
        states.
        """
        self._loads.give(request)

        def add() -> None:
            self._loads.take(request)
            try:
                self.engine.scheduler.add(request, handoff=handoff, states=states)
            except ValueError as error:
                self.post_to_loop(self.fail, request.key, Failure(code=Failure.CODE_INVALID, message=str(error)))
            else:
                if len(request.tokens) > request.prompt_tokens:  # its client has tokens, and waits for the next one
                    self.post_to_loop(self.note_wait, request.key, WAIT_TURN)

        self.thread.post(add)

    def release(self, hold: Hold | Reservation) -> None:
        """Releases blocks that the role has kept."""
        self.thread.post(hold.release)
        self._refresh_load()

    def send(self, event: RequestEvent, *, last: bool = False) -> None:
        """Sends an event of a live request to its router; with `last` the request is over here."""
        key = key_of(event)
        live = self._live.get(key)
        if live is None:
            return
        live.stream.push(event)
        self._foreign.note(live, event)
        live.sent(len(event.token_ids), event.computed_tokens)
        if event.HasField("prefill"):
            self.metrics.prefilled(event.prefill)
        if event.HasField("decode") and not live.decode_reported:
            live.decode_reported = True
            self.metrics.decoded(event.decode)
        if event.HasField("failure"):
            self.metrics.returned(event.failure.code)
            fields = {"trace_id": live.trace_id, "request": key[0], "attempt": key[1], "worker": self.id.name}
            told = reason(event.failure.code, event.failure.message)
            logger.warning("request failed", extra=fields | {"reason": told})
        if last:
            self._forget(key)

    def note_wait(self, key: Key, why: Wait) -> None:
        """Tells a live request's router that it waits here, so that the router doesn't take it for silence."""
        live = self._live.get(key)
        if live is not None and live.waits != why:
            live.waits = why
            live.stream.push(RequestEvent(request_id=key[0], attempt=key[1], waits=why))

    def fail(self, key: Key, failure: Failure) -> None:
        """Returns a live request to its router, and frees what it has here."""
        if key not in self._live:
            return
        event = RequestEvent(request_id=key[0], attempt=key[1], failure=failure)
        self._release(key, failure.cause)
        self.send(event, last=True)

    # For the relay and the heartbeat.

    def describe(self, member: Member) -> None:
        """Adds to this worker's heartbeat what its engine does, and who it can hand KV over with."""
        thread, role = self.thread, self.role
        member.transports.extend(role.transports)
        member.compatibility = role.compatibility
        if (states := role.local.states) is not None:
            member.states.CopyFrom(states_message(states))
        member.tensor_ranks, member.pipeline_stages = role.local.degree.tensor, role.local.degree.pipeline
        member.rank_pids.extend(() if self.ranks is None else self.ranks.pids())
        member.step_age_seconds = thread.step_age
        member.slow_step_seconds = thread.slow_step
        member.failed = self._failed
        member.max_context = self.spec.max_context
        member.context_limit = context_limit(self.spec.context_limit)
        member.weights, member.kv_dtype = self.spec.weights, self.cache.dtype
        member.prefill_attention = self._prefill_attention

    def hello(self) -> WorkerHello:
        """The message that a router is told first."""
        return WorkerHello(
            name=self.id.name,
            incarnation=self.id.incarnation,
            model=model_info(model_name(self.config.model), self.spec),
        )

    def load(self) -> Load:
        """The current load, without costs."""
        return self._loads.now()

    def costs(self) -> Costs | None:
        """The costs of steps and hand-offs; a new object when they have changed. None before the second step."""
        return self._costs.now()

    def keep_costs(self) -> None:
        """Keeps the costs of steps for the next worker of this kind."""
        keep_costs(self.engine, self._runner)

    def received(self, stats: TransferStats) -> None:
        """Notes that a hand-off to here was committed."""
        self.metrics.received(stats)
        self._costs.received(stats)

    def attach(self, stream: RelayStream) -> None:
        """Adds the stream of a router that has come; it gets the load whenever that changes."""
        self._loads.attach(stream)
        self._foreign.attach(stream)

    def submit(self, submit: Submit, stream: RelayStream) -> None:
        """Takes a request, or refuses it on the stream that it came on."""
        key = key_of(submit)
        refusal = self._refusal(submit)
        if refusal is not None:
            self.metrics.returned(refusal.code)
            stream.push(RequestEvent(request_id=key[0], attempt=key[1], failure=refusal))
            return
        request = request_of(submit, self.spec, now())
        expiry = None
        if submit.timeout_seconds > 0:
            expiry = self._loop.call_later(submit.timeout_seconds, self._expire, key, submit.timeout_seconds)
        self._live[key] = live = LiveRequest.of(submit, request, stream, expiry)
        self._submitted += 1
        self._idle.clear()
        if live.held is not None:
            stream.push(RequestEvent(request_id=key[0], attempt=key[1], taken=True))
        else:
            self.role.expect(request, submit)
            peer = peer_of(submit)
            if request.sampling.constraint is None and (peer is None or not self.role.peers.is_news(peer)):
                self.role.submit(request, submit)
            else:
                self._submit_later(live, submit)
        self._loads.changed()

    def begin(self, key: Key, stream: RelayStream) -> None:
        """Computes a suspect that came on `stream`. Other keys are ignored."""
        live = self._live.get(key)
        if live is not None and live.stream is stream and live.held is not None:
            submit, live.held = live.held, None
            self.role.expect(live.request, submit)
            self._submit_later(live, submit)
            self._loads.changed()

    def _submit_later(self, live: LiveRequest, submit: Submit) -> None:
        """Gives a live request to the role once its constraint is compiled and its peer is known."""

        async def give() -> None:
            key, constraint, peer = live.request.key, live.request.sampling.constraint, peer_of(submit)
            if constraint is not None:
                try:
                    live.request = replace(live.request, grammar=await self._constraints.compile(constraint))
                except ConstraintError as error:
                    self.fail(key, Failure(code=Failure.CODE_INVALID, message=str(error)))
                    return
            if peer is not None:  # if it stays unknown, the hand-off refuses it, with the reason
                await self.role.peers.met(peer, NEWS_SECONDS)
            if self._live.get(key) is live:
                self.role.submit(live.request, submit)
                self._loads.changed()

        task = asyncio.create_task(give(), name=f"submit {live.request.key}")
        task.add_done_callback(self._on_task_done)

    def fence(self, fence: ClientCall) -> None:
        """Returns what earlier calls of the client's request have submitted, on any stream, and takes no more of it."""
        self._fences.add(fence)
        for key in [key for key, live in self._live.items() if live.client_call.key == fence.key]:
            if self._fences.passed(self._live[key].client_call):
                self.fail(key, _FENCED)

    def answered(self, answered: Answered, stream: RelayStream) -> None:
        """Tells the other routers of an answer that came on `stream`."""
        self._foreign.answered(answered, stream)

    def cancel(self, key: Key, stream: RelayStream) -> None:
        """Ends a request that came on `stream`, without another event. Other keys are ignored."""
        live = self._live.get(key)
        if live is not None and live.stream is stream:
            self.drop(key)

    def drop(self, key: Key) -> None:
        """Ends a live request without another event. Other keys are ignored."""
        if key in self._live:
            self._release(key)
            self._forget(key)

    def abandon(self, stream: RelayStream) -> None:
        """Cancels every request that was submitted on a stream that has ended."""
        self._loads.detach(stream)
        self._foreign.detach(stream)
        for key in [key for key, live in self._live.items() if live.stream is stream]:
            self.cancel(key, stream)

    def _refusal(self, submit: Submit) -> Failure | None:
        name, most = self.id.name, self.config.max_waiting
        if key_of(submit) in self._live:
            return Failure(code=Failure.CODE_INTERNAL, message=f"attempt {submit.attempt} was submitted twice")
        if submit.phase not in self.role.phases:
            return Failure(code=Failure.CODE_INTERNAL, message=f"a {self.config.role} worker takes no such phase")
        if self._fences.passed(submit.client_call):
            return _FENCED
        if self._draining:
            return Failure(**self._moving)
        # Up to engine.max_sequences run, which may be more than may wait.
        if (waiting := len(self._live) - self._loads.running) >= most:
            message = f"worker {name} has {waiting} requests that wait; max_waiting is {most}"
            return Failure(code=Failure.CODE_FULL, message=message)
        if suspects := refused_suspect(submit, self._live.values()):
            return Failure(code=Failure.CODE_RETRY, cause=Failure.CAUSE_TRIAL, message=f"{name} has {suspects}")
        return None

    def _expire(self, key: Key, seconds: float) -> None:
        live = self._live.get(key)
        if live is not None and live.waits:
            # For others, and not because of a fault. Its router ends what has waited for too long.
            live.expiry = self._loop.call_later(seconds, self._expire, key, seconds)
            return
        message = f"no token within the request's time on worker {self.id.name}"
        self.fail(key, Failure(code=Failure.CODE_FULL, message=message))

    def _release(self, key: Key, cause: Failure.Cause = Failure.CAUSE_UNSPECIFIED) -> None:
        """Frees what the request has in the engine and in the role; `cause` as in `Role.cancel`."""
        self.role.cancel(key, cause)
        self.thread.post(partial(self._cancel, key))
        self._refresh_load()

    def _forget(self, key: Key) -> None:
        live = self._live.pop(key)
        if live.expiry is not None:
            live.expiry.cancel()
        if not self._live:
            self._on_idle()

    def _on_idle(self) -> None:
        """Checks the block pool, at most every CHECK_SECONDS: a leak ends this process before it fills the pool."""
        self._idle.set()
        if self._loop.time() - self._checked >= CHECK_SECONDS:
            self._checked = self._loop.time()
            # What the engine thread has posted to this loop must arrive first: it may carry holds that end at once.
            self.thread.post(partial(self.post_to_loop, self._check_blocks, self._submitted))

    def _check_blocks(self, submitted: int) -> None:
        idle = not self._live and self.role.active == 0

        def check() -> None:
            # A request that has come since may hold blocks: the event loop reserves them, under the engine's lock.
            self.engine.scheduler.check_integrity(idle=idle and self._submitted == submitted)

        self.thread.post(check)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        """Ends the worker if a task failed: such a defect must not pass unnoticed, or its request would wait until its
        deadline.
        """
        if not task.cancelled() and (error := task.exception()) is not None:
            self.hooks.failed(error)

    # Load.

    def _refresh_load(self) -> None:
        """Reads the load again, after the commands that were posted before, and sends it to the routers."""
        self.thread.post(partial(self.note_load, tell=True))

    def note_load(self, *, tell: bool = False) -> None:
        """Reads the load, with the engine's lock, and takes it on the event loop, after what was posted before."""
        self.post_to_loop(partial(self._set_load, self._loads.read(), tell=tell))

    def _set_load(self, reading: LoadReading, *, tell: bool = False) -> None:
        """Sends the load at once if blocks were freed: whoever waits for them should not wait for a heartbeat."""
        if self._loads.update(reading, tell=tell):
            self.hooks.load_changed()

    def _deliver(self, events: Sequence[RequestEvent | PlainToken], reading: LoadReading) -> None:
        self._set_load(reading)
        for event in events:
            if isinstance(event, RequestEvent):
                self.send(event, last=bool(event.finish_reason) or event.HasField("failure"))
            elif (live := self._live.get(event.key)) is not None:
                live.stream.push_token(live.slot, event)
                live.sent(1)

    # Engine thread.

    def _cancel(self, key: Key) -> None:
        if self.engine.scheduler.cancel(key):
            # The sequence's blocks may be free now, and no step may follow that would tell.
            self.role.on_step(())

    def _on_preempt(self, sequence: EngineSequence) -> None:
        self.post_to_loop(self.note_wait, sequence.request.key, WAIT_PREEMPTED)

    def _on_step(self, progress: Sequence[Progress]) -> None:
        events = [event_of(step) for step in progress]
        # Tokens go first. The role may end a hand-off before this thread goes on, and with it the request.
        self.post_to_loop(self._deliver, events, self._loads.read())
        self.role.on_step(progress)


class ColocatedRole(Role):
    """The co-located role: it computes each request to its end."""

    phases = (PHASE_COLOCATED,)

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.local(), worker.config.transfer)
        self._worker = worker

    def submit(self, request: Request, submit: Submit) -> None:
        self._worker.compute(request)


def _nothing() -> None:
    """Does nothing. As a command it waits for earlier commands, or wakes the engine's thread."""
