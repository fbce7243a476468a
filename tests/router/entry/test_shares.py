"""One client, however many requests it has or begins, doesn't lock the others out."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.internal.v1.worker_pb2 import Blocks, Load, Requests
from kvrelay.router.faces.page import page
from kvrelay.router.shares import ROUND_SECONDS, WOKEN, Turns
from kvrelay.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds
from support.hostile import PartialCall
from support.router_fakes import FakeCluster, FakeWorker, colocated_of, fake, key_file, pair, silent, until
from support.scenes import Serve

MOST = 32
OTHERS = 12
"""Requests that another client sends at once: more than the reserve has places."""
RESERVE = MOST // 16
"""Places that one client can't take."""
PROMPT = [5, 6]
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\nContent-Length: 4000\r\n"
GENERATE = "/kvrelay.v1.InferenceService/Generate"
FULL = Load(blocks=Blocks(total=100, free=0, held=100, size=4), requests=Requests(free_slots=0))
EMPTY = Load(blocks=Blocks(total=4000, free=4000, size=4), requests=Requests(free_slots=1000))


class Clients:
    """Calls a router in the name of several clients: by keys, or by addresses behind a trusted proxy."""

    def __init__(self, cluster: FakeCluster, keys: bool) -> None:
        self.cluster = cluster
        self._keys = keys

    def named(self, name: str) -> tuple[str, str]:
        """The header that names a client, in lower case."""
        return ("authorization", f"Bearer {name}") if self._keys else ("x-forwarded-for", f"10.0.0.{ord(name)}")

    async def ask(self, name: str, face: str, prompts: int = 0) -> int | str:
        """The status of one request, over HTTP with a list of so many prompts."""
        if face == "http":
            body = {"prompt": [PROMPT] * prompts if prompts else PROMPT, "max_tokens": 2}
            status, shown = await self.cluster.http.post("/v1/completions", body, headers=[self.named(name)])
            assert status != 200 or len(shown["choices"]) == max(1, prompts)
            return status
        request = GenerateRequest(token_ids=TokenIds(ids=PROMPT), sampling=SamplingParams(max_tokens=2))
        call = self.cluster.stub.Generate(request, metadata=(self.named(name),), timeout=30)
        with suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        code = await call.code()
        return {grpc.StatusCode.OK: 200, grpc.StatusCode.RESOURCE_EXHAUSTED: 429}.get(code, str(code))

    async def ask_all(self, name: str, face: str, count: int) -> Counter[int | str]:
        """The statuses of several requests at once."""
        return Counter(await asyncio.gather(*(self.ask(name, face) for _ in range(count))))

    @asynccontextmanager
    async def unfinished(self, name: str, face: str) -> AsyncIterator[None]:
        """A request of which all but the end is sent."""
        if face == "grpc":
            async with PartialCall(self.cluster.router.address, GENERATE, 4000, fields=[self.named(name)]) as call:
                await call.push()
                yield
            return
        host, _, port = str(self.cluster.router.http_address).rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(f"{HEAD}{': '.join(self.named(name))}\r\n\r\n{{".encode())
            yield
        finally:
            writer.transport.abort()


Start = Callable[..., Awaitable[Clients]]


@pytest.fixture
def clients(serve: Serve, tmp_path: Path) -> Start:
    async def start(keys: bool, *workers: FakeWorker, limits: str = "", **config: Any) -> Clients:
        """Starts a router with clients a, b and c.

        Args:
            keys: whether clients have keys; otherwise they have addresses behind a trusted proxy.
            limits: options of the key of client a.
        """
        who = {"api_keys": key_file(tmp_path, a=limits, b="", c="")} if keys else {"trusted_proxies": ("127.0.0.1",)}
        cluster = await serve(*(workers or pair()), **{"max_requests": MOST, **who, **config})
        return Clients(cluster, keys)

    return start


BOTH = pytest.mark.parametrize("face", ["http", "grpc"])
EACH = pytest.mark.parametrize(
    ("face", "keys"),
    [
        pytest.param("http", True, id="http-keys"),
        pytest.param("grpc", False, id="grpc-addresses"),
        pytest.param("grpc", True, id="grpc-keys", marks=pytest.mark.more),
        pytest.param("http", False, id="http-addresses", marks=pytest.mark.more),
    ],
)


@EACH
@pytest.mark.some(1)
async def test_a_body_of_many_prompts_leaves_room_for_others_and_is_answered(
    clients: Start, face: str, keys: bool
) -> None:
    """Others' requests take the places of its waiting prompts while no worker has capacity; in the end all are
    served."""
    each = await clients(keys)
    cluster = each.cluster
    await cluster.report("decode-0", FULL)
    many = asyncio.create_task(each.ask("a", "http", 200))
    await until(lambda: cluster.calls == MOST - RESERVE, "its prompts have all places but the reserve")
    others = asyncio.create_task(each.ask_all("b", face, OTHERS))
    own = asyncio.create_task(each.ask_all("a", face, 2))
    await until(lambda: cluster.router.waiting == MOST, "all wait")
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in (many, others, own))
    await cluster.report("decode-0", EMPTY)
    assert await others == {200: OTHERS}
    assert await own == {200: 2}
    assert await many == 200
    await cluster.idle()


