"""The supervisor: hears every member's heartbeats, sends each of them the membership, and keeps the desired members.

A plain server: `python -m kvrelay.cluster.supervisor --config FILE`. With `members` it keeps one process running for
each name on this machine, and starts and ends more by commands (`cluster/fleet/fleet.py`); without, it starts nobody.
On Ray it keeps actors (`cluster/ray/supervisor_actor.py`).

Requests and tokens never pass through here: without the supervisor, running streams go on. A restarted one continues
from its record: it takes its address again, knows the generations that were issued and the desired state, and watches
the members' processes that run.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import grpc
from annotated_types import Interval

from kvrelay.cluster.fleet.fleet import Fleet, to_record
from kvrelay.cluster.fleet.keepers import MemberStart
from kvrelay.cluster.fleet.replacement import Launcher
from kvrelay.cluster.membership.inquiry import Inquiry
from kvrelay.cluster.membership.membership import HeartbeatConfig, InvalidMember, Membership, ready_http, ready_routers
from kvrelay.cluster.processes.launcher import MemberProcess, Processes, ProcessLauncher
from kvrelay.cluster.scaling.config import ScalingConfig
from kvrelay.cluster.scaling.scaler import Scaler
from kvrelay.cluster.supervisor.command_service import Commands
from kvrelay.cluster.supervisor.metrics import SupervisorMetrics
from kvrelay.cluster.supervisor.record import FileStore, Recorder, Store
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DEAD,
    MEMBER_STATE_READY,
    ROLE_ROUTER,
    AttendRequest,
    AttendResponse,
    DescribeRequest,
    DescribeResponse,
    GetStatusRequest,
    GetStatusResponse,
    Member,
    Role,
    SupervisorRecord,
)
from kvrelay.internal.v1.supervisor_pb2_grpc import add_SupervisorServiceServicer_to_server
from kvrelay.machine.options import Port, require
from kvrelay.rpc.credentials import Credentials, caller_parts
from kvrelay.rpc.description import describe
from kvrelay.rpc.identity import WorkerId, join
from kvrelay.rpc.metrics.exposition import MetricsPort
from kvrelay.rpc.metrics.metric_set import MetricSet
from kvrelay.rpc.security import Part, SecurityConfig
from kvrelay.rpc.serve import EXIT_SECONDS, STOP_SECONDS

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
ALL_STOP_SECONDS = 2 * (STOP_SECONDS + EXIT_SECONDS) + STOP_SECONDS
"""Seconds for the routers, the workers and the supervisor to stop, beyond the time for their requests."""
BIND_SECONDS = 10.0
"""Longest time in seconds that a restarted supervisor tries to get its predecessor's port, which its members know."""


@dataclass(frozen=True, slots=True)
class SupervisorConfig(HeartbeatConfig):
    """One supervisor's options."""

    host: str = "127.0.0.1"
    """Address that its gRPC binds to, and that members dial."""

    port: Port = 0
    """Port of its gRPC; 0 takes the one in the record of `state_path`, or a free one."""

    metrics_port: Port | None = None
    """Port of `/metrics`, and of `/targets`, the list of all members that serve theirs; 0 takes a free one, None opens
    none."""

    drain_seconds: Annotated[float, Interval(ge=0, le=3600)] = 30.0
    """Time that members are given to finish their requests when they are to end."""

    state_path: str = ""
    """File that a restarted supervisor continues from; empty keeps no record."""

    members: dict[str, MemberProcess] = field(default_factory=dict)
    """Processes to begin with on this machine, by name; needs `state_path`. Its folder gets NAME.json, the options that
    the process is started with, NAME.log, its output, and NAME.pid. Later the desired state in the record counts."""

    templates: dict[str, MemberProcess] = field(default_factory=dict)
    """Processes for further members, by role: prefill, decode, colocated, router. Default: the first of `members` with
    the role."""

    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    """Options that say when workers' roles and their number change by themselves."""

    security: SecurityConfig = field(default_factory=SecurityConfig)
    """Credentials and TLS: who may call the supervisor, and what protects the calls."""

    def __post_init__(self) -> None:
        HeartbeatConfig.__post_init__(self)
        require(
            not self.members or self.state_path != "", "state_path", self.state_path, "a file, as there are members"
        )


