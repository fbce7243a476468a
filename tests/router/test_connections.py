"""Connections that keep a router waiting are closed, others live on, and one address has its limit; HTTP and gRPC."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from prometheus_client import CollectorRegistry

from kvrelay.client import AsyncClient
from kvrelay.router.addresses import Addresses
from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.connections import Connections, Deadlines
from kvrelay.router.doors.doors import GAP_SECONDS, Doors
from kvrelay.router.records.metrics import RouterMetrics
from support.hostile import PartialCall, client_tls, hello
from support.http_calls import HELLO, Http, serving
from support.processes import free_port
from support.router_fakes import FakeCluster, FakeWorker, Job, colocated_of, run, until
from support.router_process import router_process
from support.secrets import secrets_in

PATIENCE_SECONDS = 20.0
"""Seconds to wait for what should happen within two seconds."""
SHORT = {"header_timeout_seconds": 0.4, "request_timeout_seconds": 0.4}
CHECK = "/grpc.health.v1.Health/Check"


def token_at(index: int) -> int:
    return 40 + index


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
    registry: CollectorRegistry = cluster.router.metrics.registry
    labels = {"face": face, "reason": reason}
    found = [
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "kvrelay_router_closed_connections_total" and labels.items() <= sample.labels.items()
    ]
    return sum(found)


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
def test_connections_without_a_whole_request_are_closed(tmp_path: Path, secured: bool) -> None:
    """Connections in a handshake of TLS are closed too, and those whose one request never comes whole."""
    folder = secrets_in(tmp_path, "mutual").folder / "certificates"
    files = {"tls_certificate": str(folder / "router.crt"), "tls_key": str(folder / "router.key")} if secured else {}

    def tls(protocol: str) -> ssl.SSLContext | None:
        return client_tls(str(folder / "ca.crt"), protocol) if secured else None

    async def test() -> None:
        async with serving(tmp_path / "m", **SHORT, **files) as (cluster, _), AsyncExitStack() as stack:
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
            doors = cluster.router._doors
            await until(lambda: not len(doors.http) and not len(doors.grpc), "nothing is left")

    run(test)


def test_what_drips_in_is_closed_in_time(tmp_path: Path) -> None:
    """A byte now and then doesn't move a deadline."""

    async def drip(it: Opened, data: bytes) -> float:
        started = time.monotonic()
        for at in range(len(data)):
            it.send(data[at : at + 1])
            if not it.open:
                break
            await asyncio.sleep(0.1)
        return time.monotonic() - started

    async def test() -> None:
        async with serving(tmp_path, **SHORT) as (cluster, _):
            async with opened(addresses(cluster)["http"]) as it:
                assert await drip(it, b"GET /" + b"x" * 200) < 10
            async with opened(addresses(cluster)["http"]) as it:
                it.send(b"GET /health HTTP/1.1\r\nHost: router\r\n\r\n")
                assert b"200 OK" in await it.answer()
                assert await drip(it, b"GET /" + b"x" * 200) < 10
            await until(lambda: closed(cluster, "http", "first") and closed(cluster, "http", "header"), "both counted")

    run(test)


def test_connections_that_have_served_a_request_may_idle(tmp_path: Path) -> None:
    """Longer than a new one may wait, and not for ever."""

    async def test() -> None:
        idle = {"http_idle_seconds": 3.0, "grpc_idle_seconds": 3.0}
        async with serving(tmp_path, **SHORT, **idle) as (cluster, _):
            at = addresses(cluster)
            async with (
                opened(at["http"]) as it,
                grpc.aio.insecure_channel(at["grpc"]) as channel,
                opened(at["http"]) as silent,
            ):
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

    run(test)


def test_requests_that_run_are_not_closed(tmp_path: Path) -> None:
    """However long they take, and however full the router is."""

    async def test() -> None:
        going = asyncio.Event()

        async def slowly(job: Job) -> None:
            job.send(job.base, (40,))
            await going.wait()
            await colocated_of(token_at)(job)

        idle = {"http_idle_seconds": 0.2, "grpc_idle_seconds": 0.2}
        worker = FakeWorker("colocated-0", "colocated", slowly)
        async with serving(tmp_path, worker, **SHORT, **idle) as (cluster, http):
            async with AsyncClient(cluster.router.address, timeout=30) as client:
                asked = [
                    asyncio.create_task(client.complete([5, 6], max_tokens=3)),
                    asyncio.create_task(http.post("/v1/completions", HELLO)),
                ]
                await cluster.job("colocated-0", 1)
                async with opened(addresses(cluster)["http"]) as it, opened(addresses(cluster)["grpc"]) as other:
                    # These come later, and go by their deadlines.
                    await asyncio.gather(it.ended(), other.ended())
                doors = cluster.router._doors
                await until(lambda: len(doors.http) == len(doors.grpc) == 1, "those that are gone are forgotten")
                doors.http.make_room()
                doors.grpc.make_room()
                going.set()
                await asyncio.gather(*asked)
            assert closed(cluster, "http", "descriptors") == closed(cluster, "grpc", "descriptors") == 0

    run(test)


