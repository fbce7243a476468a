"""The supervisor: hears every member's heartbeats, sends each of them the membership, and replaces lost members.

A plain server: `python -m kvrelay.cluster.supervisor --config FILE` runs one that replaces nobody. With a `Launcher`
it keeps one process running for each name: it starts the process, watches it, and starts another one when it ended or
was declared dead.

Requests and tokens never pass through here: without the supervisor, running streams go on.
"""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc

from kvrelay.cluster.membership import HeartbeatConfig, InvalidMember, Membership
from kvrelay.cluster.replacement import Backoff, Ended
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_READY,
    MEMBER_STATE_UNSPECIFIED,
    ROLE_ROUTER,
    AttendRequest,
    AttendResponse,
    GetStatusRequest,
    GetStatusResponse,
    Member,
    MemberState,
)
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceServicer, add_SupervisorServiceServicer_to_server
from kvrelay.rpc.address import bind, join
from kvrelay.rpc.identity import WorkerId
from kvrelay.rpc.options import server_options
from kvrelay.rpc.serve import main

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1


class Launcher(Protocol):
    """Runs members' processes, at most one for each name at a time."""

    names: tuple[str, ...]
    """The members to keep running."""

    async def run(self, name: str, supervisor: str) -> Ended:
        """Starts the member's process with the supervisor's address (host:port); returns when it has ended."""

    async def stop(self, name: str, grace: float) -> None:
        """Gives the process `grace` seconds to finish its requests and ends it; returns when it is gone."""

    async def kill(self, name: str) -> None:
        """Ends the process at once, even a frozen one."""


@dataclass(frozen=True, slots=True)
class SupervisorConfig(HeartbeatConfig):
    """One supervisor's options."""

    host: str = "127.0.0.1"
    """Address that its gRPC binds to, and that members dial."""

    port: int = 0
    """Port of its gRPC; 0 takes a free one."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one expected member is."""

    name: str
    state: MemberState = MEMBER_STATE_UNSPECIFIED
    """Unspecified before its first heartbeat."""
    loaded: float = 0.0
    """Share of the weights, 0 to 1."""
    failures: int = 0
    """Processes of this member that ended so far without a request to stop."""
    reason: str = ""
    """Why the last of them did."""
    hopeless: bool = False
    """It isn't started again: its configuration is the reason."""


@dataclass(frozen=True, slots=True)
class Startup:
    """How far the cluster is."""

    ready: bool
    """Requests can be served, though some members may be missing."""
    router: str
    """host:port of the public gRPC of a router that is ready; empty before."""
    members: list[Progress]


