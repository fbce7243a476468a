"""Accepts the connections of the HTTP API, each of which has its place among the router's connections."""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from kvrelay.router.doors.connections import Connection, Connections, Peer, peer_of
from kvrelay.router.faces.http.errors import error_json

logger = logging.getLogger(__name__)

BACKLOG = 1024
AT_ONCE = 64
"""Connections that are accepted in one turn of the event loop."""
RETRY_SECONDS = 0.1
"""After which a listener tries again, if there was no descriptor for a connection."""
READ_BYTES = 16 * 1024
"""Read from a connection at once."""
_TLS_SYSTEM_BYTES = 32 * 1024
"""Asked from the system as the receive buffer of each connection with TLS: the event loop reads all of it at once,
and holds it twice, before anybody can say that it is too much. Linux doubles it, so a body comes with 64 KiB in each
round trip."""
_BUFFER = bytearray(READ_BYTES)
"""For the bytes of any connection, from a read to the call of `buffer_updated` that follows at once."""
_VIEW = memoryview(_BUFFER)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """Listens on one port."""

    def __init__(
        self, make: Callable[[], asyncio.Protocol], connections: Connections, tls: ssl.SSLContext | None, seconds: float
    ) -> None:
        """
        Args:
            make: the protocol of a connection.
            seconds: time for the handshake of TLS.
        """
        self._make = make
        self._connections = connections
        self._tls = tls
        self._seconds = seconds
        self._sockets: list[socket.socket] = []
        self._handshakes: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int, *, share_port: bool) -> int:
        """Binds each address of `host` and listens; returns the port.

        Args:
            share_port: whether other processes listen on the same port.

        Raises:
            OSError: it can't be bound.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            own = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._sockets.append(own)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self._tls is not None:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _TLS_SYSTEM_BYTES)
            if share_port:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            own.bind(address)
            own.listen(BACKLOG)
        for own in self._sockets:
            loop.add_reader(own.fileno(), self._accept, own)
        return int(self._sockets[0].getsockname()[1])

    def close(self) -> None:
        """Takes no new connections."""
        loop = asyncio.get_running_loop()
        for own in self._sockets:
            loop.remove_reader(own.fileno())
            own.close()
        self._sockets.clear()
        for task in self._handshakes:
            task.cancel()

    def _accept(self, own: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, address = own.accept()
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    self._connections.make_room()
                    self._pause(own)
                elif error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK, errno.ECONNABORTED, errno.EINTR):
                    logger.exception("accepting a connection failed")
                    self._pause(own)
                return
            accepted.setblocking(False)
            peer = peer_of(*address[:2])
            connection = self._connections.add(peer, partial(_shut, accepted))
            if connection is None:
                self._refuse(accepted)
                continue
            task = asyncio.get_running_loop().create_task(self._open(accepted, peer, connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    def _pause(self, own: socket.socket) -> None:
        """Stops listening for a while: the event loop would call again at once."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(own.fileno())

        def go_on() -> None:
            if own.fileno() >= 0:
                loop.add_reader(own.fileno(), self._accept, own)

        loop.call_later(RETRY_SECONDS, go_on)

    async def _open(self, accepted: socket.socket, peer: Peer, connection: Connection) -> None:
        def make() -> asyncio.BaseProtocol:
            return Observed(self._make(), connection, lambda: self._connections.remove(peer, connection))

        loop = asyncio.get_running_loop()
        try:
            if self._tls is None:
                await loop.connect_accepted_socket(make, accepted)
            else:
                seconds = self._seconds
                await loop.connect_accepted_socket(make, accepted, ssl=self._tls, ssl_handshake_timeout=seconds)
        except BaseException as error:
            self._connections.remove(peer, connection)
            accepted.close()
            # Its client has gone, or its handshake failed or took too long.
            if not isinstance(error, (OSError, asyncio.CancelledError)):
                raise

    def _refuse(self, accepted: socket.socket) -> None:
        """Closes a connection, with an answer if it is a short way to one."""
        with suppress(OSError):
            if self._tls is None:
                accepted.send(_REFUSAL)
                accepted.shutdown(socket.SHUT_WR)
                # With unread bytes, the connection would be reset before its client has read the answer.
                accepted.recv(65536)
        accepted.close()


class Observed(asyncio.BufferedProtocol):
    """A protocol, and a connection that learns when bytes come and when it ends.

    Bytes are read in small parts: the event loop would read 256 KiB at once, whether anybody wants them or not.
    """

    def __init__(self, inner: asyncio.Protocol, connection: Connection, lost: Callable[[], object]) -> None:
        self._inner = inner
        self._connection = connection
        self._lost = lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Both event loops' transports of TLS have this method, and a default of 256 KiB.
        if limit := getattr(transport, "set_read_buffer_limits", None):
            limit(high=READ_BYTES)
        self._inner.connection_made(transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.received()
        self._inner.data_received(bytes(_VIEW[:nbytes]))

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()
        self._inner.connection_lost(error)


def _shut(accepted: socket.socket) -> None:
    """Ends a connection in any state: the event loop takes it for its client's end."""
    if accepted.fileno() >= 0:
        with suppress(OSError):
            accepted.shutdown(socket.SHUT_RDWR)


def _made_refusal() -> bytes:
    text = "router.max_connections_per_address connections of this address are busy, or no descriptor is left"
    body = error_json(429, text)
    head = (
        "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


_REFUSAL = _made_refusal()