def test_one_address_has_a_limit_of_connections_from_which_trusted_proxies_are_exempt(tmp_path: Path) -> None:
    async def test() -> None:
        options: dict[str, Any] = {"max_connections_per_address": 4, "trusted_proxies": ("127.0.0.9/32",)}
        async with serving(tmp_path, **options) as (cluster, _), AsyncExitStack() as stack:
            for face, address in addresses(cluster).items():
                doors = getattr(cluster.router._doors, face)
                many = [await stack.enter_async_context(opened(address, source="127.0.0.2")) for _ in range(10)]
                texts = []

                async def note(it: Opened, texts: list[bytes] = texts) -> None:
                    texts.append(await it.reader.read())

                tasks = [asyncio.create_task(note(each)) for each in many]
                await until(lambda texts=texts: len(texts) == 6, "six of ten are closed")
                assert closed(cluster, face, "address") == 6
                # The oldest gave way: another client of this address is not shut out.
                assert [task.done() for task in tasks] == 6 * [True] + 4 * [False]
                # Other addresses, and proxies, don't notice.
                for source, count in (("127.0.0.3", 3), ("127.0.0.9", 10)):
                    more = [await stack.enter_async_context(opened(address, source=source)) for _ in range(count)]
                    known = partial(count_of, doors, source)
                    await until(lambda known=known, count=count: known() == count, "all are known")
                    assert all(it.open for it in more)
                # A connection that ends makes room for another.
                for it in many:
                    it.writer.transport.abort()
                await asyncio.gather(*tasks, return_exceptions=True)
                await until(lambda doors=doors: not count_of(doors, "127.0.0.2"), "they are gone")
                again = await stack.enter_async_context(opened(address, source="127.0.0.2"))
                await until(lambda doors=doors: count_of(doors, "127.0.0.2") == 1, "it is known")
                assert again.open

    def count_of(doors: Any, address: str) -> int:
        return sum(host == address for host, _ in doors.peers())

    run(test)


def test_connections_with_a_running_request_never_give_way() -> None:
    ended: list[int] = []
    doors = Connections("http", Deadlines(first=10.0), 4, Addresses())
    for port in range(4):
        connection = doors.add(("127.0.0.2", port), partial(ended.append, port))
        assert connection is not None
        connection.begin()
    assert doors.add(("127.0.0.2", 4), None) is None
    assert doors.add(("127.0.0.3", 4), None) is not None
    one = doors.of(("127.0.0.2", 2))
    assert one is not None
    assert not ended
    one.end()
    assert doors.add(("127.0.0.2", 4), None) is not None
    assert ended == [2]


def test_limits_of_the_callers_of_a_trusted_proxy_are_those_of_its_clients(tmp_path: Path) -> None:
    seen = []

    async def test() -> None:
        async with serving(tmp_path, trusted_proxies=("127.0.0.1",)) as (cluster, http):
            admit = cluster.router._front._admission.admit

            def noting(peer: str, *rest: Any) -> Any:
                seen.append(peer)
                return admit(peer, *rest)

            cluster.router._front._admission.admit = noting  # type: ignore[method-assign]  # the test looks at it
            await http.post("/v1/completions", HELLO, headers={"X-Forwarded-For": "9.9.9.9, 198.51.100.1"})
            async with grpc.aio.insecure_channel(cluster.router.address) as channel:
                asked = channel.unary_unary("/kvrelay.v1.InferenceService/GetModelInfo")
                await asked(b"", metadata=(("x-forwarded-for", "198.51.100.2"),), timeout=10)
            assert seen == ["198.51.100.1", "198.51.100.2"]

    run(test)


@pytest.mark.parametrize("face", ["http", "grpc"])
def test_a_new_client_is_served_at_the_limit_of_descriptors(tmp_path: Path, face: str) -> None:
    """300 connections that say nothing, or only the beginning, at a limit of 200 descriptors."""

    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", colocated_of(token_at))
        port = free_port()
        limited: list[str] = ["prlimit", "--nofile=200:200"]
        async with (
            router_process(tmp_path, worker, command=limited, http_port=port, spare_descriptors=32) as (address, _),
            AsyncExitStack() as stack,
        ):
            at = {"http": f"127.0.0.1:{port}", "grpc": address}
            for number in range(300):
                it = await stack.enter_async_context(opened(at[face], source=f"127.0.0.{number % 3 + 2}"))
                it.send((b"", b"GET /", hello())[number % 3])

            async def ask(make: Callable[[], Any], seconds: float) -> None:
                """Asks as a client does that tries again."""
                started = time.monotonic()
                while True:
                    try:
                        await make()
                    except (aiohttp.ClientError, OSError, grpc.aio.AioRpcError):
                        assert time.monotonic() - started < seconds
                        await asyncio.sleep(0.1)
                    else:
                        break

            async def over_http() -> None:
                async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5)) as session:
                    status, answer = await Http(session, at["http"]).post("/v1/completions", HELLO)
                    assert status == 200, json.dumps(answer)

            async def over_grpc() -> None:
                options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
                async with grpc.aio.insecure_channel(address, options=options) as channel:
                    await channel.unary_unary(CHECK)(b"", timeout=5)

            # A machine that is twice as busy takes longer than the 5 s.
            await ask(over_http, 10)
            await ask(over_grpc, 10)

    run(test, 120)


def test_a_stop_ends_though_a_connection_comes_at_the_same_time() -> None:
    async def test() -> None:
        config = RouterConfig()
        doors = Doors(config, Addresses(), RouterMetrics(config.name, "m", {}))
        doors.start(1)
        await asyncio.sleep(2 * GAP_SECONDS)
        doors.grpc.stranger()
        await asyncio.wait_for(doors.stop(), PATIENCE_SECONDS)

    run(test)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("header_timeout_seconds", 0.0, r"0\.1 to 3600"),
        ("http_idle_seconds", -1.0, r"0\.1 to 86400"),
        ("grpc_idle_seconds", 0.0, r"0\.1 to 86400"),
        ("max_connections_per_address", 0, "1 to 1000000"),
        ("spare_descriptors", 7, "8 to 1000000"),
    ],
)
def test_options_are_checked(name: str, value: float, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}; allowed: {allowed}"):
        RouterConfig(**{name: value})  # type: ignore[arg-type]  # one of several options
