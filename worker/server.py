"""A worker process of any role: identity, ports, heartbeats, and the life of the worker in it.

    STARTING   the port is bound and heartbeats are sent; weights load in a thread of their own
    READY      takes requests
    DRAINING   completes what it has, takes nothing new
    (gone)     after SIGTERM and draining, after a failure of the engine, or fenced by the supervisor

Two threads: the event loop (gRPC and everything here) and the engine thread (`EngineThread`).
"""

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvrelay.engine.build import build_engine
from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.runner.base import Runner
from kvrelay.internal.v1.describe_pb2 import Description
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
from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.internal.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from kvrelay.models import resolve
from kvrelay.rpc.address import join
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.heartbeat import HeartbeatClient
from kvrelay.rpc.identity import WorkerId
from kvrelay.rpc.metrics.exposition import MetricsPort
from kvrelay.rpc.metrics.metric_set import MetricSet
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.description import describe_worker
from kvrelay.worker.hooks import WorkerHooks
from kvrelay.worker.metrics import WorkerMetrics
from kvrelay.worker.relay_service import RelayService
from kvrelay.worker.role import Role
from kvrelay.worker.worker import Worker

logger = logging.getLogger(__name__)

ROLES = {"prefill": ROLE_PREFILL, "decode": ROLE_DECODE, "colocated": ROLE_COLOCATED}

Build = Callable[[Path, Dtype, EngineConfig, Callable[[float], None]], tuple[Engine, Runner]]
"""Makes the engine of a worker, and its runner; as `build_engine`."""


class WorkerServer:
    """Runs one worker. Nothing is bound, loaded or sent before `start`."""

    def __init__(
        self,
        config: WorkerConfig,
        role: Callable[[Worker], Role] = Role,
        build: Build = build_engine,
    ) -> None:
        """
        Raises:
            ValueError: there is no join token, or a certificate can't be used.
        """
        self.config = config
        self.credentials = Credentials.of("worker", config.security)
        self.id = WorkerId(config.name, uuid.uuid4().hex)
        self._role = role
        self._metrics = WorkerMetrics(config.name, config.role)
        self._build = build
        self._shell: WorkerShell | None = None

    async def start(self) -> None:
        """Binds, sends heartbeats, loads the model; returns when ready.

        Raises:
            OSError: the port is in use.
            ValueError: the model or an option can't be used; the text says which and why.
        """
        config = self.config
        shell = self._shell = WorkerShell(config, self.id, self.credentials, self.metrics)
        await shell.open_metrics()
        folder = await asyncio.to_thread(resolve, config.model)  # it may be downloaded
        options = await asyncio.to_thread(_resolved, config.engine)
        engine, runner = await asyncio.to_thread(self._build, folder, config.dtype, options, shell.on_loaded)
        await asyncio.to_thread(engine.warm_up)
        _log_context(runner.spec)
        hooks = WorkerHooks(shell.beat, shell.fail, self._metrics)
        await shell.serve(Worker(config, self.id, engine, runner, self._role, hooks, self.credentials))

    @property
    def metrics(self) -> MetricSet:
        """The worker's metrics."""
        return self._metrics.metrics

    @property
    def address(self) -> str:
        """host:port of the internal gRPC, once `start` has bound it."""
        return self._bound.address

    @property
    def worker(self) -> Worker:
        """The worker, once `start` has returned."""
        worker = self._bound.worker
        if worker is None:
            raise RuntimeError(f"{self.id.name} is still loading")
        return worker

    async def stop(self, grace: float) -> None:
        """Takes nothing new, gives live requests `grace` seconds to end, then ends everything."""
        if self._shell is not None:
            await self._shell.stop(grace)

    async def failed(self) -> BaseException:
        """Returns when the worker can't go on, with the reason."""
        # Shielded: whoever stops waiting for a failure must not end the future with its own task.
        return await asyncio.shield(self._bound.failure)

    @property
    def _bound(self) -> "WorkerShell":
        if self._shell is None:
            raise RuntimeError(f"{self.id.name} was not started")
        return self._shell


def _resolved(options: EngineConfig) -> EngineConfig:
    """With the folder of the draft model in place of its name."""
    speculation = options.speculation
    if not speculation.draft_model:
        return options
    folder = str(resolve(speculation.draft_model))
    return replace(options, speculation=replace(speculation, draft_model=folder))


