"""A worker process of any role: identity, engine, relay, attendance.

    STARTING   its port is bound and its heartbeats run; weights load in a thread of their own
    READY      takes requests
    DRAINING   finishes what it has, takes nothing new
    (gone)     by SIGTERM after draining, by a failure of the engine, or fenced by the supervisor

Two threads: the event loop (gRPC and everything here) and the engine thread (`EngineThread`). A request lives here from
its Submit until its last event has been handed to its router's stream, or until it is cancelled.
"""

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvrelay.engine.build import build_engine
from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.progress import Progress
from kvrelay.engine.request import Request
from kvrelay.engine.runner import Runner
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_STARTING,
    ROLE_COLOCATED,
    ROLE_DECODE,
    ROLE_PREFILL,
    Member,
    MemberState,
)
from kvrelay.internal.v1.worker_pb2 import (
    Blocks,
    Failure,
    Load,
    RequestEvent,
    Requests,
    Submit,
    WorkerHello,
)
from kvrelay.internal.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from kvrelay.models import resolve
from kvrelay.rpc.address import bind, join
from kvrelay.rpc.heartbeat import HeartbeatClient
from kvrelay.rpc.options import server_options
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.engine_thread import EngineThread
from kvrelay.worker.events import event_of
from kvrelay.worker.relay import RelayService, RelayStream, key_of
from kvrelay.worker.requests import InvalidSubmit, model_info, request_of
from kvrelay.worker.role import Role

logger = logging.getLogger(__name__)

ROLES = {"prefill": ROLE_PREFILL, "decode": ROLE_DECODE, "colocated": ROLE_COLOCATED}
Key = tuple[str, int]

T = TypeVar("T")

Build = Callable[[Path, Dtype, EngineConfig, Callable[[float], None]], tuple[Engine, Runner]]
"""Makes the engine of a worker, and its runner; as `build_engine`."""


CHECK_SECONDS = 10.0
"""Between two recounts of the block pool, which take a moment where it is large."""


@dataclass(slots=True)
class Live:
    """A request that this worker has, from its Submit to its last event."""

    request: Request
    stream: RelayStream
    expiry: asyncio.TimerHandle | None
    """Ends the request if it has no token by then."""


