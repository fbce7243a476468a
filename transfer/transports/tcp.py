"""Links over plain TCP sockets that carry host memory as it lies, in the thread that calls.

One thread hashes a piece and sends it, or receives it and hashes it, while the piece is in its core's cache, and no
other thread is woken in between; `abort` ends a blocked call at once. See `benchmarks/NOTES.md` for what that is worth.

    receiver    listens, tells address and token    ---- meeting ---->    sender
                accepts, checks the token           <---  connect ----    says the token
"""

import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from kvrelay.transfer.ports import SENDER
from kvrelay.transfer.transports.base import ByteStream, Link, LinkError, Rendezvous

TOKEN_BYTES = 32
SOCKET_BUFFER_BYTES = 4 * 2**20
"""Asked for where the system allows as much; else the kernel sizes the buffers by itself."""
MAX_RUNS = 256
"""Of one system call; Linux allows 1024."""
_LIMITS = {socket.SO_SNDBUF: "wmem_max", socket.SO_RCVBUF: "rmem_max"}


class TcpTransport:
    """Makes TCP links."""

    name = "tcp"
    scope = ""

    def __init__(self, host: str) -> None:
        """Receiving ends listen on `host`, on a port that the system chooses, for as long as a link is being made.

        Raises:
            OSError: it can't be bound.
        """
        self._host = host
        self._listener().close()

    def _listener(self) -> socket.socket:
        family, kind, protocol, _, address = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            _size_buffers(listener)
            listener.bind(address)
            listener.listen(4)
        except OSError as error:
            listener.close()
            raise OSError(f"host {self._host}: TCP links can't be accepted on it: {error}") from error
        return listener

    def connect(self, meeting: Rendezvous, rank: int, timeout: float) -> Link:
        """See `Transport.connect`."""
        deadline = time.monotonic() + timeout
        try:
            made = self._call(meeting, timeout) if rank == SENDER else self._answer(meeting, deadline)
            return TcpLink(made)
        except (OSError, RuntimeError, ValueError) as error:
            raise LinkError(f"tcp: {error}") from error

    def _call(self, meeting: Rendezvous, timeout: float) -> socket.socket:
        host, _, port = meeting.get("address").decode().rpartition(":")
        family, kind, protocol, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        try:
            _size_buffers(made)
            made.settimeout(timeout)
            made.connect(address)
            made.sendall(meeting.get("token"))
            meeting.set("called", b"")
        except BaseException:
            made.close()
            raise
        return made

    def _answer(self, meeting: Rendezvous, deadline: float) -> socket.socket:
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._listener() as listener:
            meeting.set("token", token)
            meeting.set("address", f"{self._host}:{listener.getsockname()[1]}")
            # Waited for here rather than in accept, since whoever closes the meeting ends this wait.
            meeting.wait(["called"])
            while (left := deadline - time.monotonic()) > 0:
                listener.settimeout(left)
                made, _ = listener.accept()
                if _says(made, token, deadline):
                    return made
                made.close()
        raise LinkError("the other end did not come")


class TcpLink:
    """One end of a TCP link."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def stream(self) -> ByteStream:
        return self

    def write(self, runs: Sequence[memoryview], deadline: float) -> None:
        self._move(self._connection.sendmsg, socket.SO_SNDTIMEO, runs, deadline)

    def read(self, runs: Sequence[memoryview], deadline: float) -> None:
        self._move(self._fill, socket.SO_RCVTIMEO, runs, deadline)

    def _fill(self, runs: list[memoryview]) -> int:
        return self._connection.recvmsg_into(runs, 0, socket.MSG_WAITALL)[0]

    def _move(
        self, call: Callable[[list[memoryview]], int], timeout: int, runs: Sequence[memoryview], deadline: float
    ) -> None:
        """`call`s until all of `runs` has moved. The kernel keeps the time (socket option `timeout`): nobody polls."""
        rest = [run for run in runs if len(run)]
        try:
            while rest:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LinkError("tcp: no end within its time")
                wait = struct.pack("ll", int(left), max(1000, int(left % 1 * 1e6)))
                self._connection.setsockopt(socket.SOL_SOCKET, timeout, wait)
                moved = call(rest[:MAX_RUNS])
                if not moved:
                    raise LinkError("tcp: the other end has closed")
                rest = _after(rest, moved)
        except BlockingIOError as error:
            raise LinkError("tcp: no end within its time") from error
        except OSError as error:
            raise LinkError(f"tcp: {error}") from error

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def send(self, data: torch.Tensor) -> "TcpPending":
        return TcpPending(self.write, data)

    def recv(self, into: torch.Tensor) -> "TcpPending":
        return TcpPending(self.read, into)

    def abort(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        self._connection.close()


class TcpPending:
    """A transfer that happens while it is waited for."""

    def __init__(self, move: Callable[[Sequence[memoryview], float], None], data: torch.Tensor) -> None:
        self._move = move
        self._data = data

    def wait(self, timeout: float) -> None:
        self._move([memoryview(self._data.numpy().data)], time.monotonic() + timeout)


def _after(runs: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of `runs` after their first bytes."""
    for index, run in enumerate(runs):
        if moved < len(run):
            return [run[moved:], *runs[index + 1 :]]
        moved -= len(run)
    return []


def _size_buffers(connection: socket.socket) -> None:
    """Before the connection is made, when the window's scale is agreed on."""
    for option, limit in _LIMITS.items():
        path = Path("/proc/sys/net/core", limit)
        if path.exists() and int(path.read_text()) >= SOCKET_BUFFER_BYTES:
            connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)


def _says(connection: socket.socket, token: bytes, deadline: float) -> bool:
    """Whether the caller knows the token: anybody can reach the port, only who was told the token may stay."""
    said = b""
    with suppress(OSError):
        while len(said) < len(token) and (left := deadline - time.monotonic()) > 0:
            connection.settimeout(min(left, 1.0))
            more = connection.recv(len(token) - len(said))
            if not more:
                break
            said += more
    return secrets.compare_digest(said, token)
