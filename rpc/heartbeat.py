"""Heartbeats of a member to the supervisor, and the membership that comes back.

    event loop   a heartbeat every `interval`, on one stream with the memberships
    thread       the latest heartbeat again, on a stream of its own, while the event loop doesn't turn: with its age

So the supervisor tells a member that is busy from one that is gone. A call that holds the interpreter stops the thread,
too; then the supervisor has only the connection to go by, which gRPC's own threads keep.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress

import grpc

from kvrelay.internal.v1.describe_pb2 import Description
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD, AttendRequest, AttendResponse, Member, Role
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceStub
from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.description import describe as describe_process
from kvrelay.rpc.stream_status import peer_status

logger = logging.getLogger(__name__)

RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0)
TURN_SECONDS = 0.1
"""Seconds between two signs that the event loop turns."""
LAG_SECONDS = 1.0
"""Age of the last sign from which on the thread sends heartbeats."""
STOP_SECONDS = 2.0
"""Seconds for the thread to end."""


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
        on_role: Callable[[Role], None] = lambda role: None,
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
            on_role: called with the role that this member is to have.
            interval: seconds between two heartbeats.
            tell: called when the supervisor asks what this member is; default: what any process can tell.
        """
        self._supervisor = supervisor
        self._credentials = credentials
        self._describe = describe
        self._on_members = on_members
        self._on_fenced = on_fenced
        self._on_role = on_role
        self._interval = interval
        self._tell = tell or self._tell_process
        self._telling: asyncio.Task[None] | None = None
        self._asked = 0, 0.0
        """Number of the supervisor's latest question, and the time at which it came."""
        self._answer: Description | None = None
        """Description of this process that the next heartbeat carries."""
        self._generation = 0
        """Generation of this member; 0 until the supervisor has issued it."""
        self._members: Sequence[Member] = ()
        """Members as `on_members` got them last."""
        self._now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._substitute: Substitute | None = None

    def start(self) -> None:
        self._substitute = Substitute(self._supervisor, self._credentials, self._interval)
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
        if self._substitute is not None:
            await asyncio.to_thread(self._substitute.stop)
            self._substitute = None

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
            with peer_status(call):
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
            if self._substitute is not None:
                self._substitute.heartbeat = AttendRequest(member=heartbeat.member, load=load)
            self._now.clear()
            self._credentials.check()
            try:
                await call.write(heartbeat)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reading side of the same call reports why
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._now.wait()

    def _take_question(self, number: int) -> None:
        """Answers the latest question; one that comes while an answer is collected gets that answer."""
        self._asked = number, time.time()

        async def answer() -> None:
            found = await self._tell()
            found.ask, found.heard_unix = self._asked
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
        if response.role:
            self._on_role(response.role)


class Substitute:
    """Sends heartbeats while the event loop that made it doesn't turn, from a thread."""

    def __init__(self, supervisor: str, credentials: Credentials, interval: float) -> None:
        """Begins to watch the running event loop."""
        self.heartbeat: AttendRequest | None = None
        """The latest heartbeat, which is never changed afterwards."""
        self._supervisor = supervisor
        self._credentials = credentials
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._turned = time.monotonic()
        self._turning: asyncio.TimerHandle | None = None
        self._turn()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats of a held loop", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Not on the event loop."""
        self._loop.call_soon_threadsafe(self._rest)
        self._stopped.set()
        self._thread.join(STOP_SECONDS)

    def _turn(self) -> None:
        self._turned = time.monotonic()
        self._turning = self._loop.call_later(TURN_SECONDS, self._turn)

    def _rest(self) -> None:
        if self._turning is not None:
            self._turning.cancel()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            if time.monotonic() - self._turned >= LAG_SECONDS and self.heartbeat is not None:
                with suppress(grpc.RpcError):  # the event loop's own heartbeats will tell why
                    self._send()

    def _send(self) -> None:
        """Sends heartbeats until the event loop turns again."""
        outbox: queue.SimpleQueue[AttendRequest | None] = queue.SimpleQueue()
        with self._credentials.blocking_channel(self._supervisor, "supervisor") as channel:
            call = SupervisorServiceStub(channel).Attend(iter(outbox.get, None), metadata=self._credentials.metadata)
            try:
                while (age := time.monotonic() - self._turned) >= LAG_SECONDS and not call.done():
                    sent = AttendRequest()
                    if self.heartbeat is not None:
                        sent.CopyFrom(self.heartbeat)
                    sent.member.step_age_seconds = max(age, sent.member.step_age_seconds)
                    outbox.put(sent)
                    if self._stopped.wait(self._interval):
                        break
            finally:
                outbox.put(None)
                call.cancel()


def merged(known: Sequence[Member], partial: Sequence[Member]) -> list[Member]:
    """A membership that may lack members, completed with those that were known under other names."""
    names = {member.name for member in partial}
    return [*partial, *(member for member in known if member.name not in names and member.state != MEMBER_STATE_DEAD)]


def _log_failure(task: "asyncio.Task[None]") -> None:
    """Logs a defect of this task: it stops the heartbeats, and the member is then declared dead."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("heartbeats failed", exc_info=error)
