"""Clients that load a router and cost little themselves: they frame and parse just what a stream of tokens needs.

A client of grpc.aio or an HTTP library costs as much per message as the router, so that one machine could not load it.
These two are written on sockets; what they leave out (compression, flow control by the client, other frames than those
that a router sends here) makes them useless for anything else. Each checks that every stream has all of its tokens.
"""

import asyncio
import itertools
import json
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from kvrelay.v1.inference_pb2 import GenerateRequest, GenerateResponse, SamplingParams, TokenIds
from support.hostile import GENERATE, PREFACE, call_fields, frame

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
LARGEST_WINDOW = 2**31 - 1
REQUEST_HEADERS = call_fields(GENERATE)
TEXT, LAST = b'"text":"', b"data: [DONE]\n\n"

PromptOf = Callable[[int], list[int]]


@dataclass(slots=True)
class Course:
    """The requests of all streams: how long each is, and when its tokens came."""

    streams: int
    tokens: int
    """Tokens that each request generates."""
    prompt_of: PromptOf
    end: float
    """Monotonic time from which on no request begins."""
    received: dict[int, list[float]] = field(default_factory=dict)
    """Times at which each token was received, by the number in the request's prompt."""
    messages: int = 0
    count: int = 0
    """Tokens received."""
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def length(self, place: int, *, first: bool) -> int:
        """Tokens of a stream's next request. The first ones differ: requests of many clients don't end together."""
        return self.tokens // 2 + place * self.tokens // (2 * self.streams) if first else self.tokens

    def begin(self) -> int:
        """The number of a new request."""
        number = next(self._numbers)
        self.received[number] = []
        return number

    def take(self, number: int, tokens: int) -> None:
        """A message with so many tokens has come."""
        self.messages += 1
        self.count += tokens
        self.received[number] += [time.monotonic()] * tokens


class GrpcConnection(asyncio.Protocol):
    """Several streams on one HTTP/2 connection, each with one request after the other."""

    def __init__(self, course: Course, places: list[int]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._course = course
        self._waiting = places
        self._streams: dict[int, tuple[int, int, int, bytearray]] = {}
        """Requests in progress by HTTP/2 stream: place, number and length, and the bytes of an unfinished message."""
        self._ids = itertools.count(1, 2)
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(transport)
        self._transport = transport
        transport.write(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, LARGEST_WINDOW)))
        transport.write(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", LARGEST_WINDOW - 65535)))
        for place in self._waiting:
            self._begin(place, first=True)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the router closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= 9:
            length = int.from_bytes(self._buffer[at : at + 3], "big")
            if len(self._buffer) - at < 9 + length:
                break
            kind, flags = self._buffer[at + 3], self._buffer[at + 4]
            stream = int.from_bytes(self._buffer[at + 5 : at + 9], "big")
            payload = bytes(self._buffer[at + 9 : at + 9 + length])
            at += 9 + length
            self._on_frame(kind, flags, stream, payload)
        del self._buffer[:at]

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            _, number, _, buffer = self._streams[stream]
            buffer += payload
            while len(buffer) >= 5 and len(buffer) >= 5 + (size := int.from_bytes(buffer[1:5], "big")):
                message = GenerateResponse.FromString(bytes(buffer[5 : 5 + size]))
                del buffer[: 5 + size]
                self._course.take(number, len(message.token_ids))
        elif kind in (SETTINGS, PING) and not flags & ACK:
            self._transport.write(frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind in (RESET, GOAWAY):
            self._fail(f"frame {kind} of stream {stream}: {payload!r}")
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            place, number, length, _ = self._streams.pop(stream)
            if len(self._course.received[number]) != length:
                self._fail(f"request {number} has {len(self._course.received[number])} tokens of {length}")
            elif time.monotonic() < self._course.end:
                self._begin(place)
            elif not self._streams:
                self.done.set_result(None)

    def _begin(self, place: int, *, first: bool = False) -> None:
        number, length, stream = self._course.begin(), self._course.length(place, first=first), next(self._ids)
        self._streams[stream] = place, number, length, bytearray()
        sampling = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(token_ids=TokenIds(ids=self._course.prompt_of(number)), sampling=sampling)
        body = request.SerializeToString()
        message = b"\x00" + len(body).to_bytes(4, "big") + body
        self._transport.write(
            frame(HEADERS, END_HEADERS, stream, REQUEST_HEADERS) + frame(DATA, END_STREAM, stream, message)
        )

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(why))


class HttpConnection(asyncio.Protocol):
    """One stream of `/v1/completions`, with one request after the other."""

    def __init__(self, course: Course, place: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._course = course
        self._place = place
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(transport)
        self._transport = transport
        self._begin(first=True)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError(f"the router closed the connection after {self._rest!r}"))

    def data_received(self, data: bytes) -> None:
        """A token's text is one letter, so the length of an event's text is the number of its tokens."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            at = event.find(TEXT)
            if at >= 0:
                self._course.take(self._number, event.index(b'"', at + len(TEXT)) - at - len(TEXT))
        if not (events and events[-1].endswith(LAST[:-2])):
            return
        got = len(self._course.received[self._number])
        if got != self._length:
            self.done.set_exception(RuntimeError(f"request {self._number} has {got} tokens of {self._length}"))
        elif time.monotonic() < self._course.end:
            self._rest = b""
            self._begin()
        else:
            self.done.set_result(None)

    def _begin(self, *, first: bool = False) -> None:
        self._number, self._length = self._course.begin(), self._course.length(self._place, first=first)
        fields = {"prompt": self._course.prompt_of(self._number), "max_tokens": self._length, "temperature": 0}
        body = json.dumps(fields | {"ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Length: {len(body)}\r\n"
        self._transport.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)


async def crowd(face: str, address: str, course: Course, connections: int) -> None:
    """Runs all streams to their ends.

    Args:
        face: `grpc`, whose streams share connections, or `http`.
        connections: of gRPC.

    Raises:
        RuntimeError, OSError: a stream did not get all of its tokens.
    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    places = range(course.streams)
    made: list[GrpcConnection | HttpConnection] = []
    if face == "grpc":
        made += [GrpcConnection(course, list(places[part::connections])) for part in range(connections)]
    else:
        made += [HttpConnection(course, place) for place in places]
    opened = [await loop.create_connection(lambda each=each: each, host, int(port)) for each in made]
    try:
        await asyncio.gather(*(each.done for each in made))
    finally:
        for transport, _ in opened:
            transport.abort()
