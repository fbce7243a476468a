"""Connections that keep a router waiting are closed, others live on, and one address has its limit; HTTP and gRPC."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import grpc
import pytest

from kvrelay.router.addresses import Addresses
from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.connections import Connections, Deadlines
from kvrelay.router.doors.doors import GAP_SECONDS, Doors
from kvrelay.router.records.metrics import RouterMetrics
from support.hostile import PartialCall, client_tls, hello
from support.http_calls import HELLO
from support.processes import free_port
from support.router_fakes import FakeCluster, Http, Job, colocated_of, fake, pair, router_process, until
from support.scenes import Serve
from support.secrets import secrets_in

PATIENCE_SECONDS = 20.0
"""Seconds to wait for what should happen within two seconds."""
SHORT = {"header_timeout_seconds": 0.4, "request_timeout_seconds": 0.4}
CHECK = "/grpc.health.v1.Health/Check"


class Opened:
    """A connection that a test writes to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def ended(self) -> bytes:
        """Bytes that came before the router closed the connection."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    @property
    def open(self) -> bool:
        return not self.reader.at_eof() and self.reader.exception() is None

    async def answer(self) -> bytes:
        """The head of one answer of HTTP, whose body is skipped."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            head = await self.reader.readuntil(b"\r\n\r\n")
            size = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await self.reader.readexactly(int(size.partition(b":")[2]))
            return head


@asynccontextmanager
async def opened(address: str, tls: ssl.SSLContext | None = None, source: str = "127.0.0.1") -> AsyncIterator[Opened]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls, local_addr=(source, 0))
    try:
        yield Opened(reader, writer)
    finally:
        writer.transport.abort()


def addresses(cluster: FakeCluster) -> dict[str, str]:
    assert cluster.router.http_address
    return {"http": cluster.router.http_address, "grpc": cluster.router.address}


def closed(cluster: FakeCluster, face: str, reason: str) -> float:
    return cluster.metric("kvrelay_router_closed_connections_total", face=face, reason=reason)


def connections(cluster: FakeCluster, face: str) -> float:
    """The connections that the router knows."""
    return cluster.metric("kvrelay_router_connections", face=face)


PARTS = {
    "nothing": b"",
    "half a request line": b"GET /health HT",
    "half a header": b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Ty",
    "half a preface": hello()[:10],
    "no settings": hello()[:24],
    "settings alone": hello(),
    "half a frame": hello() + b"\x00\x40\x00\x01",
}


@pytest.mark.parametrize("secured", [False, True], ids=["plaintext", "tls"])
async def test_connections_without_a_whole_request_are_closed(
    serve: Serve, stack: AsyncExitStack, tmp_path: Path, secured: bool
) -> None:
    """Connections in a handshake of TLS are closed too, and those whose one request never comes whole."""
    folder = secrets_in(tmp_path, "mutual").folder / "certificates"
    files = {"tls_certificate": str(folder / "router.crt"), "tls_key": str(folder / "router.key")} if secured else {}

    def tls(protocol: str) -> ssl.SSLContext | None:
        return client_tls(str(folder / "ca.crt"), protocol) if secured else None

    cluster = await serve(*pair(), **SHORT, **files)
    at = addresses(cluster)
    waiting = []
    for face, protocol in (("http", "http/1.1"), ("grpc", "h2")):
        for data in PARTS.values():
            waiting.append(await stack.enter_async_context(opened(at[face], tls(protocol))))
            waiting[-1].send(data)
        if secured:
            for data in (b"", b"\x16\x03\x01\x02\x00\x01"):
                waiting.append(await stack.enter_async_context(opened(at[face])))
                waiting[-1].send(data)
    headers = b"Host: router\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    body = b"POST /v1/completions HTTP/1.1\r\n" + headers
    for text in (body, body.replace(b"POST /v1/completions", b"GET /health"), body.replace(b"/v1/", b"/no/")):
        waiting.append(await stack.enter_async_context(opened(at["http"], tls("http/1.1"))))
        waiting[-1].send(text)
    call = await stack.enter_async_context(PartialCall(at["grpc"], CHECK, 2**20, tls("h2")))
    await call.push()
    await asyncio.gather(*(each.ended() for each in waiting))
    await asyncio.wait_for(call.closed.wait(), PATIENCE_SECONDS)
    await until(lambda: not connections(cluster, "http") + connections(cluster, "grpc"), "nothing is left")


async def test_what_drips_in_is_closed_in_time(serve: Serve) -> None:
    """A byte now and then doesn't move a deadline."""

    async def drip(it: Opened, data: bytes) -> float:
        started = time.monotonic()
        for at in range(len(data)):
            it.send(data[at : at + 1])
            if not it.open:
                break
            await asyncio.sleep(0.1)
        return time.monotonic() - started

    cluster = await serve(*pair(), **SHORT)
    async with opened(addresses(cluster)["http"]) as it:
        assert await drip(it, b"GET /" + b"x" * 200) < 10
    async with opened(addresses(cluster)["http"]) as it:
        it.send(b"GET /health HTTP/1.1\r\nHost: router\r\n\r\n")
        assert b"200 OK" in await it.answer()
        assert await drip(it, b"GET /" + b"x" * 200) < 10
    await until(lambda: closed(cluster, "http", "first") and closed(cluster, "http", "header"), "both counted")


