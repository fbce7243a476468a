"""Clients of a router that begin what they don't finish, with every byte under a test's control."""

import asyncio
import ssl
from collections.abc import Sequence

STALL_SECONDS = 1.0
"""Seconds without a window to send in; then the server takes no more."""
CHUNK_BYTES = 16384
MESSAGE_BYTES = 4 * 2**20
GENERATE, CHECK = "/kvrelay.v1.InferenceService/Generate", "/grpc.health.v1.Health/Check"
BODY_BYTES = 200_000
HALF_A_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: router\r\n"
    b"Content-Type: application/json\r\nContent-Length: 4000000\r\n\r\n"
)
_FIRST_WINDOW = 65535
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_HEADERS = 1
_END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def hello(options: bytes = b"") -> bytes:
    """The first bytes that a client of HTTP/2 sends, with these settings."""
    return PREFACE + frame(_SETTINGS, 0, 0, options)


def client_tls(authority: str, protocol: str) -> ssl.SSLContext:
    """A client's side of TLS that takes any name of the server."""
    context = ssl.create_default_context(cafile=authority)
    context.check_hostname = False
    context.set_alpn_protocols([protocol])
    return context


class PartialCall:
    """A gRPC call, on a connection of its own, whose message never comes whole, or whose answer is never read."""

    def __init__(
        self,
        address: str,
        path: str,
        size: int,
        tls: ssl.SSLContext | None = None,
        source: str = "127.0.0.1",
        fields: Sequence[tuple[str, str]] = (),
        message: bytes | None = None,
    ) -> None:
        """
        Args:
            size: bytes of the message, all but the last of which are sent.
            message: all of it, if it is sent whole; the client has no window for the answer then.
            source: the client's address.
            fields: further headers.
        """
        self._more = fields
        self._source = source
        self._address = address
        self._path = path
        self._size = size
        self._message = message
        self._tls = tls
        self._windows = [_FIRST_WINDOW, _FIRST_WINDOW]
        """Bytes that may still be sent, on the connection and on the call's stream."""
        self._initial = _FIRST_WINDOW
        self._changed = asyncio.Event()
        self.closed = asyncio.Event()
        """Event that is set once the server has closed the connection."""

    async def __aenter__(self) -> "PartialCall":
        host, _, port = self._address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(
            host, int(port), ssl=self._tls, local_addr=(self._source, 0)
        )
        options = b"" if self._message is None else _INITIAL_WINDOW_SIZE.to_bytes(2, "big") + bytes(4)
        self._writer.write(hello(options) + frame(_HEADERS, _END_HEADERS, 1, call_fields(self._path, self._more)))
        self._send(b"\x00" + self._size.to_bytes(4, "big"))
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.transport.abort()

    async def push(self) -> int:
        """Sends as much as the server takes; returns the number of bytes."""
        sent, size = 0, self._size - (self._message is None)
        while sent < size and not self.closed.is_set():
            room = min(CHUNK_BYTES, size - sent, *self._windows)
            if room > 0:
                self._send(bytes(room) if self._message is None else self._message[sent : sent + room])
                sent += room
                try:
                    await self._writer.drain()
                except ConnectionError:
                    break
                continue
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), STALL_SECONDS)
            except TimeoutError:
                break
        return sent

    def _send(self, data: bytes) -> None:
        self._windows = [window - len(data) for window in self._windows]
        self._writer.write(frame(_DATA, 0, 1, data))

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(head[3], head[4], int.from_bytes(head[5:9], "big"), payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
            self._changed.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(payload), 6):
                if int.from_bytes(payload[at : at + 2], "big") == _INITIAL_WINDOW_SIZE:
                    size = int.from_bytes(payload[at + 2 : at + 6], "big")
                    self._windows[1] += size - self._initial
                    self._initial = size
            self._writer.write(frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._writer.write(frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            self._windows[bool(stream)] += int.from_bytes(payload, "big")
        self._changed.set()


def call_fields(path: str, more: Sequence[tuple[str, str]] = ()) -> bytes:
    """The headers of a call, without compression."""

    def text(value: str) -> bytes:
        return bytes([len(value)]) + value.encode()

    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "router"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
    return b"".join(b"\x00" + text(name) + text(value) for name, value in (*fields, *more))


async def half_a_call(address: str, method: str, tls: ssl.SSLContext | None, source: str = "127.0.0.1") -> None:
    """Sends all but the last byte of a message of MESSAGE_BYTES, as far as the router takes it, and waits until the
    router has closed the connection."""
    async with PartialCall(address, method, MESSAGE_BYTES, tls, source) as call:
        await call.push()
        await call.closed.wait()


async def half_a_body(address: str, tls: ssl.SSLContext | None, source: str = "127.0.0.1") -> None:
    """Sends the first BODY_BYTES of a longer body, and waits until the router has closed the connection."""
    await left_open(address, HALF_A_BODY + bytes(BODY_BYTES), tls, source)


async def left_open(address: str, data: bytes, tls: ssl.SSLContext | None, source: str = "127.0.0.1") -> None:
    """Connects, sends the data, and waits until the router has closed the connection."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls, local_addr=(source, 0))
    try:
        writer.write(data)
        while await reader.read(65536):
            pass
    finally:
        writer.transport.abort()
