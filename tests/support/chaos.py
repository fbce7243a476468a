"""A network that misbehaves at run time: TCP proxies on loopback, between a prefill worker and its peers.

    prefill-0 --- control stream (gRPC) ---> Proxy ("control", "prefill-0", "decode-0") ---> decode-0
              --- bulk link (gloo) --------> Proxy ("link",    "prefill-0", "decode-0") --->

A worker of `support.detours` asks the `Desk` of this process which way to take, so every byte of both goes through
here. A direction's `Weather` may change at any time; what is under way is then treated by the new one.
"""

import asyncio
import json
import math
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeVar

T = TypeVar("T")
Address = tuple[str, int]
Kind = Literal["control", "link"]

PROXY_HOST = "127.0.0.2"
"""Between the hosts of decode and prefill workers in order, as `support.detours` says why."""
PIECE = 64 * 2**10
CALL_SECONDS = 10.0
RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Weather:
    """What happens to the bytes of one direction."""

    delay: float = 0.0
    """Seconds on the way."""
    rate: float = math.inf
    """Bytes a second."""
    passes: Literal["on", "hold", "swallow"] = "on"
    """hold: kept, and passed on in order when the weather clears, as TCP does across an outage; swallow: gone."""


CLEAR = Weather()
HELD = Weather(passes="hold")
SWALLOWED = Weather(passes="swallow")


class Way:
    """One direction of one connection."""

    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.passed = 0
        self.changed = asyncio.Event()

    def set(self, weather: Weather) -> None:
        self.weather = weather
        self.changed.set()
        self.changed = asyncio.Event()

    async def clears(self) -> None:
        while self.weather.passes != "on":
            await self.changed.wait()


