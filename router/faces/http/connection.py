"""Connections of the HTTP API: how they are accepted, what aiohttp answers by itself, and the end of a client's side.

A client may send its request and end its side of the connection, as `nc -N` does; it gets its answer. TCP doesn't tell
this from a client that has closed the connection, whose request ends at once. So an unasked `100 Continue`, which
every client of HTTP/1.1 skips, is sent, or an empty comment in a stream of events that has begun: the system of a
client that is gone answers it by a reset, and this looks for that until the request has ended.

A connection that ends with an error goes on reading for a while: with unread bytes, the system would reset it, and the
client might never read the answer.
"""

import asyncio
import errno
import logging
import socket
import ssl
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import InvalidHeader, InvalidURLError, LineTooLong, TransferEncodingError

from kvrelay.router.doors.connections import Connection, Connections, Peer, peer_of
from kvrelay.router.faces.http.errors import error_json

logger = logging.getLogger(__name__)

JSON = "application/json"
LOOK_SECONDS = 0.05
"""Seconds between two looks at whether the client of a half-closed connection is still there."""
LINGER_SECONDS = 2.0
LINGER_BYTES = 64 * 2**20
"""Time and bytes that a client may go on sending after an answer that ends its connection."""
BEGUN = web.RequestKey("begun", web.StreamResponse)
"""The answer to a request, when it begins."""
REQUEST_ID = "X-Request-Id"
HEADERS = (
    *("Accept", "Authorization", "Content-Encoding", "Content-Type", "Expect", "Origin", "traceparent", "tracestate"),
    *("Access-Control-Request-Headers", "Access-Control-Request-Method", "X-Forwarded-For"),
    *(REQUEST_ID, "X-Request-Timeout", "X-Session-Id"),
)
"""Headers that the router reads. Others may have any bytes."""
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b":\n\n"
"""Comment of server-sent events, which clients ignore."""
_TCP_CLOSED = 7
_MALFORMED: dict[type[Exception], str] = {
    InvalidHeader: "a header is malformed",
    InvalidURLError: "the URL is malformed",
    LineTooLong: "the request line or a header is too long",
    TransferEncodingError: "the transfer encoding is malformed",
}


