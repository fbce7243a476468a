"""One client, however many requests it has or begins, doesn't lock the others out."""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.internal.v1.worker_pb2 import Blocks, Load, Requests
from kvrelay.router.faces.page import page
from kvrelay.router.placing.shares import ROUND_SECONDS, WOKEN, Turns
from kvrelay.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub
from support.hostile import PartialCall
from support.router_fakes import FakeCluster, FakeWorker, colocated_of, fake_cluster, pair, run, silent, until

MOST = 32
OTHERS = 12
"""Requests that another client sends at once: more than the reserve has places."""
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\nContent-Length: 4000\r\n"
GENERATE = "/kvrelay.v1.InferenceService/Generate"
BODY = {"prompt": [5, 6], "max_tokens": 2}
REQUEST = GenerateRequest(token_ids=TokenIds(ids=[5, 6]), sampling=SamplingParams(max_tokens=2))
FULL = Load(blocks=Blocks(total=100, free=0, held=100, size=4), requests=Requests(free_slots=0))
EMPTY = Load(blocks=Blocks(total=4000, free=4000, size=4), requests=Requests(free_slots=1000))


def token_at(index: int) -> int:
    return 40 + index


class Clients:
    """Calls a router in the name of several clients: by keys, or by addresses behind a trusted proxy."""

    def __init__(
        self, cluster: FakeCluster, session: aiohttp.ClientSession, channel: grpc.aio.Channel, keys: bool
    ) -> None:
        self.cluster = cluster
        self.session = session
        self._stub = InferenceServiceStub(channel)
        self._keys = keys

    def named(self, name: str) -> tuple[str, str]:
        """The header that names a client, in lower case."""
        return ("authorization", f"Bearer {name}") if self._keys else ("x-forwarded-for", f"10.0.0.{ord(name)}")

    async def ask(self, name: str, face: str, prompt: object = BODY["prompt"]) -> int | str:
        """The status of one request."""
        if face == "http":
            url = f"http://{self.cluster.router.http_address}/v1/completions"
            body = {**BODY, "prompt": prompt}
            async with self.session.post(url, json=body, headers=[self.named(name)]) as response:
                shown = await response.json()
                assert response.status != 200 or len(shown["choices"]) == max(1, sum(map(bool, _lists(prompt))))
                return response.status
        call = self._stub.Generate(REQUEST, metadata=(self.named(name),), timeout=30)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError:
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

    async def tell(self, report: Load) -> None:
        """The decode worker reports a load, and the router has received it."""
        self.cluster.workers["decode-0"].report_load(report)

        def known() -> bool:
            capacity = next(view.capacity for view in self.cluster.router.registry.view() if view.role == "decode")
            return capacity is not None and capacity.free_slots == report.requests.free_slots

        await until(known, "the router has the load")

    @property
    def waiting(self) -> int:
        return self.cluster.router.waiting

    @property
    def calls(self) -> int:
        return self.cluster.router._front.running


def _lists(prompt: object) -> list[object]:
    return [each for each in prompt if isinstance(each, list)] if isinstance(prompt, list) else []


@asynccontextmanager
async def clients(
    folder: Path, keys: bool, *workers: FakeWorker, limits: str = "", **config: Any
) -> AsyncIterator[Clients]:
    """
    Args:
        keys: whether clients have keys; otherwise they have addresses behind a trusted proxy.
        limits: options of the key of client a.
    """
    path = folder / "api_keys"
    path.write_text(
        "".join(f"{name} {hashlib.sha256(name.encode()).hexdigest()} {limits * (name == 'a')}\n" for name in "abc")
    )
    who = {"api_keys": str(path)} if keys else {"trusted_proxies": ("127.0.0.1",)}
    workers = workers or pair(token_at)
    async with (
        fake_cluster(folder / "m", *workers, http_port=0, **{"max_requests": MOST, **who, **config}) as cluster,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        grpc.aio.insecure_channel(cluster.router.address) as channel,
    ):
        yield Clients(cluster, session, channel, keys)


BOTH = pytest.mark.parametrize("face", ["http", "grpc"])
KEYS = pytest.mark.parametrize("keys", [True, False], ids=["keys", "addresses"])


@BOTH
@KEYS
def test_a_body_of_many_prompts_leaves_room_for_others_and_is_answered(tmp_path: Path, face: str, keys: bool) -> None:
    """Others' requests take the places of its waiting prompts while no worker has capacity; in the end all are
    served."""
    prompts = [[5, 6]] * 200

    async def test() -> None:
        async with clients(tmp_path, keys) as each:
            await each.tell(FULL)
            many = asyncio.create_task(each.ask("a", "http", prompts))
            await until(lambda: each.calls == MOST - MOST // 16, "its prompts have all places but the reserve")
            others = asyncio.create_task(each.ask_all("b", face, OTHERS))
            own = asyncio.create_task(each.ask_all("a", face, 2))
            await until(lambda: each.waiting == MOST, "all wait")
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in (many, others, own))
            await each.tell(EMPTY)
            assert await others == {200: OTHERS}
            assert await own == {200: 2}
            assert await many == 200
            await until(lambda: each.calls == 0, "nothing is left")

    run(test)