class Connection:
    """A dialler's socket, and the one to the target that it means."""

    def __init__(self, near: socket.socket, far: socket.socket, weather: tuple[Weather, Weather]) -> None:
        self.near = near
        self.far = far
        self.ways = Way(weather[0]), Way(weather[1])

    async def run(self) -> None:
        """Carries bytes both ways until both have ended, or one end resets."""
        forward = asyncio.create_task(self._carry(self.near, self.far, self.ways[0]))
        backward = asyncio.create_task(self._carry(self.far, self.near, self.ways[1]))
        try:
            await asyncio.gather(forward, backward)
        except OSError:
            self.linger_not()
        finally:
            for task in (forward, backward):
                task.cancel()
            await asyncio.gather(forward, backward, return_exceptions=True)
            self.near.close()
            self.far.close()

    def linger_not(self) -> None:
        """Lets it end with RST at both ends."""
        for end in (self.near, self.far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    async def _carry(self, source: socket.socket, sink: socket.socket, way: Way) -> None:
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        writer = asyncio.create_task(self._pass_on(under_way, sink, way))
        try:
            data = b"-"
            while data and not writer.done():
                data = await loop.sock_recv(source, PIECE)
                await under_way.put((loop.time() + way.weather.delay, data))
            await writer
        finally:
            writer.cancel()
            await asyncio.wait([writer])

    async def _pass_on(self, under_way: "asyncio.Queue[tuple[float, bytes]]", sink: socket.socket, way: Way) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(due - loop.time())
            if way.weather.passes == "hold" or not data:
                await way.clears()
            if way.weather.passes == "swallow":
                continue
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            while data:
                rate = way.weather.rate
                most = len(data) if math.isinf(rate) else max(1, int(rate / 100))
                piece, data = data[:most], data[most:]
                await loop.sock_sendall(sink, piece)
                way.passed += len(piece)
                if not math.isinf(rate):
                    await asyncio.sleep(len(piece) / rate)


class Proxy:
    """All traffic of one route: listens where the dialler believes its targets to be. Safe to use from any thread."""

    def __init__(self, chaos: "Chaos") -> None:
        self._chaos = chaos
        self._listeners: dict[Address, socket.socket] = {}
        self._weather = CLEAR, CLEAR
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self.dialled = 0
        """Connections so far."""
        self._passed = [0, 0]

    @property
    def passed(self) -> tuple[int, int]:
        """Bytes passed on so far: from the dialler, and to it."""
        live = list(self._connections)
        return (
            self._passed[0] + sum(connection.ways[0].passed for connection in live),
            self._passed[1] + sum(connection.ways[1].passed for connection in live),
        )

    def set(
        self, forward: Weather | None = None, backward: Weather | None = None, *, now: bool = True, later: bool = True
    ) -> None:
        """Changes the weather of the connections that are open `now`, and of those that will be made `later`."""
        self._chaos.call(self._set, forward, backward, now, later)

    def clear(self) -> None:
        """Good weather from now on."""
        self.set(CLEAR, CLEAR)

    def reset(self) -> None:
        """Ends every open connection with RST."""
        self._chaos.call(self._reset)

    def _set(self, forward: Weather | None, backward: Weather | None, now: bool, later: bool) -> None:
        if later:
            self._weather = forward or self._weather[0], backward or self._weather[1]
        for connection in self._connections if now else ():
            for way, new in zip(connection.ways, (forward, backward), strict=True):
                if new is not None:
                    way.set(new)

    def way_to(self, target: Address) -> Address:
        """Where to dial instead of `target`. On the proxies' thread."""
        if target not in self._listeners:
            self._listeners[target] = sock = listener()
            self._chaos.start(self._serve(sock, target))
        address: Address = self._listeners[target].getsockname()
        return address

    async def _serve(self, sock: socket.socket, target: Address) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(sock)
            near.setblocking(False)
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(near, stream_socket(), self._weather)
            self._connections[connection] = asyncio.create_task(self._carry(connection, target))
            self.dialled += 1

    async def _carry(self, connection: Connection, target: Address) -> None:
        try:
            await asyncio.get_running_loop().sock_connect(connection.far, target)
            await connection.run()
        except OSError:
            connection.near.close()
            connection.far.close()
        finally:
            del self._connections[connection]
            for way, direction in enumerate(connection.ways):
                self._passed[way] += direction.passed

    def _reset(self) -> None:
        for connection, task in self._connections.items():
            connection.linger_not()
            task.cancel()

    def close(self) -> None:
        for sock in self._listeners.values():
            sock.close()


class Route(NamedTuple):
    """Which traffic a proxy carries."""

    kind: Kind
    dialler: str
    """Name of the prefill worker."""
    target: str
    """Name of its peer."""


class Chaos:
    """All proxies of a test, and the desk at which workers ask for theirs. A thread of its own runs them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos")
        self._proxies: dict[Route, Proxy] = {}
        self._names: dict[Address, str] = {}
        self._desk = listener("127.0.0.1")
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def desk(self) -> str:
        """host:port at which `support.detours` asks."""
        host, port = self._desk.getsockname()
        return f"{host}:{port}"

    def proxy(self, kind: Kind, dialler: str, target: str) -> Proxy:
        """The proxy of a route, whose weather may be set before anything is dialled."""
        return self.call(self._proxy, Route(kind, dialler, target))

    def _proxy(self, route: Route) -> Proxy:
        return self._proxies.setdefault(route, Proxy(self))

    def proxies(self, kind: Kind) -> list[Proxy]:
        """All of one kind that there are."""
        return [proxy for route, proxy in list(self._proxies.items()) if route.kind == kind]

    def clear(self) -> None:
        """Good weather everywhere."""
        for proxy in list(self._proxies.values()):
            proxy.clear()

    def call(self, what: Callable[..., T], *arguments: Any) -> T:
        """Runs `what` on the proxies' thread, and returns what it returned."""

        async def run() -> T:
            return what(*arguments)

        return self._await(run())

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_SECONDS)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` until the end of all. On the proxies' thread."""
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _serve_desk(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            asker, _ = await loop.sock_accept(self._desk)
            asker.setblocking(False)
            with asker, suppress(OSError):
                answer = self._answer(json.loads(await loop.sock_recv(asker, PIECE)))
                await loop.sock_sendall(asker, json.dumps(answer).encode())

    def _answer(self, question: dict[str, Any]) -> Address:
        """A worker says what it is called at an address, or asks for the way to one."""
        address: Address = (question["host"], question["port"])
        if question["kind"] == "name":
            self._names[address] = question["worker"]
            return address
        target = question.get("target") or self._names[address]
        return self._proxy(Route(question["kind"], question["worker"], target)).way_to(address)

    def __enter__(self) -> Self:
        self._thread.start()
        self.call(lambda: self.start(self._serve_desk()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._await(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_SECONDS)
        self._loop.close()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for proxy in self._proxies.values():
            proxy.close()
        self._desk.close()


def listener(host: str = PROXY_HOST) -> socket.socket:
    """A listening socket on a free port. Small buffers: what a slow way has to carry must wait at its sender."""
    sock = stream_socket()
    sock.bind((host, 0))
    sock.listen(128)
    return sock


def stream_socket() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE)
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
