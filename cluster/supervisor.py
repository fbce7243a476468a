"""The supervisor: knows every member by its heartbeats, tells each of them who else is there, replaces the lost.

A plain server: `python -m kvrelay.cluster.supervisor --config FILE` runs one that replaces nobody. With a `Launcher`
it keeps one process for each name: started, watched, and started anew when it ended or was declared dead.

Requests and tokens never pass through here: with the supervisor away, running streams go on.
"""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import grpc

from kvrelay.cluster.membership import Identity, InvalidMember, Membership
from kvrelay.cluster.replacement import Backoff, Ended
from kvrelay.engine.config import STRICT
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_READY,
    MEMBER_STATE_UNSPECIFIED,
    ROLE_ROUTER,
    AttendRequest,
    AttendResponse,
    GetStatusRequest,
    GetStatusResponse,
    MemberState,
)
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceServicer, add_SupervisorServiceServicer_to_server
from kvrelay.rpc.address import bind, join
from kvrelay.rpc.options import server_options
from kvrelay.rpc.serve import main

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1


class Launcher(Protocol):
    """Runs members' processes, at most one for each name at a time."""

    async def run(self, name: str, supervisor: str) -> Ended:
        """Starts the member's process, tells it the supervisor's address, and returns when it has ended."""

    async def stop(self, name: str, grace: float) -> None:
        """Lets the process finish what it has within `grace` seconds and ends it; returns when it is gone."""

    async def kill(self, name: str) -> None:
        """Ends the process at once, also a frozen one."""


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """What the supervisor is told at start."""

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    host: str = "127.0.0.1"
    """Address that its gRPC binds to, and that members dial."""

    port: int = 0
    """Of its gRPC; 0 takes a free one."""

    suspect_seconds: float = 1.5
    """Silence after which a member gets no new requests."""

    dead_seconds: float = 3.0
    """Silence after which an incarnation is fenced for good and replaced."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one expected member is."""

    name: str
    state: MemberState
    """Unspecified before its first heartbeat."""
    loaded: float
    """Share of the weights, 0 to 1."""
    failures: int
    """Processes of this member that ended so far without having been told to."""
    reason: str
    """Why the last of them did."""
    hopeless: bool
    """It isn't tried again: what it was told is the reason."""


@dataclass(frozen=True, slots=True)
class Startup:
    """How far the cluster is."""

    ready: bool
    """Requests can be served, though not every member may be there."""
    router: str
    """host:port of the public gRPC of a router that is ready; empty before."""
    members: list[Progress]