@BOTH
@KEYS
def test_a_full_house_and_a_full_queue_displace_the_largest_holders_latest(
    tmp_path: Path, face: str, keys: bool
) -> None:
    async def test() -> None:
        for config in ({}, {"max_requests": 1000, "max_queue": MOST - 2}):
            async with clients(tmp_path, keys, **config) as each:
                await each.tell(FULL)
                first = asyncio.create_task(each.ask_all("a", face, MOST + 10))
                await until(lambda: each.waiting == MOST - 2, "as many wait as there may be")
                others = asyncio.create_task(each.ask_all("b", face, OTHERS))
                await until(
                    lambda: (
                        each.cluster.router._front._admission._places["tenant b" if keys else "10.0.0.98"] == OTHERS
                    ),
                    "b's are there",
                )
                await asyncio.sleep(0.1)
                assert not others.done()
                await each.tell(EMPTY)
                assert await others == {200: OTHERS}
                ended = await first
                assert set(ended) == {200, 429}
                assert ended[200] >= MOST - 2 - OTHERS
                outcomes = Counter(record.outcome for record in each.cluster.records)
                assert outcomes == {"length": ended[200] + OTHERS, "exhausted": ended[429]}

    run(test)


@BOTH
@KEYS
def test_unfinished_requests_leave_room_for_others(tmp_path: Path, face: str, keys: bool) -> None:
    async def test() -> None:
        async with clients(tmp_path, keys) as each, AsyncExitStack() as stack:
            for _ in range(MOST + 10):
                await stack.enter_async_context(each.unfinished("a", face))
            await until(lambda: each.calls == MOST - MOST // 16, "they have all places but the reserve")
            for other in ("http", "grpc"):
                assert await each.ask_all("b", other, OTHERS) == {200: OTHERS}

    run(test)


@BOTH
def test_requests_at_once_count_from_their_headers_on(tmp_path: Path, face: str) -> None:
    """Each prompt of a list counts as one request: they take turns."""

    async def test() -> None:
        workers = FakeWorker("colocated-0", "colocated", silent)
        async with clients(tmp_path, True, workers, limits="concurrent=2") as each, AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(each.unfinished("a", face))
            await until(lambda: each.calls == 2, "both count")
            for _ in range(20):
                await stack.enter_async_context(each.unfinished("a", face))
                assert await each.ask("a", face) == 429
            assert each.calls == 2
            await stack.aclose()
            await until(lambda: each.calls == 0, "they have ended")
            many = asyncio.create_task(each.ask("a", "http", [[5, 6]] * 7))
            jobs = each.cluster.workers["colocated-0"].jobs
            answer = colocated_of(token_at)
            for count in range(7):
                most = min(count + 2, 7)
                await until(lambda most=most: len(jobs) >= most, "as many run as may run")
                assert len(jobs) == most
                assert each.calls <= 2
                assert most == 7 or await each.ask("a", face) == 429
                await answer(jobs[count])
            assert await many == 200

    run(test)


def test_open_pages_and_health_checks_leave_room_for_others(tmp_path: Path) -> None:
    async def test() -> None:
        async with clients(tmp_path, False) as each, AsyncExitStack() as stack:
            url = f"http://{each.cluster.router.http_address}/page/events"

            async def look(name: str) -> aiohttp.ClientResponse:
                return await stack.enter_async_context(each.session.get(url, headers=[each.named(name)]))

            opened = [await look("a") for _ in range(page.MAX_VIEWERS)]
            assert [answer.status for answer in [*opened, await look("a")]] == [200] * page.MAX_VIEWERS + [429]
            assert (await look("b")).status == 200
            assert (await look("b")).status == 200
            text = await asyncio.wait_for(opened[0].text(), 20)
            assert "event: error\ndata: " in text
            assert "gave way to another client" in text

            channel = await stack.enter_async_context(grpc.aio.insecure_channel(each.cluster.router.address))
            watch = health_pb2_grpc.HealthStub(channel).Watch

            async def follow(name: str) -> Any:
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

    run(test)


def test_long_turns_leave_the_loop_to_others_and_go_by_holder() -> None:
    async def test() -> None:
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

    asyncio.run(asyncio.wait_for(test(), 60))