class WorkerServer:
    """Serves one worker. `observer` is given the load at every heartbeat."""

    def __init__(
        self,
        config: WorkerConfig,
        role: Callable[["WorkerServer"], Role] = Role,
        observer: Callable[[Load], None] | None = None,
        build: Build = build_engine,
    ) -> None:
        self.config = config
        self.incarnation = uuid.uuid4().hex
        self.role = role(self)
        self._observer = observer
        self._build = build
        self._state: MemberState = MEMBER_STATE_STARTING
        self._loaded = 0.0
        self._load = Load()
        self._live: dict[Key, Live] = {}
        self._streams: set[RelayStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._checked = 0.0
        self._port = 0
        self._server: grpc.aio.Server | None = None
        self._engine: Engine | None = None
        self._runner: Runner | None = None
        self._thread: EngineThread | None = None
        self._attendance: HeartbeatClient | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in its type stubs

    # Life.

    @property
    def address(self) -> str:
        """host:port of the internal gRPC."""
        return join(self.config.host, self._port)

    async def start(self) -> None:
        """Binds, attends the supervisor, loads the model; returns when ready.

        Raises:
            OSError: the port is in use.
            ValueError: the model or an option can't be used; the text says which and why.
        """
        self.loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[BaseException] = self.loop.create_future()
        folder = resolve(self.config.model)
        self._server = self._bind()
        if self.config.supervisor:
            self._attendance = HeartbeatClient(
                self.config.supervisor, self._describe, self.role.members_changed, self._on_fenced
            )
            self._attendance.start()
        engine, runner = await asyncio.to_thread(
            self._build, folder, self.config.dtype, self.config.engine, self._on_loaded
        )
        await asyncio.to_thread(runner.warm_up)
        self._engine, self._runner = engine, runner
        self._thread = EngineThread(engine, self._on_step, self._on_failure)
        self._thread.start()
        self._load = await self._thread.call(self._read_load)
        await self.role.start(self._server)
        await self._server.start()
        await self._enter(MEMBER_STATE_READY)
        logger.info("ready", extra={"address": self.address, "incarnation": self.incarnation})

    def _bind(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=server_options())
        add_WorkerServiceServicer_to_server(RelayService(self), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._port = bind(server, self.config.host, self.config.port)
        return server

    async def stop(self, grace: float) -> None:
        """Takes nothing new, gives what is running `grace` seconds, then ends it."""
        if self.started:
            await self._enter(MEMBER_STATE_DRAINING)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), grace)
            for key in list(self._live):
                self.fail(key, Failure.CODE_RETRY, f"worker {self.config.name} is shutting down")
            await self.role.stop()
        if self._server is not None:
            await self._server.stop(0.5)
        if self._attendance is not None:
            await self._attendance.stop()
        if self._thread is not None and not await asyncio.to_thread(self._thread.stop, 5.0):
            logger.error("the engine's step did not end within 5 s")

    async def failed(self) -> BaseException:
        """Returns when the worker can't go on, with the reason."""
        return await self._failure

    async def _enter(self, state: MemberState) -> None:
        self._state = state
        serving = state == MEMBER_STATE_READY
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)
        if self._attendance is not None:
            self._attendance.beat()

    def _on_loaded(self, share: float) -> None:
        self._loaded = share

    def _on_fenced(self) -> None:
        self._on_failure(RuntimeError(f"{self.config.name} {self.incarnation} was declared dead by the supervisor"))

    def _on_failure(self, error: BaseException) -> None:
        def settle() -> None:
            if not self._failure.done():
                self._failure.set_result(error)

        self.loop.call_soon_threadsafe(settle)

    def _describe(self) -> tuple[Member, Load]:
        member = Member(
            name=self.config.name,
            role=ROLES[self.config.role],
            incarnation=self.incarnation,
            address=self.address,
            pid=os.getpid(),
            state=self._state,
            loaded=self._loaded,
        )
        self.role.describe(member)
        load = self.load()
        if self._observer is not None:
            self._observer(load)
        return member, load

    # What the role works with.

    @property
    def started(self) -> bool:
        """Whether `start` has come to its end."""
        return self._state != MEMBER_STATE_STARTING

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the worker has not started")
        return self._engine

    @property
    def runner(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("the worker has not started")
        return self._runner

    @property
    def thread(self) -> EngineThread:
        if self._thread is None:
            raise RuntimeError("the worker has not started")
        return self._thread

    def request(self, key: Key) -> Request | None:
        """The live request of this key."""
        live = self._live.get(key)
        return None if live is None else live.request

    def compute(self, request: Request, *, handoff: bool = False) -> None:
        """Gives the request to the engine; with `handoff` it leaves after its first token."""

        def add() -> None:
            try:
                self.engine.scheduler.add(request, handoff=handoff)
            except ValueError as error:
                self.loop.call_soon_threadsafe(self.fail, request.key, Failure.CODE_INVALID, str(error))

        self.thread.post(add)

    def refresh_load(self) -> None:
        """Reads the load again, after the commands that were posted before, and tells it to the routers."""
        self.thread.post(lambda: self.loop.call_soon_threadsafe(partial(self._set_load, self._read_load(), tell=True)))

    async def with_load(self, command: Callable[[], T]) -> T:
        """As `thread.call`, and takes the load as it is right after `command`."""

        def run() -> T:
            result = command()
            # From this thread, so that loads arrive in the order in which they were read.
            self.loop.call_soon_threadsafe(self._set_load, self._read_load())
            return result

        return await self.thread.call(run)

    def send(self, event: RequestEvent, *, last: bool = False) -> None:
        """Sends an event of a live request to its router; with `last` the request is over here."""
        key = key_of(event)
        live = self._live.get(key)
        if live is None:
            return
        live.stream.push(event)
        if event.token_ids and live.expiry is not None:
            live.expiry.cancel()
            live.expiry = None
        if last:
            self._forget(key)

    def fail(self, key: Key, code: Failure.Code, message: str) -> None:
        """Gives a live request back to its router and frees what it has here."""
        if key not in self._live:
            return
        logger.warning("request failed", extra={"request": key[0], "attempt": key[1], "reason": message})
        event = RequestEvent(request_id=key[0], attempt=key[1], failure=Failure(code=code, message=message))
        self._release(key)
        self.send(event, last=True)

    # RelayHost.

    def hello(self) -> WorkerHello:
        info = model_info(self.runner.spec)
        return WorkerHello(name=self.config.name, incarnation=self.incarnation, model=info)

    def load(self) -> Load:
        self._load.promised.CopyFrom(self.role.promised())
        return self._load

    def attach(self, stream: RelayStream) -> None:
        self._streams.add(stream)

    def submit(self, submit: Submit, stream: RelayStream) -> None:
        key = key_of(submit)
        refusal = self._refusal(submit)
        request: Request | None = None
        if refusal is None:
            try:
                request = request_of(submit, self.runner.spec)
            except InvalidSubmit as error:
                refusal = Failure(code=Failure.CODE_INVALID, message=str(error))
        if request is None:
            stream.push(RequestEvent(request_id=key[0], attempt=key[1], failure=refusal))
            return
        expiry = None
        if submit.timeout_seconds > 0:
            expiry = self.loop.call_later(submit.timeout_seconds, self._expire, key)
        self._live[key] = Live(request, stream, expiry)
        self._idle.clear()
        self.role.submit(request, submit)

    def cancel(self, key: Key) -> None:
        if key in self._live:
            self._release(key)
            self._forget(key)

    def abandon(self, stream: RelayStream) -> None:
        self._streams.discard(stream)
        for key in [key for key, live in self._live.items() if live.stream is stream]:
            self.cancel(key)

    def _refusal(self, submit: Submit) -> Failure | None:
        if key_of(submit) in self._live:
            return Failure(code=Failure.CODE_INTERNAL, message=f"attempt {submit.attempt} was submitted twice")
        if submit.phase not in self.role.phases:
            return Failure(code=Failure.CODE_INTERNAL, message=f"a {self.config.role} worker takes no such phase")
        if self._state != MEMBER_STATE_READY:
            return Failure(code=Failure.CODE_RETRY, message=f"worker {self.config.name} is draining")
        if len(self._live) >= self.config.max_waiting:
            message = (
                f"worker {self.config.name} has {len(self._live)} requests; max_waiting is {self.config.max_waiting}"
            )
            return Failure(code=Failure.CODE_FULL, message=message)
        return None

    def _expire(self, key: Key) -> None:
        self.fail(key, Failure.CODE_FULL, f"no token within the request's time on worker {self.config.name}")

    def _release(self, key: Key) -> None:
        """Frees what the request has in the engine and in the role."""
        self.role.cancel(key)
        self.thread.post(lambda: self.engine.scheduler.cancel(key))
        self.refresh_load()

    def _forget(self, key: Key) -> None:
        live = self._live.pop(key)
        if live.expiry is not None:
            live.expiry.cancel()
        if not self._live:
            self._on_idle()

    def _on_idle(self) -> None:
        """Has the blocks recounted, now and then: a leak ends this process instead of slowly filling its pool."""
        self._idle.set()
        if self.loop.time() - self._checked >= CHECK_SECONDS:
            self._checked = self.loop.time()
            self.thread.post(self.engine.scheduler.check_integrity)

    # Engine thread.

    def _on_step(self, progress: Sequence[Progress]) -> None:
        events = [event_of(step) for step in progress if step.token is not None or step.error is not None]
        # First the tokens, then what the role makes of them: a hand-off can be over before this thread goes on, and
        # with it the request.
        self.loop.call_soon_threadsafe(self._deliver, events, self._read_load())
        self.role.on_step(progress)

    def _read_load(self) -> Load:
        load = self.engine.scheduler.load()
        return Load(
            blocks=Blocks(
                total=load.total, free=load.free, cached=load.cached, held=load.held, size=self.config.engine.block_size
            ),
            requests=Requests(waiting=load.waiting, running=load.running, free_slots=load.free_slots),
            pending_tokens=load.pending_tokens,
            computed_tokens=self.engine.computed_tokens,
        )

    # Event loop again.

    def _set_load(self, load: Load, *, tell: bool = False) -> None:
        """Told at once where something ended: who waits for free blocks should not wait for a heartbeat."""
        freed = load.blocks.held < self._load.blocks.held
        self._load = load
        if freed and self._attendance is not None:
            self._attendance.beat()
        if freed or tell:
            for stream in self._streams:
                stream.report()

    def _deliver(self, events: Sequence[RequestEvent], load: Load) -> None:
        self._set_load(load)
        for event in events:
            self.send(event, last=bool(event.finish_reason) or event.HasField("failure"))
