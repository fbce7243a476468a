"""A worker process of any role: identity, ports, heartbeats, and the life of the worker in it.

    STARTING   the port is bound and heartbeats are sent; weights load in a thread of their own
    READY      takes requests
    DRAINING   completes what it has, takes nothing new
    (gone)     after SIGTERM and draining, after a failure of the engine, or fenced by the supervisor

When the supervisor gives it another role, it drains, and goes on as another incarnation: with the new role, new ports
and the same engine. So all that belongs to the old role is fenced as that of a process which has ended.

Two threads: the event loop (gRPC and everything here) and the engine thread (`EngineThread`).
"""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvrelay.engine.build import build_engine, on_devices
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.degree import ONE
from kvrelay.engine.engine import Engine
from kvrelay.engine.models.choice import check_ranks
from kvrelay.engine.models.fast.loader import OnLoaded
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.ranks.collective import CollectiveError
from kvrelay.engine.runner.base import Runner
from kvrelay.internal.v1.describe_pb2 import Description
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_STARTING,
    Member,
    MemberState,
)
from kvrelay.internal.v1.supervisor_pb2 import Role as RoleNumber
from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.internal.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from kvrelay.models import model_name, resolve
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.heartbeat import HeartbeatClient
from kvrelay.rpc.identity import ROLES, WORKERS, WorkerId, WorkerRole, join
from kvrelay.rpc.metrics.exposition import MetricsPort
from kvrelay.rpc.metrics.metric_set import MetricSet
from kvrelay.rpc.serve import main
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.description import describe_worker
from kvrelay.worker.first_costs import begin_costs
from kvrelay.worker.metrics import WorkerMetrics
from kvrelay.worker.ranks.group import RankGroup
from kvrelay.worker.relay_service import RelayService
from kvrelay.worker.role import Role
from kvrelay.worker.worker import ColocatedRole, Worker, WorkerHooks

logger = logging.getLogger(__name__)

Build = Callable[..., tuple[Engine, Runner]]
"""Makes the engine of a worker, and its runner; as `build_engine`."""


RoleFactory = Callable[[Worker], Role]
COLOCATED: Mapping[WorkerRole, RoleFactory] = MappingProxyType({"colocated": ColocatedRole})
REBIND_SECONDS = 5.0
"""Seconds for which a worker with a port of its own tries to bind it again, in another role."""


def run_worker(roles: Mapping[WorkerRole, RoleFactory] = COLOCATED) -> int:
    """Runs a worker process that can take these roles, and returns its exit code; see `kvrelay.rpc.serve.main`."""
    return main(WorkerConfig, partial(WorkerServer, roles=roles), f"A kvrelay worker ({', '.join(roles)}).")


