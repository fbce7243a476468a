"""The common parts of all handlers of an exchange: the caller, the request's form, and server-sent events."""

import asyncio
from typing import cast

from aiohttp import HttpVersion11, web

from kvrelay.router.addresses import FORWARDED_FOR, Addresses
from kvrelay.router.entry.callers import Identity
from kvrelay.router.entry.front import Caller
from kvrelay.router.errors import InvalidRequest
from kvrelay.router.faces.writer import Writer
from kvrelay.rpc.tracing import HEADER, STATE_HEADER, TraceContext

JSON = "application/json"
ADDRESSES = web.AppKey("addresses", Addresses)
"""Tells the clients of an application's requests."""
GONE = (ConnectionError,)
BEHIND_BYTES = 32 * 1024
"""Not yet taken by the system from which on a stream's writes wait for its client."""
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class Events:
    """A stream of server-sent events, which begins with its first write."""

    def __init__(self, request: web.Request, limit: float) -> None:
        """
        Args:
            limit: seconds that one write may take.
        """
        self._request = request
        self._response: web.StreamResponse | None = None
        writer: Writer[bytes] = Writer(self._send, limit, GONE)
        self.write, self.close = writer.write, writer.close

    @property
    def begun(self) -> bool:
        return self._response is not None

    @property
    def ready(self) -> bool:
        """Whether `write_now` can write: the stream has begun, and its client keeps up."""
        transport = self._request.transport
        if transport is None or transport.is_closing() or self._response is None or not self._response.chunked:
            return False
        return transport.get_write_buffer_size() < BEHIND_BYTES

    def write_now(self, events: bytes) -> None:
        """Writes without waiting; while `ready`. `StreamResponse.write`, which may wait, takes twice the time."""
        # uvloop's transports have this method too, though they are no WriteTransport.
        transport = cast(asyncio.WriteTransport, self._request.transport)
        transport.write(b"%x\r\n%b\r\n" % (len(events), events))

    async def end(self, events: bytes) -> web.StreamResponse:
        """Writes the last events."""
        await self.write(events)
        response = self._response
        if response is None:
            raise RuntimeError("a stream ended before its first event")
        await response.write_eof()
        return response

    async def _send(self, events: bytes) -> None:
        if self._response is None:
            response = web.StreamResponse(headers=HEADERS)
            if self._request.version >= HttpVersion11:
                response.enable_chunked_encoding()
            await response.prepare(self._request)
            self._response = response
        await self._response.write(events)


def caller_of(request: web.Request) -> Caller:
    """The caller that sent a request."""
    transport = request.transport
    shown = transport.get_extra_info("peercert") if transport is not None else None
    names = [value for part in (shown or {}).get("subject", ()) for key, value in part if key == "commonName"]
    identity = Identity(request.headers.getall("Authorization", []), names)
    context = TraceContext.read(request.headers.get(HEADER), request.headers.get(STATE_HEADER))
    host = request.app[ADDRESSES].client(request.remote or "", request.headers.getall(FORWARDED_FOR, []))
    return Caller(identity, host, context)


def check_type(request: web.Request) -> None:
    """Also keeps a foreign web page from calling: a browser asks before it sends JSON to another site.

    Raises:
        InvalidRequest: the body is announced as something else than plain JSON.
    """
    if request.content_type != JSON:
        raise InvalidRequest("header Content-Type", request.content_type, JSON)
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise InvalidRequest("header Content-Encoding", encoding, "identity")
