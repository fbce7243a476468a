"""Links over plain TCP sockets that carry host memory in place, on the thread that calls.

One thread hashes a piece and sends it, or receives it and hashes it, while the piece is in its core's cache; no other
thread is woken in between. `abort` ends a blocked call at once. `benchmarks/NOTES.md` has the measurements.

    receiver    listens, publishes address and token    -- rendezvous -->    sender
                accepts, checks the token               <--  connect  --     sends the token
"""

import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvrelay.transfer.ports import SENDER
from kvrelay.transfer.transports.base import ByteStream, Link, LinkError, Pending, Rendezvous, link_errors, seconds_left

TOKEN_BYTES = 32
SOCKET_BUFFER_BYTES = 4 * 2**20
"""Requested if the system allows as much; otherwise the kernel sizes the buffers itself."""
MAX_RUNS = 256
"""Memory runs of one system call at most; Linux allows 1024."""
_LIMITS = {socket.SO_SNDBUF: "wmem_max", socket.SO_RCVBUF: "rmem_max"}


class TcpTransport:
    """Opens TCP links."""

    name = "tcp"
    scope = ""

    def __init__(self, host: str) -> None:
        """Receiving ends listen on `host` while a link is being opened, on a port that the system chooses.

        Raises:
            OSError: it can't be bound.
        """
        self._host = host
        self._listener().close()

    def _listener(self) -> socket.socket:
        listener, address = _socket(self._host, 0)
        try:
            listener.bind(address)
            listener.listen(4)
        except OSError as error:
            listener.close()
            raise OSError(f"host {self._host}: TCP links can't be accepted on it: {error}") from error
        return listener

    def connect(self, rendezvous: Rendezvous, rank: int, timeout: float) -> Link:
        """See `Transport.connect`."""
        with link_errors(self.name, OSError, RuntimeError, ValueError):
            return TcpLink(_connect(rendezvous, timeout) if rank == SENDER else self._accept(rendezvous, timeout))

    def _accept(self, rendezvous: Rendezvous, timeout: float) -> socket.socket:
        deadline = time.monotonic() + timeout
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._listener() as listener:
            rendezvous.set("token", token)
            rendezvous.set("address", f"{self._host}:{listener.getsockname()[1]}")
            # Waits here rather than in accept, because closing the rendezvous ends this wait.
            rendezvous.wait(["called"])
            while True:
                listener.settimeout(seconds_left(deadline))
                connection, _ = listener.accept()
                if _sends_token(connection, token, deadline):
                    return connection
                connection.close()


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
        self, call: Callable[[list[memoryview]], int], option: int, runs: Sequence[memoryview], deadline: float
    ) -> None:
        """Repeats `call` until all of `runs` has moved. The kernel watches the deadline (socket option `option`)."""
        rest = [run for run in runs if len(run)]
        with link_errors("tcp", OSError):
            while rest:
                left = seconds_left(deadline)
                timeval = struct.pack("ll", int(left), max(1000, int(left % 1 * 1e6)))
                self._connection.setsockopt(socket.SOL_SOCKET, option, timeval)
                moved = call(rest[:MAX_RUNS])
                if not moved:
                    raise LinkError("tcp: the other end has closed")
                rest = _after(rest, moved)

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def send(self, data: torch.Tensor) -> Pending:
        return Pending.in_wait(partial(self.write, [memoryview(data.numpy().data)]))

    def recv(self, into: torch.Tensor) -> Pending:
        return Pending.in_wait(partial(self.read, [memoryview(into.numpy().data)]))

    def abort(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        self._connection.close()


def _after(runs: list[memoryview], moved: int) -> list[memoryview]:
    """`runs` without their first `moved` bytes."""
    for index, run in enumerate(runs):
        if moved < len(run):
            return [run[moved:], *runs[index + 1 :]]
        moved -= len(run)
    return []


def _socket(host: str, port: int) -> tuple[socket.socket, Any]:
    """A socket for connections to or from this address, and the address in the form that the socket takes."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    # Before the connection is made, because both ends then agree on the scale of the TCP window.
    for option, limit in _LIMITS.items():
        path = Path("/proc/sys/net/core", limit)
        if path.exists() and int(path.read_text()) >= SOCKET_BUFFER_BYTES:
            made.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    return made, address


def _connect(rendezvous: Rendezvous, timeout: float) -> socket.socket:
    host, _, port = rendezvous.get("address").decode().rpartition(":")
    connection, address = _socket(host, int(port))
    try:
        connection.settimeout(timeout)
        connection.connect(address)
        connection.sendall(rendezvous.get("token"))
        rendezvous.set("called", b"")
    except BaseException:
        connection.close()
        raise
    return connection


def _sends_token(connection: socket.socket, token: bytes, deadline: float) -> bool:
    """Whether the caller sends the token: anybody can reach the port, but only the sender of this link knows it."""
    received = b""
    with suppress(OSError):
        while len(received) < len(token):
            connection.settimeout(min(seconds_left(deadline), 1.0))
            part = connection.recv(len(token) - len(received))
            if not part:
                break
            received += part
    return secrets.compare_digest(received, token)