class WorkerServer:
    """Runs one worker. Nothing is bound, loaded or sent before `start`."""

    def __init__(
        self,
        config: WorkerConfig,
        roles: Mapping[WorkerRole, RoleFactory] = COLOCATED,
        build: Build = build_engine,
        build_rank: str = "kvrelay.engine.build:build_rank",
        on_ranks: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            roles: those that this process can take.
            build_rank: `module:function` that makes the runner of another rank, as `build` does of rank 0.
            on_ranks: gets host:port for the agents of the worker's other machines, if it has several; on a thread.

        Raises:
            ValueError: `config.role` is none of them, there is no join token, or a certificate can't be used.
        """
        if config.role not in roles:
            raise ValueError(f"role is {config.role}; allowed: {', '.join(roles)}, which this module has")
        self.config = config
        self.credentials = Credentials.of("worker", config.security)
        self._roles = roles
        self._metrics = WorkerMetrics(config.name, config.role, model_name(config.model))
        self._build = build
        self._build_rank = build_rank
        self._on_ranks = on_ranks
        self._ranks: RankGroup | None = None
        self._shell: WorkerShell | None = None
        self._worker: Worker | None = None
        self._failure: asyncio.Future[BaseException] | None = None
        self._switch: asyncio.Task[None] | None = None
        self._wanted: WorkerRole | None = None
        """The role that the supervisor has asked for last."""

    async def start(self) -> None:
        """Binds, sends heartbeats, loads the model; returns when ready.

        Raises:
            OSError: the port is in use.
            ValueError: the model or an option can't be used; the text says which and why.
        """
        config = self.config
        self._failure = asyncio.get_running_loop().create_future()
        shell = self._open(config)
        await shell.open_metrics()
        folder = await asyncio.to_thread(resolve, config.model)  # it may be downloaded
        options = await asyncio.to_thread(_resolved, config.engine)
        making = asyncio.ensure_future(asyncio.to_thread(self._make_engine, folder, options, shell.on_loaded))
        await asyncio.wait((making, self._failure), return_when=asyncio.FIRST_COMPLETED)
        if not making.done():
            raise self._failure.result()
        engine, runner = making.result()
        _log_context(runner.spec)
        hooks = WorkerHooks(lambda: self._bound.beat(), self._fail, self._metrics)
        role = self._roles[config.role]
        self._worker = Worker(config, shell.id, engine, runner, role, hooks, self.credentials, self._ranks)
        await shell.serve(self._worker)
        self._consider_role()

    def _make_engine(self, folder: Path, options: EngineConfig, on_loaded: OnLoaded) -> tuple[Engine, Runner]:
        """The engine, warmed up, and its runner; starts the other ranks if there are any.

        Raises:
            ValueError: as `start`, also where another rank finds the mistake.
        """
        dtype = self.config.dtype
        if options.degree == ONE:
            engine, runner = self._build(folder, dtype, options, on_loaded)
            engine.warm_up()
            begin_costs(engine, runner)
            return engine, runner
        options = on_devices(options)
        check_ranks(folder, options)
        self._ranks = group = RankGroup(self._build_rank, folder, self.config, options, self._fail)
        if group.address:
            logger.info("waits for its hosts", extra={"address": group.address, "hosts": options.hosts})
            if self._on_ranks is not None:
                self._on_ranks(group.address)
        group.start()
        try:
            engine, runner = self._build(folder, dtype, group.options, on_loaded, group)
            engine.warm_up()
            group.wait_until_ready()
            begin_costs(engine, runner)
        except CollectiveError as error:
            raise group.failure or error from None
        return engine, runner

    @property
    def id(self) -> WorkerId:
        """The present incarnation, once `start` has bound its port."""
        return self._bound.id

    @property
    def metrics(self) -> MetricSet:
        """The worker's metrics; their labels name its present role."""
        return self._metrics.metrics

    @property
    def address(self) -> str:
        """host:port of the internal gRPC, once `start` has bound it."""
        return self._bound.address

    @property
    def worker(self) -> Worker:
        """The worker, once `start` has returned."""
        if self._worker is None:
            raise RuntimeError(f"{self.config.name} is still loading")
        return self._worker

    async def stop(self, grace: float) -> None:
        """Takes nothing new, gives live requests `grace` seconds to end, then ends everything."""
        if self._switch is not None:
            self._switch.cancel()
            await asyncio.wait((self._switch,))
        # A worker that has failed is not given any grace.
        failed = self._failure is not None and self._failure.done()
        if self._shell is not None:
            await self._shell.stop(0.0 if failed else grace)
        if self._worker is not None:
            await self._worker.stop()
            if not failed:
                await asyncio.to_thread(self._worker.keep_costs)
        if self._ranks is not None:
            await asyncio.to_thread(self._ranks.close)

    async def failed(self) -> BaseException:
        """Returns when the worker can't go on, with the reason."""
        if self._failure is None:
            raise RuntimeError(f"{self.config.name} was not started")
        # Shielded: whoever stops waiting for a failure must not end the future with its own task.
        return await asyncio.shield(self._failure)

    @property
    def _bound(self) -> "WorkerShell":
        if self._shell is None:
            raise RuntimeError(f"{self.config.name} was not started")
        return self._shell

    def _open(self, config: WorkerConfig) -> "WorkerShell":
        """Binds and sends heartbeats as a new incarnation."""
        identity = WorkerId(config.name, uuid.uuid4().hex)
        duties = ShellDuties(self._metrics.metrics, self._fail, self._on_role)
        self._shell = WorkerShell(config, identity, self.credentials, tuple(self._roles), duties)
        return self._shell

    def _fail(self, error: BaseException) -> None:
        """Reports that the worker can't go on. Any thread."""
        failure = self._failure

        def settle() -> None:
            if failure is not None and not failure.done():
                failure.set_result(error)

        if failure is not None:
            failure.get_loop().call_soon_threadsafe(settle)

    def _on_role(self, number: RoleNumber) -> None:
        """Takes the role that the supervisor says this worker is to have."""
        self._wanted = WORKERS.get(number)
        self._consider_role()

    def _consider_role(self) -> None:
        """Takes the role that was asked for, unless the model still loads or another switch goes on: then later."""
        wanted = self._wanted
        if wanted in (None, self._bound.config.role) or self._switch is not None or not self._bound.serving:
            return
        if wanted not in self._roles:
            logger.error("can't take this role", extra={"role": wanted, "roles": list(self._roles)})
            return
        self._switch = asyncio.create_task(self._switch_to(wanted), name=f"to {wanted}")
        self._switch.add_done_callback(self._on_switched)

    async def _switch_to(self, role: WorkerRole) -> None:
        """Gives the present role up and takes another one."""
        began = time.monotonic()
        shell, worker = self._bound, self.worker
        logger.info("taking another role", extra={"role": role, "before": shell.config.role})
        await shell.stop(shell.config.switch_seconds)
        config = replace(shell.config, role=role)
        while True:
            try:
                fresh = self._open(config)
                break
            except OSError:
                if time.monotonic() - began > REBIND_SECONDS + config.switch_seconds:
                    raise
            await asyncio.sleep(0.05)
        fresh.on_loaded(1.0)
        await fresh.open_metrics()
        await worker.take_role(fresh.id, config, self._roles[role])
        await fresh.serve(worker)
        logger.info("took another role", extra={"role": role, "seconds": round(time.monotonic() - began, 3)})

    def _on_switched(self, task: "asyncio.Task[None]") -> None:
        """Considers the next role. A worker that is in neither role ends, and its successor starts with the new one."""
        self._switch = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("can't take another role", exc_info=error)
            self._fail(error)
        elif not task.cancelled():
            self._consider_role()


@dataclass(frozen=True, slots=True)
class ShellDuties:
    """Metrics that a shell serves, and calls by which it tells what it learns."""

    metrics: MetricSet
    failed: Callable[[BaseException], None]
    on_role: Callable[[RoleNumber], None]


def _resolved(options: EngineConfig) -> EngineConfig:
    """The options with the folder of the draft model, or of the heads, in place of its name."""
    speculation = options.speculation
    if not speculation.draft_model:
        return options
    folder = str(resolve(speculation.draft_model))
    return replace(options, speculation=replace(speculation, draft_model=folder))


class WorkerShell:
    """Ports and heartbeats of one incarnation, from its start on; the worker itself joins when its model is loaded."""

    def __init__(
        self,
        config: WorkerConfig,
        identity: WorkerId,
        credentials: Credentials,
        roles: Sequence[WorkerRole],
        duties: ShellDuties,
    ) -> None:
        """Binds the port and starts the heartbeats.

        Args:
            roles: those that this process can take.

        Raises:
            OSError: the port is in use.
        """
        self.config = config
        self.id = identity
        self._roles = [ROLES[role] for role in roles]
        self._metrics_port = MetricsPort(duties.metrics)
        self._metrics_address = ""
        self._state: MemberState = MEMBER_STATE_STARTING
        self._loaded = 0.0
        self._members: Sequence[Member] = ()
        self._worker: Worker | None = None
        """Worker of this incarnation; None while the model loads."""
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
                lambda: duties.failed(Fenced(identity)),
                duties.on_role,
                tell=self._tell,
            )
            self._heartbeat.start()

    async def open_metrics(self) -> None:
        """Serves the metrics where they have a port.

        Raises:
            OSError: it is in use.
        """
        host, port = self.config.host, self.config.metrics_port
        if port is not None:
            self._metrics_address = join(host, await self._metrics_port.start(host, port))

    def on_loaded(self, share: float) -> None:
        """Notes that `share` of the weights is loaded, 0 to 1. Any thread."""
        self._loaded = share

    def beat(self) -> None:
        """Sends a heartbeat now."""
        if self._heartbeat is not None:
            self._heartbeat.beat()

    async def serve(self, worker: Worker) -> None:
        """Opens the worker to routers and peers."""
        self._worker = worker
        worker.role.members_changed(self._members)
        add_WorkerServiceServicer_to_server(RelayService(worker), self._server)
        worker.role.add_services(self._server)
        await self._server.start()
        await self._enter(MEMBER_STATE_READY)
        logger.info("ready", extra={"address": self.address, "incarnation": self.id.incarnation})

    async def stop(self, grace: float) -> None:
        """Drains the worker, and ends the ports and heartbeats."""
        if self._worker is not None:
            await self._enter(MEMBER_STATE_DRAINING)
            await self._worker.drain(grace)
        await self._server.stop(0.5)
        await self._metrics_port.stop()
        if self._heartbeat is not None:
            await self._heartbeat.stop()

    @property
    def serving(self) -> bool:
        """Whether the worker takes requests."""
        return self._state == MEMBER_STATE_READY

    async def _enter(self, state: MemberState) -> None:
        self._state = state
        serving = state == MEMBER_STATE_READY
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)
        self.beat()

    def _on_members(self, members: Sequence[Member]) -> None:
        self._members = members
        if self._worker is not None:
            self._worker.role.members_changed(members)

    async def _tell(self) -> Description:
        worker = self._worker
        found = await asyncio.to_thread(describe_worker, self.config, worker)
        if worker is not None:
            worker.role.tell(found)
        return found

    def _describe(self) -> tuple[Member, Load]:
        worker = self._worker
        member = Member(
            name=self.id.name,
            role=ROLES[self.config.role],
            incarnation=self.id.incarnation,
            address=self.address,
            pid=os.getpid(),
            state=self._state,
            loaded=self._loaded,
            roles=self._roles,
            metrics_address=self._metrics_address,
        )
        if worker is not None:
            worker.describe(member)
        if worker is None:
            return member, Load()
        load = worker.load()
        if (costs := worker.costs()) is not None:
            load.costs.CopyFrom(costs)
        return member, load


def _log_context(spec: ModelSpec) -> None:
    """Says once how long a prompt with its completion may be, and why."""
    cut = spec.context_limit == "pool"
    advice = "; set engine.kv_memory_bytes, or serve with more memory, for longer ones" if cut else ""
    level = logging.WARNING if cut else logging.INFO
    logger.log(level, "a context has at most %d tokens: %s%s", spec.max_context, spec.context_reason, advice)


class Fenced(RuntimeError):
    """Raised when the supervisor has declared this incarnation dead."""

    def __init__(self, identity: WorkerId) -> None:
        super().__init__(f"{identity} was declared dead by the supervisor")
