"""Messages between two processes of one worker, over a socket that only they have: msgpack with a length before it."""

import asyncio
import logging
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it ships no types
from psutil import Process

from kvrelay.machine.silence import Silence
from kvrelay.transfer.links.rank_links import COMMITTED

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<I")
MAX_BYTES = 2**28
"""Size limit of a message in bytes."""
SILENT_SECONDS = 2.5
"""Seconds without a message after which a process that doesn't compute is frozen: it is noticed within 3 s."""
BEAT_SECONDS = 0.2
"""Time between two signs of life."""


class ChannelEndedError(ConnectionError):
    """The other end has closed the socket, or its process has ended."""


def send_bytes(connection: socket.socket, data: bytes) -> None:
    """Sends one message.

    Raises:
        OSError: the socket is closed, or the other end takes nothing for as long as the socket's timeout.
        ValueError: the message is longer than MAX_BYTES.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"a message of {len(data)} bytes; allowed: up to {MAX_BYTES}")
    connection.sendall(HEADER.pack(len(data)) + data)


def receive_bytes(connection: socket.socket) -> bytes | None:
    """The next message; None if the other end has closed the socket.

    Raises:
        OSError: the socket is closed, or a message is longer than MAX_BYTES.
    """
    try:
        (length,) = HEADER.unpack(receive_exactly(connection, HEADER.size))
        if length > MAX_BYTES:
            raise ConnectionError(f"a message of {length} bytes; allowed: up to {MAX_BYTES}")
        return receive_exactly(connection, length)
    except ChannelEndedError:
        return None


def receive_exactly(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """The next `count` bytes.

    Args:
        deadline: a time of the monotonic clock, until which they have to come; unless given, the socket's timeout
            counts.

    Raises:
        ChannelEndedError: the other end has closed the socket.
        OSError: they don't come in time.
    """
    data = bytearray(count)
    view = memoryview(data)
    while view:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        received = connection.recv_into(view)
        if not received:
            raise ChannelEndedError("the other end has closed the connection")
        view = view[received:]
    return bytes(data)


class Channel:
    """One end of a control socket. `send` never waits: a thread of its own writes, another one reads."""

    def __init__(self, connection: socket.socket, name: str, process: Process | None = None) -> None:
        """
        Args:
            name: of the other end.
            process: of the other end; None if it is on another machine.
        """
        self.name = name
        self.silence = Silence(SILENT_SECONDS, remote=process is None)
        """How long the other end has sent nothing. Before its first message it isn't silent: it imports."""
        self._process = process
        self._connection = connection
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def start(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        """Calls `on_message` with each message, in order, and then `on_end` once; both on the reading thread."""
        for run in (lambda: self._read(on_message, on_end), self._write):
            threading.Thread(target=run, name=f"channel to {self.name}", daemon=True).start()

    def send(self, message: Any) -> None:
        """Queues a message; drops it once the channel has ended. Any thread."""
        self._out.put(msgpack.packb(message))

    def close(self) -> None:
        """Ends the channel; `on_end` follows."""
        self._out.put(None)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _read(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        try:
            while (data := receive_bytes(self._connection)) is not None:
                self.silence.answered(self._process)
                on_message(msgpack.unpackb(data))
        except OSError as error:
            logger.debug("channel to %s: %s", self.name, error)
        finally:
            self._out.put(None)
            on_end()

    def _write(self) -> None:
        with suppress(OSError):
            while (data := self._out.get()) is not None:
                send_bytes(self._connection, data)


class LinkChannel:
    """Messages about links on a channel; implements `RankChannel`."""

    def __init__(self, send: Callable[[Any], None], committed_step: Callable[[], int] = lambda: COMMITTED) -> None:
        """
        Args:
            send: sends a message to the other end, from any thread.
            committed_step: see `RankChannel`; of no use at the end of another rank than rank 0.
        """
        self._send = send
        self._committed_step = committed_step
        self._lock = threading.Lock()
        self._early: list[Any] = []
        self._deliver: Callable[[Any], None] | None = None
        self._lose: Callable[[str], None] | None = None

    def listen(self, on_message: Callable[[Any], None], on_lost: Callable[[str], None]) -> None:
        """See `RankChannel`."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._deliver = lambda message: _post(loop, on_message, message)
            self._lose = lambda reason: _post(loop, on_lost, reason)
            for message in self._early:
                self._deliver(message)
            self._early.clear()

    @property
    def committed_step(self) -> int:
        """See `RankChannel`."""
        return self._committed_step()

    def send(self, message: Any) -> None:
        """See `RankChannel`."""
        self._send(message)

    def take(self, message: Any) -> None:
        """Passes a message of the other end on. Any thread."""
        with self._lock:
            if self._deliver is None:
                self._early.append(message)
            else:
                self._deliver(message)

    def lose(self, reason: str) -> None:
        """Passes on that the other end is lost. Any thread."""
        if self._lose is not None:
            self._lose(reason)


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[Any], None], argument: Any) -> None:
    with suppress(RuntimeError):  # the loop has closed
        loop.call_soon_threadsafe(call, argument)