class SupervisorServer(SupervisorServiceServicer):
    """Serves SupervisorService over a Membership, and keeps the members of `launcher` running."""

    def __init__(self, config: SupervisorConfig, launcher: Launcher | None = None) -> None:
        self.config = config
        self.membership = Membership(config)
        self._launcher = launcher
        self._expected = {name: Progress(name) for name in (launcher.names if launcher is not None else ())}
        self._served: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._changed = asyncio.Event()
        self._sent_version = -1
        self._failed = asyncio.Event()
        self._failure: BaseException = RuntimeError("the supervisor has not failed")
        self._stopping = False

    @property
    def address(self) -> str:
        """host:port of the gRPC."""
        return join(self.config.host, self._port)

    async def start(self) -> None:
        """Binds, serves, and starts the members.

        Raises:
            OSError: the port is in use.
        """
        self._server = grpc.aio.server(options=server_options())
        add_SupervisorServiceServicer_to_server(self, self._server)
        self._port = bind(self._server, self.config.host, self.config.port)
        await self._server.start()
        self._run("tick", self._watch())
        if self._launcher is not None:
            for name in self._expected:
                self._run(name, self._keep(name, self._launcher))

    async def stop(self, grace: float) -> None:
        """Ends every member (the router first, so that no new request comes in), then itself.

        A supervisor that has failed ends only itself: the members serve without it.
        """
        self._stopping = True
        if self._launcher is not None and self._server is not None and not self._failed.is_set():
            routers = [name for name in self._expected if name.startswith("router-")]
            workers = [name for name in self._expected if name not in routers]
            for group in (routers, workers):
                await asyncio.gather(*(self._end(name, self._launcher, grace) for name in group))
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._server is not None:
            await self._server.stop(0.2)

    async def failed(self) -> BaseException:
        """Returns the reason when the supervisor can't go on."""
        await self._failed.wait()
        return self._failure

    def startup(self) -> Startup:
        """How far every expected member is."""
        members = {member.name: member for member in self.membership.members()}
        routers = [m.address for m in members.values() if m.role == ROLE_ROUTER and m.state == MEMBER_STATE_READY]
        progress = []
        for name, expected in self._expected.items():
            member = members.get(name, Member())
            progress.append(replace(expected, state=member.state, loaded=member.loaded))
        return Startup(self.membership.ready, routers[0] if routers else "", progress)

    async def _keep(self, name: str, launcher: Launcher) -> None:
        """Runs one process of this name after another."""
        backoff = Backoff()
        while not self._stopping:
            started = time.monotonic()
            ended = await launcher.run(name, self.address)
            self._lost(name)
            if self._stopping:
                return
            hopeless = ended.mistake and name not in self._served
            failures = self._expected[name].failures + 1
            self._expected[name] = Progress(name, failures=failures, reason=ended.reason, hopeless=hopeless)
            if hopeless:
                logger.error("cannot start", extra={"member": name, "reason": ended.reason})
                return
            wait = backoff.after(time.monotonic() - started)
            logger.warning("ended; will be replaced", extra={"member": name, "reason": ended.reason, "wait": wait})
            await asyncio.sleep(wait)

    async def _end(self, name: str, launcher: Launcher, grace: float) -> None:
        await launcher.stop(name, grace)
        self.membership.remove(name)
        self._publish()

    def _lost(self, name: str) -> None:
        """The process of this name has ended, and with it the name's present incarnation."""
        worker = self.membership.present(name)
        if worker is not None and self.membership.gone(worker) and not self._stopping:
            logger.warning("gone", extra={"member": name, "incarnation": worker.incarnation})
        self._publish()

    async def _watch(self) -> None:
        while True:
            for worker in self.membership.tick():
                logger.warning("silent; dead", extra={"member": worker.name, "incarnation": worker.incarnation})
                self._kill(worker)
            for member in self.membership.members():
                if member.state == MEMBER_STATE_READY:
                    self._served.add(member.name)
            self._publish()
            await asyncio.sleep(TICK_SECONDS)

    def _kill(self, worker: WorkerId) -> None:
        """Ends a silent member's process; `_keep` sees the end and starts the next one."""
        if self._launcher is not None and worker.name in self._expected and not self._stopping:
            self._run(f"kill {worker.name}", self._launcher.kill(worker.name))

    def _run(self, key: str, work: "asyncio._CoroutineLike[None]") -> None:
        def done(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None and not self._failed.is_set():
                self._failure = error
                self._failed.set()

        self._tasks[key] = asyncio.create_task(work, name=key)
        self._tasks[key].add_done_callback(done)

    def _publish(self) -> None:
        """Wakes every Attend stream if the membership has changed."""
        if self.membership.version != self._sent_version:
            self._sent_version = self.membership.version
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
            await heard.wait()  # the first membership that a member gets includes itself
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

    async def _write(self, context: "grpc.aio.ServicerContext[Any, AttendResponse]", response: AttendResponse) -> None:
        """Writes within `dead_seconds`: a frozen member must not hold its stream's memory for ever."""
        await asyncio.wait_for(context.write(response), self.config.dead_seconds)

    async def _beats(self, requests: AsyncIterator[AttendRequest], heard: asyncio.Event) -> bool:
        """Takes heartbeats until the stream ends (False) or the member is fenced (True)."""
        async for request in requests:
            if not self.membership.attend(request.member, request.load):
                member = request.member
                logger.warning("fenced", extra={"member": member.name, "incarnation": member.incarnation})
                return True
            self._publish()
            heard.set()
        return False

    async def GetStatus(
        self, request: GetStatusRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> GetStatusResponse:
        return GetStatusResponse(ready=self.membership.ready, members=self.membership.statuses())


if __name__ == "__main__":
    sys.exit(main(SupervisorConfig, SupervisorServer, "A kvrelay supervisor that replaces nobody, in the foreground."))