class HttpConnection(web.RequestHandler):
    """A connection to the HTTP face, as the module describes it."""

    __slots__ = ("_half_closed", "_lingered", "_probed", "_refused")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._half_closed = self._probed = False
        self._refused: asyncio.Future[None] | None = None
        """Once the last answer is an error: done when the client has ended its side, or has sent LINGER_BYTES more."""
        self._lingered = 0

    def data_received(self, data: bytes) -> None:
        if self._refused is None:
            super().data_received(data)
            return
        self._lingered += len(data)
        if self._lingered > LINGER_BYTES:
            self._stop_lingering()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_lingering()
        super().connection_lost(exc)

    async def linger(self) -> None:
        """Ends this side of the connection and skips what the client still sends, within the limits."""
        if self.transport is None or self._refused is None or self._half_closed:
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await self._refused

    def _stop_lingering(self) -> None:
        if self._refused is not None and not self._refused.done():
            self._refused.set_result(None)

    def eof_received(self) -> bool | None:  # type: ignore[override]  # aiohttp always closes
        """Keeps the connection for the answers to what was sent. TLS has no half-closed connections in asyncio."""
        if self._refused is not None:
            self._stop_lingering()
            return True
        if self._half_closed:
            return True  # uvloop reads the end again whenever reading is resumed
        if self._idle or self.transport is None or self.transport.get_extra_info("sslcontext"):
            return None
        self._half_closed = True
        self._look()
        return True

    @property
    def _idle(self) -> bool:
        """Whether the connection waits for its next request."""
        return self._waiter is not None and not self._waiter.done() and not self._messages

    def _look(self) -> None:
        """Looks at the client and the request of a half-closed connection, until that has ended."""
        transport, request = self.transport, self._current_request
        if transport is None:
            return
        if self._idle:
            self.force_close()
            return
        if _reset(transport):
            transport.abort()
            return
        for payload in (*(payload for _, payload in self._messages), *(() if request is None else (request.content,))):
            if not payload.is_eof():
                payload.set_exception(web.RequestPayloadError("the body ended early"))
        if isinstance(request, web.Request) and not self._probed and (probe := _probe(request)):
            self._probed = True
            transport.write(probe)
        self._loop.call_later(LOOK_SECONDS, self._look)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no HTTP, or to a request that a defect met; the connection ends with it.

        Raises:
            ConnectionError: an answer has begun.
        """
        text = "a defect in the router"
        if status < 500:
            text = next((text for kind, text in _MALFORMED.items() if isinstance(exc, kind)), "this is not valid HTTP")
        else:
            logger.error("a request failed because of a defect", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")
        response = _refusal(status, text, kind=partial(_LastAnswer, self))
        response.force_close()
        if self._refused is None:
            self._refused = self._loop.create_future()
        return response


class _LastAnswer(web.Response):
    """The answer that ends a connection."""

    def __init__(self, connection: HttpConnection, **options: Any) -> None:
        super().__init__(**options)
        self._connection = connection

    async def write_eof(self, data: bytes = b"") -> None:
        await super().write_eof(data)
        await self._connection.linger()


class HttpRunner(web.AppRunner):
    """Runs an application whose connections are each an `HttpConnection`."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            for name in HEADERS:
                if not all(map(str.isascii, request.headers.getall(name, ()))):
                    field = f"header {name}"
                    return _refusal(400, f"{field} has characters that are not ASCII", field)
            try:
                return await made.request_handler(request)
            except web.HTTPException as error:
                # Raised outside of the application's own handlers, as for an `Expect` that can't be met.
                return _refusal(error.status, error.reason)

        return _Server(
            handle,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=asyncio.get_running_loop(),
            **made._kwargs,  # noqa: SLF001  # aiohttp has no public way to them
        )


class _Server(web.Server):
    def __call__(self) -> HttpConnection:
        return HttpConnection(self, loop=self._loop, **self._kwargs)


def _refusal(
    status: int, text: str, field: str | None = None, kind: Callable[..., web.Response] = web.Response
) -> web.Response:
    named = {REQUEST_ID: uuid.uuid4().hex}
    return kind(body=error_json(status, text, param=field), status=status, headers=named, content_type=JSON)


def _probe(request: web.Request) -> bytes:
    """The bytes that can be sent now to test whether the client is there; empty if none can."""
    answer = request.get(BEGUN)
    if answer is None:
        return INTERIM if request.version >= HttpVersion11 else b""
    if answer.content_type != "text/event-stream" or not request.writer.output_size:
        return b""
    return b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT) if answer.chunked else COMMENT


def _reset(transport: asyncio.Transport) -> bool:
    """Whether the other end has reset the connection; where the system doesn't tell, the next write does."""
    own = transport.get_extra_info("socket")
    if own is None or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        state: int = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return True
    return state == _TCP_CLOSED


BACKLOG = 1024
AT_ONCE = 64
"""Connections that are accepted in one turn of the event loop."""
RETRY_SECONDS = 0.1
"""Seconds after which a listener tries again, if there was no descriptor for a connection."""
READ_BYTES = 16 * 1024
"""Read from a connection at once."""
_TLS_SYSTEM_BYTES = 32 * 1024
"""Asked from the system as the receive buffer of each connection with TLS: the event loop reads all of it at once,
and holds it twice, before anybody can say that it is too much. Linux doubles it, so a body comes with 64 KiB in each
round trip."""
_BUFFER = bytearray(READ_BYTES)
"""Buffer for the bytes of any connection, from a read to the call of `buffer_updated` that follows at once."""
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
            # The client has gone, or the handshake failed or took too long.
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