class SupervisorServer(SupervisorServiceServicer):
    """Serves SupervisorService over a Membership, and keeps the members in `names` running with `launcher`."""

    def __init__(self, config: SupervisorConfig, launcher: Launcher | None = None, names: Sequence[str] = ()) -> None:
        self.config = config
        self.membership = Membership(config.suspect_seconds, config.dead_seconds)
        self._launcher = launcher
        self._names = tuple(names) if launcher is not None else ()
        self._failures: dict[str, int] = dict.fromkeys(self._names, 0)
        self._reasons: dict[str, str] = {}
        self._hopeless: set[str] = set()
        self._served: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._told = -1
        self._stopping = False

    # Life.

    @property
    def address(self) -> str:
        """host:port of the gRPC."""
        return join(self.config.host, self._port)

    async def start(self) -> None:
        """Binds, serves, and starts the members.

        Raises:
            OSError: the port is in use.
        """
        self._changed = asyncio.Event()
        self._failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._server = grpc.aio.server(options=server_options())
        add_SupervisorServiceServicer_to_server(self, self._server)
        self._port = bind(self._server, self.config.host, self.config.port)
        await self._server.start()
        self._run("tick", self._watch())
        if self._launcher is not None:
            for name in self._names:
                self._run(name, self._keep(name, self._launcher))

    async def stop(self, grace: float) -> None:
        """Ends every member (the router first, so that nothing new comes in), then itself.

        A supervisor that has failed ends itself only: the members serve without it.
        """
        self._stopping = True
        if self._launcher is not None and self._server is not None and not self._failure.done():
            routers = [name for name in self._names if name.startswith("router-")]
            workers = [name for name in self._names if name not in routers]
            for group in (routers, workers):
                await asyncio.gather(*(self._end(name, self._launcher, grace) for name in group))
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._server is not None:
            await self._server.stop(0.2)

    async def failed(self) -> BaseException:
        """Returns when the supervisor can't go on, with the reason."""
        return await self._failure

    def startup(self) -> Startup:
        """How far every expected member is."""
        members = {member.name: member for member in self.membership.members()}
        routers = [m.address for m in members.values() if m.role == ROLE_ROUTER and m.state == MEMBER_STATE_READY]
        progress = [
            Progress(
                name,
                state=members[name].state if name in members else MEMBER_STATE_UNSPECIFIED,
                loaded=members[name].loaded if name in members else 0.0,
                failures=self._failures[name],
                reason=self._reasons.get(name, ""),
                hopeless=name in self._hopeless,
            )
            for name in self._names
        ]
        return Startup(self.membership.ready, routers[0] if routers else "", progress)

    # Members' processes.

    async def _keep(self, name: str, launcher: Launcher) -> None:
        """One process of this name after another."""
        backoff = Backoff()
        while not self._stopping:
            started = time.monotonic()
            ended = await launcher.run(name, self.address)
            self._lost(name)
            if self._stopping:
                return
            self._failures[name] += 1
            self._reasons[name] = ended.reason
            if ended.mistake and name not in self._served:
                self._hopeless.add(name)
                logger.error("cannot start", extra={"member": name, "reason": ended.reason})
                return
            wait = backoff.after(time.monotonic() - started)
            logger.warning("ended; will be replaced", extra={"member": name, "reason": ended.reason, "wait": wait})
            await asyncio.sleep(wait)

    async def _end(self, name: str, launcher: Launcher, grace: float) -> None:
        await launcher.stop(name, grace)
        self.membership.remove(name)
        self._tell()

    def _lost(self, name: str) -> None:
        """The one process of this name is gone, and with it the incarnation that attended under the name."""
        identity = self.membership.incarnation(name)
        if identity is not None and self.membership.gone(identity) and not self._stopping:
            logger.warning("gone", extra={"member": name, "incarnation": identity.incarnation})
        self._tell()

    async def _watch(self) -> None:
        while True:
            for identity in self.membership.tick():
                logger.warning("silent; dead", extra={"member": identity.name, "incarnation": identity.incarnation})
                self._replace(identity)
            for member in self.membership.members():
                if member.state == MEMBER_STATE_READY:
                    self._served.add(member.name)
            self._tell()
            await asyncio.sleep(TICK_SECONDS)

    def _replace(self, identity: Identity) -> None:
        """Ends a silent member's process; `_keep` sees it end and starts the next."""
        if self._launcher is not None and identity.name in self._names and not self._stopping:
            self._run(f"kill {identity.name}", self._launcher.kill(identity.name))

    def _run(self, key: str, work: "asyncio._CoroutineLike[None]") -> None:
        def done(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
                self._failure.set_result(error)

        self._tasks[key] = asyncio.create_task(work, name=key)
        self._tasks[key].add_done_callback(done)

    # SupervisorService.

    def _tell(self) -> None:
        """Wakes every attending stream when the membership has changed."""
        if self.membership.version != self._told:
            self._told = self.membership.version
            self._changed.set()
            self._changed = asyncio.Event()

    async def Attend(
        self,
        request_iterator: AsyncIterator[AttendRequest],
        context: "grpc.aio.ServicerContext[AttendRequest, AttendResponse]",
    ) -> None:
        heard = asyncio.Event()
        beats = asyncio.create_task(self._beats(request_iterator, heard), name="beats")
        beats.add_done_callback(lambda _: heard.set())
        sent = -1
        try:
            await heard.wait()  # a member finds itself in the first membership that it gets
            while not beats.done():
                changed = asyncio.ensure_future(self._changed.wait())
                if (version := self.membership.version) != sent:
                    await self._write(context, AttendResponse(version=version, members=self.membership.members()))
                    sent = version
                await asyncio.wait((beats, changed), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            if beats.result():
                await self._write(context, AttendResponse(fenced=True))
        except InvalidMember as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the member does not read its stream")
        finally:
            beats.cancel()

    async def _write(
        self, context: "grpc.aio.ServicerContext[AttendRequest, AttendResponse]", response: AttendResponse
    ) -> None:
        """Writes within the time to death: a frozen member must not hold its stream's memory for ever."""
        await asyncio.wait_for(context.write(response), self.config.dead_seconds)

    async def _beats(self, requests: AsyncIterator[AttendRequest], heard: asyncio.Event) -> bool:
        """Takes heartbeats until the stream ends (False) or the member is fenced (True)."""
        async for request in requests:
            if not self.membership.attend(request.member, request.load):
                member = request.member
                logger.warning("fenced", extra={"member": member.name, "incarnation": member.incarnation})
                return True
            self._tell()
            heard.set()
        return False

    async def GetStatus(
        self, request: GetStatusRequest, context: "grpc.aio.ServicerContext[GetStatusRequest, GetStatusResponse]"
    ) -> GetStatusResponse:
        return GetStatusResponse(ready=self.membership.ready, members=self.membership.statuses())


if __name__ == "__main__":
    sys.exit(main(SupervisorConfig, SupervisorServer, "A kvrelay supervisor that replaces nobody, in the foreground."))