@EACH
@pytest.mark.parametrize("config", [{}, {"max_requests": 1000, "max_queue": MOST - RESERVE}], ids=["house", "queue"])
async def test_a_full_house_and_a_full_queue_displace_the_largest_holders_latest(
    clients: Start, face: str, keys: bool, config: dict[str, int]
) -> None:
    each = await clients(keys, **config)
    cluster = each.cluster
    await cluster.report("decode-0", FULL)
    first = asyncio.create_task(each.ask_all("a", face, MOST + 10))
    await until(lambda: cluster.router.waiting == MOST - RESERVE, "as many wait as there may be")
    others = asyncio.create_task(each.ask_all("b", face, OTHERS))
    displaced = OTHERS if config else OTHERS - RESERVE
    await until(lambda: cluster.outcomes.count("exhausted") >= 10 + RESERVE + displaced, "b's have their places")
    await asyncio.sleep(0.1)
    assert not others.done()
    await cluster.report("decode-0", EMPTY)
    assert await others == {200: OTHERS}
    ended = await first
    assert set(ended) == {200, 429}
    assert ended[200] >= MOST - RESERVE - OTHERS
    assert Counter(cluster.outcomes) == {"length": ended[200] + OTHERS, "exhausted": ended[429]}


@EACH
async def test_unfinished_requests_leave_room_for_others(
    clients: Start, stack: AsyncExitStack, face: str, keys: bool
) -> None:
    each = await clients(keys)
    for _ in range(MOST + 10):
        await stack.enter_async_context(each.unfinished("a", face))
    await until(lambda: each.cluster.calls == MOST - RESERVE, "they have all places but the reserve")
    for other in ("http", "grpc"):
        assert await each.ask_all("b", other, OTHERS) == {200: OTHERS}


@BOTH
async def test_requests_at_once_count_from_their_headers_on(clients: Start, face: str) -> None:
    """Each prompt of a list counts as one request: they take turns."""
    worker = fake("colocated-0", silent)
    each = await clients(True, worker, limits="concurrent=2")
    cluster = each.cluster
    async with AsyncExitStack() as begun:
        for _ in range(2):
            await begun.enter_async_context(each.unfinished("a", face))
        await until(lambda: cluster.calls == 2, "both count")
        for _ in range(20):
            await begun.enter_async_context(each.unfinished("a", face))
            assert await each.ask("a", face) == 429
        assert cluster.calls == 2
    await cluster.idle()
    many = asyncio.create_task(each.ask("a", "http", 7))
    for count in range(7):
        most = min(count + 2, 7)
        await until(lambda most=most: len(worker.jobs) >= most, "as many run as may run")
        assert len(worker.jobs) == most
        assert cluster.calls <= 2
        assert most == 7 or await each.ask("a", face) == 429
        await colocated_of()(worker.jobs[count])
    assert await many == 200


async def test_open_pages_and_health_checks_leave_room_for_others(clients: Start, stack: AsyncExitStack) -> None:
    each = await clients(False)

    async def look(name: str) -> aiohttp.ClientResponse:
        events = each.cluster.http.session.get(f"{each.cluster.http.base}/page/events", headers=[each.named(name)])
        return await stack.enter_async_context(events)

    opened = [await look("a") for _ in range(page.MAX_VIEWERS)]
    assert [answer.status for answer in [*opened, await look("a")]] == [200] * page.MAX_VIEWERS + [429]
    opened.pop().close()
    async with asyncio.timeout(20):
        while (await look("a")).status != 200:
            pass  # the router notices at its next write
    assert [(await look("b")).status for _ in range(2)] == [200] * 2
    text = await asyncio.wait_for(opened[0].text(), 20)
    assert "event: error\ndata: " in text
    assert "gave way to another client" in text

    async def follow(name: str) -> Any:
        """The first answer of a stream of health checks, and the stream."""
        watch = health_pb2_grpc.HealthStub(each.cluster.channel).Watch
        call = watch(health_pb2.HealthCheckRequest(), metadata=(each.named(name),))
        stack.callback(call.cancel)
        return await call.read(), call

    streams = [await follow("a") for _ in range(MOST)]
    with pytest.raises(grpc.aio.AioRpcError, match="health checks and reflections are open"):
        await follow("a")
    for _ in range(4):
        first, _ = await follow("b")
        assert first.status == health_pb2.HealthCheckResponse.SERVING
    assert await streams[0][1].code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_long_turns_leave_the_loop_to_others_and_go_by_holder() -> None:
    turns = Turns()
    begun: list[str] = []

    async def work(holder: str) -> None:
        await turns.take(holder)
        begun.append(holder)
        end = time.monotonic() + ROUND_SECONDS
        while time.monotonic() < end:
            pass

    async def rounds() -> list[int]:
        counts = []
        while len(begun) < 51:
            before = len(begun)
            await asyncio.sleep(0)
            counts.append(len(begun) - before)
        return counts

    counting = asyncio.create_task(rounds())
    many = [asyncio.create_task(work("many")) for _ in range(50)]
    await until(lambda: len(begun) >= 5, "some have begun")
    after = len(begun)
    few = asyncio.create_task(work("few"))
    many[-1].cancel()
    many[-1] = asyncio.create_task(work("many"))
    await asyncio.gather(few, *many)
    assert begun.index("few") <= after + 2 * WOKEN
    assert max(await counting) <= 2