@dataclass(frozen=True, slots=True)
class Startup:
    """Progress of the cluster's start."""

    ready: bool
    """Requests can be served, though some members may be missing."""
    routers: tuple[str, ...]
    """host:port of the public gRPC of each router that is ready, in the order of their names."""
    http: tuple[str, ...]
    """host:port of their HTTP, of those that have one."""
    members: list[MemberStart]


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """One version of the membership."""

    version: int = -1
    members: tuple[Member, ...] = ()
    complete: bool = False
    roles: Mapping[str, Role] = field(default_factory=dict)
    """Roles that members are to have, by name."""

    def generation(self, worker: WorkerId) -> int:
        """Generation of a member in this version; 0 if the member isn't in it."""
        for member in self.members:
            if (member.name, member.incarnation) == worker:
                return member.generation
        return 0


class WrongPart(ValueError):
    """A heartbeat of a role that the caller's certificate doesn't name."""


class SupervisorServer(Commands):
    """Serves SupervisorService over a Membership, and keeps the desired members of its launcher running."""

    def __init__(
        self,
        config: SupervisorConfig,
        launcher: Launcher | None = None,
        store: Store | None = None,
        scaling: Callable[[str], ScalingConfig] | None = None,
        drain_seconds: Callable[[str], float] | None = None,
    ) -> None:
        """
        Args:
            config: the options.
            launcher: starts other processes than those of `config.members`.
            store: keeps the record elsewhere than in `config.state_path`.
            scaling: reads what counts instead of `config.scaling` in a configuration of the launcher.
            drain_seconds: reads what counts instead of `config.drain_seconds` there.

        Raises:
            ValueError: the record can't be read, there is no join token, or a certificate or a member can't be used.
        """
        super().__init__()
        self.config = config
        self._credentials = Credentials.of("supervisor", config.security)
        self._drain_of = drain_seconds
        self.membership = Membership(config, drain_seconds=self._drain_seconds)
        if store is None and config.state_path:
            store = FileStore(Path(config.state_path))
        if launcher is None and config.members:
            folder = Path(config.state_path).absolute().parent
            launcher = ProcessLauncher(folder, Processes(config.members, config.templates), config.security)
        record = None if store is None else store.load()
        self._last_address = ""
        if record is not None:
            self.membership.restore(record.membership)
            self._last_address = record.address
        self._recorder = None if store is None else Recorder(store)
        if launcher is not None:
            self.fleet = Fleet(launcher, self.membership, record, self._drain_seconds, self._save, self._on_change)
        fleet = self.fleet
        self._scaler = Scaler(
            lambda: config.scaling if fleet is None or scaling is None else scaling(fleet.config),
            self.membership,
            fleet,
        )
        self._metrics = SupervisorMetrics(self.membership, self._scaler)
        self._metrics_port = MetricsPort(self.metrics, lambda: self._metrics.targets(self._metrics_address))
        self._metrics_address = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._dirty = asyncio.Event()
        self._published = Published()
        self._news = asyncio.Event()
        self._failure: asyncio.Future[BaseException] | None = None
        self._inquiry = Inquiry(self._wake_streams)

    @property
    def metrics(self) -> MetricSet:
        """The supervisor's metrics."""
        return self._metrics.metrics

    @property
    def address(self) -> str:
        """host:port of the gRPC."""
        return join(self.config.host, self._port)

    async def start(self) -> None:
        """Binds, serves, and starts the members or finds them running.

        Raises:
            OSError: the port is in use.
        """
        self._failure = asyncio.get_running_loop().create_future()
        self._server = await self._bind()
        if self.config.metrics_port is not None:
            port = await self._metrics_port.start(self.config.host, self.config.metrics_port)
            self._metrics_address = join(self.config.host, port)
        await self._server.start()
        self._run("publish", self._publish())
        self._run("tick", self._tick())
        self._on_change()
        if self.fleet is not None:
            self.fleet.start(self.address)
            self._run("fleet", self.fleet.run())
        self._run("scaler", self._scaler.run())

    async def stop(self, grace: float) -> None:
        """Ends every member, then itself.

        A supervisor that has failed ends only itself: the members serve without it.

        Args:
            grace: seconds for the members to finish their requests, all together.
        """
        failed = self._failure is None or self._failure.done()
        for task in self._tasks:
            if failed or task.get_name() in ("fleet", "scaler"):
                task.cancel()
        if self.fleet is not None:
            if not failed:
                await self.fleet.stop(grace)
            await self.fleet.keepers.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._recorder is not None and self._server is not None:
            await self._recorder.save(self._record())
            self._recorder.close()
        if self._server is not None:
            await self._server.stop(0.2)
        await self._metrics_port.stop()

    async def failed(self) -> BaseException:
        """Returns the reason when the supervisor can't go on."""
        if self._failure is None:
            raise RuntimeError("the supervisor was not started")
        return await asyncio.shield(self._failure)

    def startup(self) -> Startup:
        """The progress of every expected member."""
        members = self.membership.members()
        progress = [] if self.fleet is None else self.fleet.keepers.progress()
        return Startup(self.membership.ready, ready_routers(members), ready_http(members), progress)

    async def _bind(self) -> grpc.aio.Server:
        """A server at the configured port, or at the port where the members look for this supervisor."""
        host, _, last = self._last_address.rpartition(":")
        again = self.config.port == 0 and host.strip("[]") == self.config.host
        port = int(last) if again else self.config.port
        deadline = asyncio.get_running_loop().time() + (BIND_SECONDS if self._last_address else 0.0)
        while True:
            server = self._credentials.server()
            add_SupervisorServiceServicer_to_server(self, server)
            try:
                self._port = self._credentials.bind(server, self.config.host, port)
                return server
            except OSError:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
            await asyncio.sleep(TICK_SECONDS)

    def _drain_seconds(self) -> float:
        """Time that members are given to finish their requests, by the present configuration."""
        of, fleet = self._drain_of, self.fleet
        return self.config.drain_seconds if of is None or fleet is None else of(fleet.config)

    def _record(self) -> SupervisorRecord:
        record = SupervisorRecord(membership=self.membership.snapshot(), address=self.address)
        if self.fleet is not None:
            self.fleet.add_to(record)
        return record

    async def _save(self) -> bool:
        """Writes the record; True if it is written, or there is none to write."""
        return self._recorder is None or await self._recorder.save(self._record())

    async def _tick(self) -> None:
        while True:
            for worker, reason in self.membership.tick():
                extra = {"member": worker.name, "incarnation": worker.incarnation, "reason": reason}
                logger.warning("declared dead", extra=extra)
                if self.fleet is not None:
                    self.fleet.keepers.kill(worker.name)
            self._credentials.check()
            self._on_change()
            await asyncio.sleep(TICK_SECONDS)

    def _on_change(self) -> None:
        if self._version != self._published.version:
            self._dirty.set()

    @property
    def _version(self) -> int:
        """Number of the membership's version, which grows with each change that members must learn of."""
        return self.membership.version + (0 if self.fleet is None else self.fleet.desired.revision)

    async def _publish(self) -> None:
        """Sends each membership to all Attend streams, once its record is saved."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            version, complete, members = self._version, self.membership.complete, self.membership.members()
            fleet = self.fleet
            roles = {} if fleet is None else {member.name: fleet.role(member.name) for member in members}
            copies = []
            for member in members:
                copies.append(Member())
                copies[-1].CopyFrom(member)
            if not await self._save():
                asyncio.get_running_loop().call_later(1.0, self._dirty.set)
            self._published = Published(version, tuple(copies), complete, roles)
            self._wake_streams()

    def _wake_streams(self) -> None:
        """Wakes the members' streams, which have something to send."""
        self._news.set()
        self._news = asyncio.Event()

    def _run(self, name: str, work: "asyncio._CoroutineLike[None]") -> None:
        """Runs a task whose failure is the supervisor's."""

        def done(task: "asyncio.Task[None]") -> None:
            failure = self._failure
            if not task.cancelled() and (error := task.exception()) and failure is not None and not failure.done():
                logger.error("can't go on", extra={"task": name}, exc_info=error)
                failure.set_result(error)

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(done)
        self._tasks.append(task)

    async def Attend(
        self,
        request_iterator: AsyncIterator[AttendRequest],
        context: "grpc.aio.ServicerContext[AttendRequest, AttendResponse]",
    ) -> None:
        joined: asyncio.Future[tuple[WorkerId, int]] = asyncio.get_running_loop().create_future()
        beats = asyncio.create_task(self._beats(request_iterator, caller_parts(context), joined), name="beats")
        sent: Published | None = None
        connected: WorkerId | None = None
        asked = self._inquiry.number

        async def write(response: AttendResponse) -> None:
            # With a time limit: a frozen member must not hold its stream's memory for ever.
            await asyncio.wait_for(context.write(response), self.config.dead_seconds)

        try:
            await asyncio.wait((beats, joined), return_when=asyncio.FIRST_COMPLETED)
            while not beats.done():
                news = asyncio.ensure_future(self._news.wait())
                worker, version = joined.result()
                if not connected:
                    connected = worker
                    self.membership.connected(worker)
                # The first membership that a member gets includes itself.
                if (now := self._published) is not sent and now.version >= version:
                    await write(
                        AttendResponse(
                            version=now.version,
                            members=now.members,
                            generation=now.generation(worker),
                            complete=now.complete,
                            role=now.roles.get(worker.name, Role.ROLE_UNSPECIFIED),
                        )
                    )
                    sent = now
                if sent is not None and asked != self._inquiry.number:
                    asked = self._inquiry.number
                    self._inquiry.passed_on(worker)
                    await write(AttendResponse(ask=asked))
                await asyncio.wait((beats, news), return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
            if beats.result():
                await write(AttendResponse(fenced=True))
        except InvalidMember as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except WrongPart as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the member does not read its stream")
        finally:
            beats.cancel()
            if connected:
                self.membership.disconnected(connected)

    async def _beats(
        self,
        requests: AsyncIterator[AttendRequest],
        parts: frozenset[Part] | None,
        joined: "asyncio.Future[tuple[WorkerId, int]]",
    ) -> bool:
        """Takes heartbeats until the stream ends (False) or the member is fenced (True).

        Args:
            parts: those that the caller's certificate names; None without TLS.

        Raises:
            WrongPart: the member's role is not one of them.
        """
        async for request in requests:
            member = request.member
            part: Part = "router" if member.role == ROLE_ROUTER else "worker"
            if parts is not None and part not in parts:
                raise WrongPart(f"{member.name} is a {part}; its certificate is of {' and '.join(sorted(parts))}")
            if not self.membership.attend(member, request.load):
                logger.warning("fenced", extra={"member": member.name, "incarnation": member.incarnation})
                return True
            self._on_change()
            if request.HasField("description"):
                self._inquiry.answered(WorkerId(member.name, member.incarnation), request.description)
            if not joined.done():
                joined.set_result((WorkerId(member.name, member.incarnation), self._version))
        return False

    async def GetStatus(
        self, request: GetStatusRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> GetStatusResponse:
        status = GetStatusResponse(
            ready=self.membership.ready,
            members=self.membership.statuses(),
            metrics_address=self._metrics_address,
            scaling=self._scaler.status(),
        )
        if self.fleet is not None:
            status.desired.CopyFrom(to_record(self.fleet.desired))
            status.settled = self.fleet.settled
            for each in self.fleet.keepers.progress():
                if each.reason and each.state != MEMBER_STATE_READY:
                    status.troubles[each.name] = each.reason
                if each.waits_for:
                    status.waits[each.name] = each.waits_for
        return status

    async def Describe(
        self, request: DescribeRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> DescribeResponse:
        dead = MEMBER_STATE_DEAD
        members = {WorkerId(each.name, each.incarnation) for each in self.membership.members() if each.state != dead}
        response = await self._inquiry.ask(members)
        response.supervisor.CopyFrom(await asyncio.to_thread(describe, (self._credentials.certificates,)))
        return response