class WorkerShell:
    """Ports and heartbeats of a worker process, from its start on; the worker itself joins when its model is loaded."""

    def __init__(
        self,
        config: WorkerConfig,
        identity: WorkerId,
        credentials: Credentials,
        metrics: MetricSet,
    ) -> None:
        """Binds the port and starts the heartbeats.

        Raises:
            OSError: the port is in use.
        """
        self._config = config
        self._id = identity
        self._metrics_port = MetricsPort(metrics)
        self._metrics_address = ""
        self._loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[BaseException] = self._loop.create_future()
        """Set when the worker can't go on."""
        self._state: MemberState = MEMBER_STATE_STARTING
        self._loaded = 0.0
        self._members: Sequence[Member] = ()
        self.worker: Worker | None = None
        """None while the model loads."""
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in its type stubs
        self._server = credentials.server()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.address = join(config.host, credentials.bind(self._server, config.host, config.port))
        self._heartbeat: HeartbeatClient | None = None
        if config.supervisor:
            self._heartbeat = HeartbeatClient(
                config.supervisor,
                credentials,
                self._describe,
                self._on_members,
                lambda: self.fail(Fenced(identity)),
                tell=self._tell,
            )
            self._heartbeat.start()

    async def open_metrics(self) -> None:
        """Serves the metrics where they have a port.

        Raises:
            OSError: it is in use.
        """
        host, port = self._config.host, self._config.metrics_port
        if port is not None:
            self._metrics_address = join(host, await self._metrics_port.start(host, port))

    def on_loaded(self, share: float) -> None:
        """`share` of the weights is loaded, 0 to 1. Any thread."""
        self._loaded = share

    def beat(self) -> None:
        """Sends a heartbeat now."""
        if self._heartbeat is not None:
            self._heartbeat.beat()

    def fail(self, error: BaseException) -> None:
        """The worker can't go on. Any thread."""

        def settle() -> None:
            if not self.failure.done():
                self.failure.set_result(error)

        self._loop.call_soon_threadsafe(settle)

    async def serve(self, worker: Worker) -> None:
        """Opens the worker to routers and peers."""
        self.worker = worker
        worker.role.members_changed(self._members)
        add_WorkerServiceServicer_to_server(RelayService(worker), self._server)
        worker.role.add_services(self._server)
        await self._server.start()
        await self._enter(MEMBER_STATE_READY)
        logger.info("ready", extra={"address": self.address, "incarnation": self._id.incarnation})

    async def stop(self, grace: float) -> None:
        """Drains the worker and ends everything. A worker that has failed is not given any grace."""
        if self.worker is not None:
            await self._enter(MEMBER_STATE_DRAINING)
            await self.worker.drain(0.0 if self.failure.done() else grace)
        await self._server.stop(0.5)
        await self._metrics_port.stop()
        if self._heartbeat is not None:
            await self._heartbeat.stop()
        if self.worker is not None:
            await self.worker.stop()

    async def _enter(self, state: MemberState) -> None:
        self._state = state
        serving = state == MEMBER_STATE_READY
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)
        self.beat()

    def _on_members(self, members: Sequence[Member]) -> None:
        self._members = members
        if self.worker is not None:
            self.worker.role.members_changed(members)

    async def _tell(self) -> Description:
        worker = self.worker
        found = await asyncio.to_thread(describe_worker, self._config, worker)
        if worker is not None:
            worker.role.tell(found)
        return found

    def _describe(self) -> tuple[Member, Load]:
        worker = self.worker
        member = Member(
            name=self._id.name,
            role=ROLES[self._config.role],
            incarnation=self._id.incarnation,
            address=self.address,
            pid=os.getpid(),
            state=self._state,
            loaded=self._loaded,
            metrics_address=self._metrics_address,
        )
        if worker is not None:
            worker.describe(member)
        return member, Load() if worker is None else worker.load()


def _log_context(spec: ModelSpec) -> None:
    """Says once how long a prompt with its completion may be, and why."""
    cut = spec.context_limit == "pool"
    advice = "; set engine.kv_memory_bytes, or serve with more memory, for longer ones" if cut else ""
    level = logging.WARNING if cut else logging.INFO
    logger.log(level, "a context has at most %d tokens: %s%s", spec.max_context, spec.context_reason, advice)


class Fenced(RuntimeError):
    """The supervisor has declared this incarnation dead."""

    def __init__(self, identity: WorkerId) -> None:
        super().__init__(f"{identity} was declared dead by the supervisor")
