"""A network whose faults a test controls: TCP proxies on loopback between a prefill worker and its decode workers.

    prefill-0 --- bulk link (tcp or gloo) ---> Proxy of (prefill-0, decode-0) ---> decode-0

A worker of `support.detours` asks the desk of this process for the proxy to dial, so all bytes of its links pass here.
The weather of a direction may change at any time, and then applies to bytes under way too.
"""

import asyncio
import json
import math
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

from anyio.from_thread import start_blocking_portal

T = TypeVar("T")
Address = tuple[str, int]

PROXY_HOST = "127.0.0.2"
"""Address of the proxies, between the hosts of decode and prefill workers; `support.detours` explains the order."""
PIECE = 64 * 2**10
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with a timeout of 0: closing sends RST."""


@dataclass(frozen=True, slots=True)
class Weather:
    """Conditions for the bytes of one direction."""

    rate: float = math.inf
    """Bytes per second."""
    passes: Literal["on", "hold", "swallow"] = "on"
    """Treatment of bytes. hold: kept, and delivered in order once the weather clears, as TCP does after an outage.
    swallow: lost."""


CLEAR = Weather()
HELD = Weather(passes="hold")
SWALLOWED = Weather(passes="swallow")


class Way:
    """One direction of one connection."""

    def __init__(self, weather: Weather, count: Callable[[int], None]) -> None:
        self.weather = weather
        self._count = count
        self._changed = asyncio.Event()

    def set(self, weather: Weather) -> None:
        self.weather = weather
        self._changed.set()
        self._changed = asyncio.Event()

    async def carry(self, source: StreamReader, sink: StreamWriter) -> None:
        """Forwards bytes until the source ends; then ends the sink."""
        while data := await source.read(PIECE):
            if self.weather.passes == "hold":
                await self._clear()
            while data and self.weather.passes != "swallow":
                rate = self.weather.rate
                size = len(data) if math.isinf(rate) else max(1, int(rate / 100))
                piece, data = data[:size], data[size:]
                sink.write(piece)
                await sink.drain()
                self._count(len(piece))
                await asyncio.sleep(len(piece) / rate)
        await self._clear()
        sink.write_eof()

    async def _clear(self) -> None:
        while self.weather.passes != "on":
            await self._changed.wait()


class Proxy:
    """Forwards one pair's links: listens in the decode worker's place. Safe to use from any thread."""

    def __init__(self, chaos: "Chaos") -> None:
        self.passed = 0
        """Bytes forwarded to the decode worker so far."""
        self._chaos = chaos
        self._addresses: dict[Address, Address] = {}
        self._weather = CLEAR, CLEAR
        self._connections: dict[tuple[Way, Way], tuple[StreamWriter, StreamWriter]] = {}

    def set(self, forward: Weather | None = None, backward: Weather | None = None, *, now: bool = True) -> None:
        """Changes the weather of connections that are made later, and of those that are open `now`."""
        self._chaos.call(self._set, forward, backward, now)

    def clear(self) -> None:
        """Restores good weather."""
        self.set(CLEAR, CLEAR)

    def reset(self) -> None:
        """Ends every open connection with RST."""
        self._chaos.call(lambda: [abort(*ends) for ends in self._connections.values()])

    def _set(self, forward: Weather | None, backward: Weather | None, now: bool) -> None:
        self._weather = forward or self._weather[0], backward or self._weather[1]
        for ways in self._connections if now else ():
            for way, new in zip(ways, (forward, backward), strict=True):
                if new is not None:
                    way.set(new)

    async def address_for(self, target: Address) -> Address:
        """The address to dial instead of `target`."""
        if target not in self._addresses:
            self._addresses[target] = await self._chaos.serve(lambda *near: self._connect(*near, target))
        return self._addresses[target]

    async def _connect(self, near: StreamReader, near_sink: StreamWriter, target: Address) -> None:
        sock = small_socket()
        try:
            await asyncio.get_running_loop().sock_connect(sock, target)
        except OSError:
            abort(near_sink)
            return
        far, far_sink = await asyncio.open_connection(sock=sock)
        for sink in (near_sink, far_sink):
            sink.transport.set_write_buffer_limits(high=0)
        ways = Way(self._weather[0], self._count), Way(self._weather[1], lambda nbytes: None)
        self._connections[ways] = near_sink, far_sink
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(ways[0].carry(near, far_sink))
                both.create_task(ways[1].carry(far, near_sink))
        except* OSError:
            abort(near_sink, far_sink)
        finally:
            del self._connections[ways]
            near_sink.close()
            far_sink.close()

    def _count(self, nbytes: int) -> None:
        self.passed += nbytes


class Chaos:
    """All proxies of a test, and the desk where workers ask for theirs. They run in a thread of their own."""

    def __init__(self) -> None:
        self.desk = ""
        """Address of the desk that `support.detours` asks, as host:port."""
        self._stack = ExitStack()
        self._proxies: dict[tuple[str, str], Proxy] = defaultdict(lambda: Proxy(self))
        self._names: dict[Address, str] = {}
        self._servers: list[asyncio.Server] = []

    def link(self, prefill: str, decode: str) -> Proxy:
        """The proxy of this pair's links; its weather may be set before anything is dialled."""
        return self.call(lambda: self._proxies[prefill, decode])

    def links(self) -> list[Proxy]:
        """All proxies so far."""
        return self.call(lambda: list(self._proxies.values()))

    def clear(self) -> None:
        """Restores good weather everywhere."""
        for proxy in self.links():
            proxy.clear()

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls `function` in the proxies' thread and returns its result."""
        return self._portal.call(function, *arguments)

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        """A decode worker names its address, or a prefill worker asks where to dial instead of one."""
        with suppress(OSError):
            question = json.loads(await reader.readline())
            address = question["host"], question["port"]
            if question["kind"] == "name":
                self._names[address] = question["worker"]
            else:
                address = await self._proxies[question["worker"], self._names[address]].address_for(address)
            writer.write(json.dumps(address).encode())
            await writer.drain()
        writer.close()

    async def serve(self, handler: Callable[[StreamReader, StreamWriter], Coroutine[Any, Any, None]]) -> Address:
        """Listens on a free port of PROXY_HOST until the end."""
        sock = small_socket()
        sock.bind((PROXY_HOST, 0))
        self._servers.append(await asyncio.start_server(handler, sock=sock))
        address: Address = sock.getsockname()
        return address

    def __enter__(self) -> Self:
        self._portal = self._stack.enter_context(start_blocking_portal())
        self.desk = "{}:{}".format(*self._portal.call(self.serve, self._answer))
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            self.call(server.close)
        self._stack.close()  # cancels what is left


def abort(*sinks: StreamWriter) -> None:
    """Ends connections with RST; one that is closed already stays so."""
    for sink in sinks:
        with suppress(OSError):
            sink.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        sink.transport.abort()


def small_socket() -> socket.socket:
    """A TCP socket with small buffers, so that what a slow way has to carry waits at its sender."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE)
    return sock
