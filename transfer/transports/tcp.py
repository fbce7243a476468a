"""Links over plain TCP sockets that carry host memory in place, on the thread that calls.

One thread hashes a piece and sends it, or receives it and hashes it, while the piece is in its core's cache; no other
thread is woken in between. `abort` ends a blocked call at once. `benchmarks/NOTES.md` has the measurements.

    receiver    listens, publishes its address       -- rendezvous -->    sender
                accepts whoever knows the link's key <--  connect  --     proves that it knows the key

`transfer.encrypt: full` then starts TLS 1.3 on the connection, with the workers' certificates.
"""

import math
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cryptography import x509

from kvrelay.rpc.certificates import CertificateFiles, KeyPair, dns_name, parts_of
from kvrelay.transfer.config import Encrypt
from kvrelay.transfer.protocol.ports import SENDER
from kvrelay.transfer.transports.base import (
    ByteStream,
    Link,
    LinkError,
    Pending,
    Rendezvous,
    host_buffer,
    link_errors,
    seconds_left,
)
from kvrelay.transfer.transports.link_key import BACKLOG, LinkKey


def secure(connection: socket.socket, pair: KeyPair, rank: int, deadline: float) -> ssl.SSLSocket:
    """`connection` under TLS; each end has shown the certificate of a worker.

    Args:
        pair: this worker's.
        rank: the sender is the client.

    Raises:
        LinkError: the other end is no worker of the cluster.
        OSError: the connection failed, or the deadline (monotonic) has passed.
    """
    client = rank == SENDER
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if client else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=(pair.ca or b"").decode())
    if not client:
        context.num_tickets = 0  # a link is never resumed
    _load(context, pair)
    connection.settimeout(seconds_left(deadline))
    secured = context.wrap_socket(
        connection, server_side=not client, server_hostname=dns_name("worker") if client else None
    )
    shown = secured.getpeercert(binary_form=True)
    if shown is None or "worker" not in parts_of(x509.load_der_x509_certificate(shown)):
        secured.close()
        raise LinkError(f"the other end shows no certificate of {dns_name('worker')}")
    return secured


def _load(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Gives the key pair to the context, which reads files only: the ones on disk may change in between."""
    descriptor = os.memfd_create("kvrelay", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, pair.key + b"\n" + pair.certificate)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


SOCKET_BUFFER_BYTES = 4 * 2**20
"""Size of a socket's buffers in bytes, requested if the system allows as much; otherwise the kernel sizes them
itself."""
MAX_RUNS = 256
"""Largest number of memory runs in one system call; Linux allows 1024."""
_LIMITS = {socket.SO_SNDBUF: "wmem_max", socket.SO_RCVBUF: "rmem_max"}


class TcpTransport:
    """Opens TCP links."""

    name = "tcp"
    scope = ""

    def __init__(
        self,
        host: str,
        encrypt: Encrypt = "none",
        certificates: CertificateFiles | None = None,
        pinned: bool = False,
    ) -> None:
        """Receiving ends listen on `host` while a link is being opened, on a port that the system chooses.

        `certificates` are this worker's, for `full`. `pinned` if the KV pool is on a GPU.

        Raises:
            OSError: it can't be bound.
        """
        self._host = host
        self._encrypt = encrypt
        self._certificates = certificates
        self._pinned = pinned
        self._listener().close()

    def _listener(self) -> socket.socket:
        listener, address = _socket(self._host, 0)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise OSError(f"host {self._host}: TCP links can't be accepted on it: {error}") from error
        return listener

    def connect(self, rendezvous: Rendezvous, rank: int, timeout: float) -> Link:
        """See `Transport.connect`."""
        deadline = time.monotonic() + timeout
        with link_errors(self.name, OSError, RuntimeError, ValueError):
            key = LinkKey.agree(rendezvous, rank)
            call = self._call if rank == SENDER else self._accept
            connection = call(rendezvous, key, deadline)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._encrypt == "full":
                    if self._certificates is None:
                        raise LinkError("tcp: transfer.encrypt is full, and there are no certificates")
                    secured = secure(connection, self._certificates.current(), rank, deadline)
                    return TlsLink(secured, self._pinned)
            except BaseException:
                connection.close()
                raise
            mac_key = key.derive(b"frames") if self._encrypt == "integrity" else None
            return TcpLink(connection, mac_key, self._pinned)

    def _accept(self, rendezvous: Rendezvous, key: LinkKey, deadline: float) -> socket.socket:
        with self._listener() as listener:
            rendezvous.set("address", f"{self._host}:{listener.getsockname()[1]}")
            return key.admit(listener, deadline, lambda: rendezvous.check([]))

    def _call(self, rendezvous: Rendezvous, key: LinkKey, deadline: float) -> socket.socket:
        host, _, port = rendezvous.get("address").decode().rpartition(":")
        connection, address = _socket(host, int(port))
        try:
            connection.settimeout(seconds_left(deadline))
            connection.connect(address)
            key.introduce(connection, deadline)
            connection.setblocking(True)
        except BaseException:
            connection.close()
            raise
        return connection


class TcpLink:
    """One end of a TCP link."""

    def __init__(self, connection: socket.socket, mac_key: bytes | None, pinned: bool = False) -> None:
        """`connection` is in blocking mode."""
        self._connection = connection
        self._pinned = pinned
        self.mac_key = mac_key

    lender = None

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
        return host_buffer(nbytes, self._pinned)

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


class TlsLink(TcpLink):
    """One end of a TCP link under TLS, whose records are encrypted and authenticated."""

    _connection: ssl.SSLSocket

    def __init__(self, connection: ssl.SSLSocket, pinned: bool = False) -> None:
        super().__init__(connection, None, pinned)

    def write(self, runs: Sequence[memoryview], deadline: float) -> None:
        self._each(self._connection.send, runs, deadline)

    def read(self, runs: Sequence[memoryview], deadline: float) -> None:
        self._each(self._connection.recv_into, runs, deadline)

    def _each(self, call: Callable[[memoryview], int], runs: Sequence[memoryview], deadline: float) -> None:
        """Repeats `call`, which moves at most one record, until all of `runs` has moved."""
        allowed = math.inf
        with link_errors("tcp", OSError):
            for run in runs:
                while len(run):
                    # Setting it is a system call, too much for each record.
                    if (left := seconds_left(deadline)) < 0.9 * allowed:
                        self._connection.settimeout(left)
                        allowed = left
                    moved = call(run)
                    if not moved:
                        raise LinkError("tcp: the other end has closed")
                    run = run[moved:]

    def abort(self) -> None:
        # Not SSLSocket.shutdown, which takes the TLS state away from the thread that uses it.
        with suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)


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
