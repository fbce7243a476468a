"""A member's attendance at the supervisor: heartbeats one way, the membership the other."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

import grpc

from kvrelay.internal.v1.supervisor_pb2 import AttendRequest, AttendResponse, Member
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceStub
from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.rpc.options import channel_options

logger = logging.getLogger(__name__)

RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0)


class HeartbeatClient:
    """Keeps this member known to the supervisor, and the membership known to this member.

    A supervisor that is away changes nothing here: the last membership stays in force, and attendance goes on when it
    is back. `describe` is asked before every heartbeat; `beat()` sends one at once, for a change worth telling early.
    """

    def __init__(
        self,
        supervisor: str,
        describe: Callable[[], tuple[Member, Load | None]],
        on_members: Callable[[Sequence[Member]], None],
        on_fenced: Callable[[], None],
        interval: float = 0.5,
    ) -> None:
        self._supervisor = supervisor
        self._describe = describe
        self._on_members = on_members
        self._on_fenced = on_fenced
        self._interval = interval
        self._now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="attendance")
        self._task.add_done_callback(_tell_failure)

    def beat(self) -> None:
        """Sends a heartbeat without waiting for the next one's time."""
        self._now.set()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._task = None

    async def _run(self) -> None:
        failures = 0
        async with grpc.aio.insecure_channel(self._supervisor, options=channel_options()) as channel:
            stub = SupervisorServiceStub(channel)
            while True:
                try:
                    async for response in self._attend(stub):
                        failures = 0
                        self._apply(response)
                    reason = "stream ended"
                except grpc.aio.AioRpcError as error:
                    reason = f"{error.code().name}: {error.details()}"
                except asyncio.CancelledError:
                    # A stream that the other side ends with CANCELLED looks like a cancellation of this very task.
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    reason = "CANCELLED by the supervisor"
                if failures == 0:
                    logger.warning("supervisor away; the last membership stays in force", extra={"reason": reason})
                await asyncio.sleep(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                failures += 1

    async def _attend(self, stub: SupervisorServiceStub) -> AsyncIterator[AttendResponse]:
        call = stub.Attend()
        beating = asyncio.create_task(self._beat(call), name="heartbeat")
        beating.add_done_callback(_tell_failure)
        version = -1
        try:
            async for response in call:
                if response.fenced or response.version > version:
                    version = response.version
                    yield response
        finally:
            beating.cancel()
            call.cancel()

    async def _beat(self, call: "grpc.aio.StreamStreamCall[AttendRequest, AttendResponse]") -> None:
        while True:
            member, load = self._describe()
            self._now.clear()
            try:
                await call.write(AttendRequest(member=member, load=load))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reading side of the same call reports why
            with suppress(TimeoutError):
                await asyncio.wait_for(self._now.wait(), self._interval)

    def _apply(self, response: AttendResponse) -> None:
        if response.fenced:
            logger.error("fenced: the supervisor has declared this incarnation dead")
            self._on_fenced()
        else:
            self._on_members(response.members)


def _tell_failure(task: "asyncio.Task[None]") -> None:
    """A defect here silences the member, which is then declared dead; the log must say why."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("attendance failed", exc_info=error)
