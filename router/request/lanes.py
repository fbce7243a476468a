"""Other processes in which large requests are read, so that none delays what others ask for.

producer    a call whose request is large
consumer    a lane: a process that reads one request after the other
next        the request of the holder (a tenant, or a client's address) that has had the least time of the lanes; the
            last free lane is for a holder that has none
leaves too  a request whose client has gone, or whose time limit has passed
lost lane   it is begun again, and its request is tried once more
"""

import asyncio
import json
import logging
import os
import socket
from collections import Counter, deque
from dataclasses import dataclass

from kvrelay.machine.forks import HEADER, READ_BYTES, Message, Template, packed
from kvrelay.router.errors import InternalError, InvalidArgument, Unavailable
from kvrelay.router.shares import Shares

logger = logging.getLogger(__name__)

PROGRAM = "kvrelay.router.faces.readers"
MOST_LANES = 4
LIMIT_SECONDS = 10.0
"""CPU time, in seconds, that a small request may take to be read."""
SECONDS_PER_MIB = 5.0
"""CPU time for each further MiB, in seconds."""
BUSY = 5.0
"""Multiple of the allowed CPU time after which a lane without an answer is given up."""
DEFECT = "defect"
"""Field of an answer with the text of an exception that is a defect."""


@dataclass(slots=True, eq=False)
class _Job:
    holder: str
    message: Message
    data: bytes
    answer: "asyncio.Future[tuple[Message, bytes]]"


class Lanes:
    """All lanes of a router. Used on the event loop only."""

    def __init__(self, options: Message) -> None:
        """Starts nothing yet.

        Args:
            options: of PROGRAM.
        """
        self._template = Template(PROGRAM, options)
        self._idle = [_Lane(self._template) for _ in range(max(2, min(MOST_LANES, os.cpu_count() or 1)))]
        self._shares: Shares[str] = Shares()
        self._waiting: dict[str, deque[_Job]] = {}
        self._running: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Requests that wait for a lane."""
        return sum(map(len, self._waiting.values()))

    async def start(self) -> None:
        """Begins a lane before it is needed.

        Raises:
            Unavailable: it can't be begun.
        """
        await self._idle[-1].begin()

    async def run(self, holder: str, message: Message, data: bytes) -> tuple[Message, bytes]:
        """The answer of a lane.

        Raises:
            InvalidArgument: the request has ended its lane, twice, or takes too long.
            Unavailable: there is no lane.
            InternalError: a defect.
        """
        job = _Job(holder, message, data, asyncio.get_running_loop().create_future())
        if holder not in self._waiting:
            self._waiting[holder] = deque()
            self._shares.join(holder)
        self._waiting[holder].append(job)
        self._pass_on()
        try:
            answer, body = await job.answer
        finally:
            if job in self._waiting.get(holder, ()):
                self._waiting[holder].remove(job)
                self._tidy(holder)
        if DEFECT in answer:
            logger.error("a large request was not read because of a defect: %s", answer[DEFECT])
            raise InternalError("a defect in the router")
        return answer, body

    async def close(self) -> None:
        """Ends the processes."""
        await asyncio.to_thread(self._template.close)
        if self._tasks:
            await asyncio.wait(self._tasks)
        for lane in self._idle:
            lane.hang_up()

    def _pass_on(self) -> None:
        while self._idle and (holder := self._next()) is not None:
            job = self._waiting[holder].popleft()
            self._tidy(holder)
            self._running[holder] += 1
            task = asyncio.create_task(self._do(self._idle.pop(), job), name="lane")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next(self) -> str | None:
        """The holder that gets the next lane."""
        within = [holder for holder in self._waiting if len(self._idle) > 1 or not self._running[holder]]
        return min(within, key=self._shares.__getitem__, default=None)

    def _tidy(self, holder: str) -> None:
        if not self._waiting[holder]:
            del self._waiting[holder]
            self._shares.leave(holder)

    async def _do(self, lane: "_Lane", job: _Job) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            answer = await lane.ask(job.message, job.data)
        except Exception as error:  # noqa: BLE001  # for who waits
            if not job.answer.done():
                job.answer.set_exception(error)
        else:
            if not job.answer.done():
                job.answer.set_result(answer)
        finally:
            self._shares.charge(job.holder, loop.time() - began)
            self._running[job.holder] -= 1
            if not self._running[job.holder]:
                del self._running[job.holder]
            self._idle.append(lane)
            self._pass_on()


class _Lane:
    """One process's requests."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._connection: socket.socket | None = None

    async def begin(self) -> socket.socket:
        """The socket of its process, which is begun if there is none.

        Raises:
            Unavailable: it can't be begun.
        """
        if self._connection is None:
            try:
                self._connection = await asyncio.to_thread(self._template.fork)
            except (OSError, EOFError):
                logger.exception("the process that reads large requests can't be started")
                raise Unavailable("the router's process that reads large requests can't be started") from None
            self._connection.setblocking(False)
        return self._connection

    async def ask(self, message: Message, data: bytes) -> tuple[Message, bytes]:
        """
        Raises:
            InvalidArgument: the request has ended the process, twice, or takes too long.
            Unavailable: there is no process.
        """
        limit = LIMIT_SECONDS + SECONDS_PER_MIB * len(data) / 2**20
        loop = asyncio.get_running_loop()
        for _ in range(2):  # perhaps it isn't this request that has ended the process
            connection = await self.begin()
            began = loop.time()
            try:
                async with asyncio.timeout(BUSY * limit):
                    await loop.sock_sendall(connection, packed(message | {"limit": limit}, data))
                    await loop.sock_sendall(connection, data)
                    head, body = HEADER.unpack(await _read(connection, HEADER.size))
                    return json.loads(await _read(connection, head)), await _read(connection, body)
            except TimeoutError:
                self.hang_up()
                await asyncio.to_thread(self._template.end)  # it may be stopped, and read no end of its socket
            except (OSError, EOFError):
                self.hang_up()
            logger.warning("a process that reads large requests was lost", extra={"bytes": len(data)})
            if loop.time() - began > 0.9 * limit:
                raise InvalidArgument(f"the request takes more than {limit:.0f} s to be read")
        raise InvalidArgument("the request ends the process that reads it")

    def hang_up(self) -> None:
        """Closes the socket, so that the process ends: it has nobody to answer to."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None


async def _read(connection: socket.socket, count: int) -> bytes:
    """Raises EOFError if the other end is gone, and OSError."""
    loop = asyncio.get_running_loop()
    data = bytearray(count)
    left = memoryview(data)
    while left:
        got = await loop.sock_recv_into(connection, left[:READ_BYTES])
        if not got:
            raise EOFError
        left = left[got:]
    return bytes(data)
