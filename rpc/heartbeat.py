"""Heartbeats of a member to the supervisor, and the membership that comes back."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress

import grpc

from kvrelay.internal.v1.describe_pb2 import Description
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD, AttendRequest, AttendResponse, Member
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceStub
from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.description import describe as describe_process

logger = logging.getLogger(__name__)

RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0)


class HeartbeatClient:
    """Keeps the supervisor informed about this member, and this member about the membership.

    While the supervisor is down, the last membership stays in force; heartbeats resume when it is back. A supervisor
    that has just started may not have heard of all members: until it says that its membership is complete, one that is
    absent is kept as it was known.
    """

    def __init__(
        self,
        supervisor: str,
        credentials: Credentials,
        describe: Callable[[], tuple[Member, Load | None]],
        on_members: Callable[[Sequence[Member]], None],
        on_fenced: Callable[[], None],
        interval: float = 0.5,
        tell: Callable[[], Awaitable[Description]] | None = None,
    ) -> None:
        """
        Args:
            supervisor: its host:port.
            credentials: of this member.
            describe: called before every heartbeat; returns this member and its load.
            on_members: called with every new membership.
            on_fenced: called when the supervisor has declared this incarnation dead.
            interval: seconds between two heartbeats.
            tell: called when the supervisor asks what this member is; default: what any process can tell.
        """
        self._supervisor = supervisor
        self._credentials = credentials
        self._describe = describe
        self._on_members = on_members
        self._on_fenced = on_fenced
        self._interval = interval
        self._tell = tell or self._tell_process
        self._telling: asyncio.Task[None] | None = None
        self._answer: Description | None = None
        """To go with the next heartbeat."""
        self._generation = 0
        """Of this member, once the supervisor has issued it."""
        self._members: Sequence[Member] = ()
        """As last passed on."""
        self._now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="heartbeat client")
        self._task.add_done_callback(_log_failure)

    def beat(self) -> None:
        """Sends a heartbeat at once, for a change that others should know early."""
        self._now.set()

    async def stop(self) -> None:
        if self._task is not None:
            running = [task for task in (self._task, self._telling) if task is not None]
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            self._task = self._telling = None

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                async with self._credentials.channel(self._supervisor, "supervisor") as channel:
                    async for response in self._exchange(SupervisorServiceStub(channel)):
                        failures = 0
                        self._apply(response)
                reason = "stream ended"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except asyncio.CancelledError:
                # grpc.aio raises it as well when the other side ends the stream with CANCELLED.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                reason = "CANCELLED by the supervisor"
            if failures == 0:
                logger.warning("supervisor unreachable; the last membership stays in force", extra={"reason": reason})
            await asyncio.sleep(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
            failures += 1

    async def _exchange(self, stub: SupervisorServiceStub) -> AsyncIterator[AttendResponse]:
        """Sends heartbeats on one stream and yields the memberships that come back."""
        call = stub.Attend(metadata=self._credentials.metadata)
        beating = asyncio.create_task(self._beat(call), name="heartbeat")
        beating.add_done_callback(_log_failure)
        version = -1
        try:
            async for response in call:
                if response.ask:
                    self._take_question(response.ask)
                elif response.fenced or response.version > version:
                    version = response.version
                    yield response
        finally:
            beating.cancel()
            call.cancel()

    async def _beat(self, call: "grpc.aio.StreamStreamCall[AttendRequest, AttendResponse]") -> None:
        while True:
            member, load = self._describe()
            heartbeat = AttendRequest(member=member, load=load)
            heartbeat.member.generation = self._generation
            if self._answer is not None:
                heartbeat.description.CopyFrom(self._answer)
                heartbeat.description.told_unix = time.time()
                self._answer = None
            self._now.clear()
            self._credentials.check()
            try:
                await call.write(heartbeat)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reading side of the same call reports why
            with suppress(TimeoutError):
                await asyncio.wait_for(self._now.wait(), self._interval)

    def _take_question(self, number: int) -> None:
        """Answers the latest question; one at a time."""
        heard = time.time()

        async def answer() -> None:
            found = await self._tell()
            found.ask, found.heard_unix = number, heard
            self._answer = found
            self.beat()

        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(answer(), name="description")
            self._telling.add_done_callback(_log_failure)

    async def _tell_process(self) -> Description:
        return await asyncio.to_thread(describe_process, (self._credentials.certificates,))

    def _apply(self, response: AttendResponse) -> None:
        if response.fenced:
            logger.error("fenced: the supervisor has declared this incarnation dead")
            self._on_fenced()
            return
        self._generation = response.generation or self._generation
        self._members = response.members if response.complete else merged(self._members, response.members)
        self._on_members(self._members)


def merged(known: Sequence[Member], partial: Sequence[Member]) -> list[Member]:
    """A membership that may lack members, completed with those that were known under other names."""
    names = {member.name for member in partial}
    return [*partial, *(member for member in known if member.name not in names and member.state != MEMBER_STATE_DEAD)]


def _log_failure(task: "asyncio.Task[None]") -> None:
    """Logs a defect of this task: it stops the heartbeats, and the member is then declared dead."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("heartbeats failed", exc_info=error)