@pytest.mark.more
async def test_connections_that_have_served_a_request_may_idle(serve: Serve) -> None:
    """Longer than a new one may wait, and not for ever."""
    cluster = await serve(*pair(), **SHORT, http_idle_seconds=3.0, grpc_idle_seconds=3.0)
    at = addresses(cluster)
    async with opened(at["http"]) as it, grpc.aio.insecure_channel(at["grpc"]) as channel, opened(at["http"]) as silent:
        it.send(b"GET /health HTTP/1.1\r\nHost: router\r\n\r\n")
        assert b"200 OK" in await it.answer()
        assert await channel.unary_unary(CHECK)(b"", timeout=10)
        await silent.ended()
        await until(lambda: closed(cluster, "http", "first") == 1, "the other was closed")
        # Both have idled longer than a new one may.
        assert it.open
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        it.send(b"GET /health HTTP/1.1\r\nHost: router\r\n\r\n")
        assert b"200 OK" in await it.answer()
        await it.ended()
        await until(lambda: closed(cluster, "http", "idle") == 1, "it was idle")
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert closed(cluster, "grpc", "first") == 0
        # The channel connects again.
        assert await channel.unary_unary(CHECK)(b"", timeout=10)


async def test_requests_that_run_are_not_closed(serve: Serve) -> None:
    """However long they take."""
    going = asyncio.Event()

    async def slowly(job: Job) -> None:
        job.send(job.base, (40,))
        await going.wait()
        await colocated_of()(job)

    cluster = await serve(fake("colocated-0", slowly), **SHORT, http_idle_seconds=0.2, grpc_idle_seconds=0.2)
    over_grpc, over_http = cluster.asking(), asyncio.create_task(cluster.http.post("/v1/completions", HELLO))
    await cluster.job("colocated-0", 1)
    async with opened(addresses(cluster)["http"]) as it, opened(addresses(cluster)["grpc"]) as other:
        # These come later, and go by their deadlines.
        await asyncio.gather(it.ended(), other.ended())
    for face in ("http", "grpc"):
        await until(lambda face=face: connections(cluster, face) == 1, "those that are gone are forgotten")
    going.set()
    await over_grpc
    assert (await over_http)[0] == 200


@pytest.mark.parametrize("face", ["http", "grpc"])
async def test_one_address_has_a_limit_of_connections_from_which_trusted_proxies_are_exempt(
    serve: Serve, stack: AsyncExitStack, face: str
) -> None:
    cluster = await serve(*pair(), max_connections_per_address=4, trusted_proxies=("127.0.0.9/32",))

    async def more(count: int, source: str) -> list[Opened]:
        at = addresses(cluster)[face]
        return [await stack.enter_async_context(opened(at, source=source)) for _ in range(count)]

    async def known(count: int) -> None:
        await until(lambda: connections(cluster, face) == count, f"{count} connections are known")

    many = await more(10, "127.0.0.2")
    tasks = [asyncio.create_task(each.ended()) for each in many]
    await until(lambda: sum(task.done() for task in tasks) == 6, "six of ten are closed")
    assert closed(cluster, face, "address") == 6
    # The oldest gave way: another client of this address is not shut out.
    assert [task.done() for task in tasks] == 6 * [True] + 4 * [False]
    # Other addresses, and proxies, don't notice.
    others = [*await more(3, "127.0.0.3"), *await more(10, "127.0.0.9")]
    await known(4 + len(others))
    assert all(it.open for it in others)
    # A connection that ends makes room for another.
    for it in many:
        it.writer.transport.abort()
    await asyncio.gather(*tasks)
    await known(len(others))
    (again,) = await more(1, "127.0.0.2")
    await known(len(others) + 1)
    assert again.open


def test_connections_with_a_running_request_never_give_way() -> None:
    ended: list[int] = []
    doors = Connections("http", Deadlines(first=10.0), 4, Addresses())
    for port in range(4):
        connection = doors.add(("127.0.0.2", port), partial(ended.append, port))
        assert connection is not None
        connection.begin()
    doors.make_room()
    assert doors.add(("127.0.0.2", 4), None) is None
    assert doors.add(("127.0.0.3", 4), None) is not None
    one = doors.of(("127.0.0.2", 2))
    assert one is not None
    assert not ended
    one.end()
    assert doors.add(("127.0.0.2", 4), None) is not None
    assert ended == [2]


@pytest.mark.parametrize("face", ["http", pytest.param("grpc", marks=pytest.mark.more)])
async def test_a_new_client_is_served_at_the_limit_of_descriptors(
    stack: AsyncExitStack, tmp_path: Path, face: str
) -> None:
    """300 connections that say nothing, or only the beginning, at a limit of 200 descriptors."""
    port = free_port()
    options = {"http_port": port, "spare_descriptors": 32}
    limited = ["prlimit", "--nofile=200:200"]
    address, _ = await stack.enter_async_context(
        router_process(tmp_path, fake("colocated-0"), command=limited, **options)
    )
    at = {"http": f"127.0.0.1:{port}", "grpc": address}
    for number in range(300):
        it = await stack.enter_async_context(opened(at[face], source=f"127.0.0.{number % 3 + 2}"))
        it.send((b"", b"GET /", hello())[number % 3])

    async def over_http() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5)) as session:
            status, answer = await Http(session, at["http"]).post("/v1/completions", HELLO)
            assert status == 200, json.dumps(answer)

    async def over_grpc() -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            await channel.unary_unary(CHECK)(b"", timeout=5)

    for make in (over_http, over_grpc):
        # A client that tries again.
        started = time.monotonic()
        while True:
            try:
                await make()
            except (aiohttp.ClientError, OSError, grpc.aio.AioRpcError):
                assert time.monotonic() - started < 60
                await asyncio.sleep(0.1)
            else:
                break


async def test_a_stop_ends_though_a_connection_comes_at_the_same_time() -> None:
    config = RouterConfig()
    doors = Doors(config, Addresses(), RouterMetrics(config.name, "m", {}))
    doors.start(1)
    await asyncio.sleep(2 * GAP_SECONDS)
    doors.grpc.stranger()
    await asyncio.wait_for(doors.stop(), PATIENCE_SECONDS)
