"""One connection of the HTTP API: what aiohttp answers by itself, and the end of a client's side.

A client may send its request and end its side of the connection, as `nc -N` does; it gets its answer. TCP doesn't tell
this from a client that has closed the connection, whose request ends at once. So an unasked `100 Continue`, which
every client of HTTP/1.1 skips, is sent, or an empty comment in a stream of events that has begun: the system of a
client that is gone answers it by a reset, and this looks for that until the request has ended.

A connection that ends with an error goes on reading for a while: with unread bytes, the system would reset it, and the
client might never read the answer.
"""

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import InvalidHeader, InvalidURLError, LineTooLong, TransferEncodingError

from kvrelay.router.faces.http.errors import error_json

logger = logging.getLogger(__name__)

JSON = "application/json"
LOOK_SECONDS = 0.05
"""Between two looks at whether the client of a half-closed connection is still there."""
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
"""Of server-sent events."""
_TCP_CLOSED = 7
_MALFORMED: dict[type[Exception], str] = {
    InvalidHeader: "a header is malformed",
    InvalidURLError: "the URL is malformed",
    LineTooLong: "the request line or a header is too long",
    TransferEncodingError: "the transfer encoding is malformed",
}


class HttpConnection(web.RequestHandler):
    """As the module says."""

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
            **made._kwargs,
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
    """What can be sent to a client beside the answer; nothing while there is nothing such."""
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
