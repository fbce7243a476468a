"""Requests of gRPC on their way: bounded in time and in memory, whoever sends them."""

import asyncio
import hashlib
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.client import AsyncClient
from kvrelay.router.config import RouterConfig
from kvrelay.router.errors import RequestError
from kvrelay.router.faces import arrivals
from kvrelay.router.faces.arrivals import Arrivals
from kvrelay.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds
from support.router_fakes import fake_cluster, pair, run, until

MIB = 2**20
GENERATE = "/kvrelay.v1.InferenceService/Generate"
CHECK = "/grpc.health.v1.Health/Check"
REFLECT = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
METHODS = (GENERATE, "/kvrelay.v1.InferenceService/Tokenize", CHECK, "/grpc.health.v1.Health/Watch", REFLECT)
REQUEST = GenerateRequest(token_ids=TokenIds(ids=[5, 6]), sampling=SamplingParams(max_tokens=2)).SerializeToString()


def token_at(index: int) -> int:
    return 40 + index


def key_file(folder: Path, *tenants: str) -> str:
    """A file with one key for each tenant, which is its name."""
    path = folder / "api_keys"
    path.write_text("".join(f"{name} {hashlib.sha256(name.encode()).hexdigest()}\n" for name in tenants))
    return str(path)


def begin(channel: grpc.aio.Channel, method: str, key: str = "") -> Any:
    """A call that sends headers and no message."""
    metadata = (("authorization", f"Bearer {key}"),) if key else None
    return channel.stream_stream(method)(metadata=metadata, timeout=30)


def test_a_call_without_a_key_is_refused_before_its_message_comes(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            fake_cluster(tmp_path / "m", *pair(token_at), api_keys=key_file(tmp_path, "a")) as cluster,
            grpc.aio.insecure_channel(cluster.router.address) as channel,
        ):
            for key in ("", "b"):
                assert await begin(channel, GENERATE, key).code() is grpc.StatusCode.UNAUTHENTICATED
            known = begin(channel, GENERATE, "a")
            await until(lambda: cluster.router._front.running == 1, "the call was admitted")
            await known.write(REQUEST)
            await known.done_writing()
            assert [answer async for answer in known]

    run(test)


@pytest.mark.parametrize("method", METHODS)
def test_a_message_that_does_not_come_ends_its_call(tmp_path: Path, method: str) -> None:
    async def test() -> None:
        async with (
            fake_cluster(tmp_path, *pair(token_at), request_timeout_seconds=0.3) as cluster,
            grpc.aio.insecure_channel(cluster.router.address) as channel,
        ):
            call = begin(channel, method)
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "did not arrive within 0.3 s" in await call.details()
            assert cluster.router._front.running == 0

    run(test)


def test_a_call_without_a_message_is_told_so(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            fake_cluster(tmp_path, *pair(token_at)) as cluster,
            grpc.aio.insecure_channel(cluster.router.address) as channel,
        ):
            for method in METHODS:
                call = begin(channel, method)
                await call.done_writing()
                expected = grpc.StatusCode.OK if method == REFLECT else grpc.StatusCode.INVALID_ARGUMENT
                assert await call.code() is expected, method
            unary = channel.unary_unary(CHECK, Empty.SerializeToString, health_pb2.HealthCheckResponse.FromString)
            assert (await unary(Empty(), timeout=10)).status == health_pb2.HealthCheckResponse.SERVING

    run(test)


def test_one_tenants_unfinished_requests_do_not_keep_out_anothers(tmp_path: Path) -> None:
    """Two tenants that take all places don't keep a third one out either."""
    options = {"max_message_bytes": MIB, "max_arriving_bytes": 10 * MIB, "request_timeout_seconds": 60.0}

    async def served(cluster: Any, key: str) -> float:
        async with AsyncClient(cluster.router.address, api_key=key, timeout=30) as client:
            started = time.monotonic()
            await client.complete([5, 6], max_tokens=2)
            return time.monotonic() - started

    async def test() -> None:
        keys = key_file(tmp_path, "a", "b", "c")
        async with (
            fake_cluster(tmp_path / "m", *pair(token_at), api_keys=keys, **options) as cluster,
            grpc.aio.insecure_channel(cluster.router.address) as channel,
        ):
            front = cluster.router._front
            stalled = [begin(channel, GENERATE, "a") for _ in range(30)]
            await until(lambda: front.running == 30, "they have begun")
            assert await served(cluster, "b") < arrivals.PATIENCE_SECONDS
            stalled += [begin(channel, GENERATE, "b") for _ in range(30)]
            await until(lambda: front.running == 60, "they have begun")
            for _ in range(3):
                await served(cluster, "c")
            ends = Counter([await call.code() for call in stalled if call.done()])
            assert set(ends) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            for call in stalled:
                call.cancel()
            await until(lambda: front.running == 0, "nothing runs")

    run(test)


@settings(deadline=None, max_examples=50)
@given(
    places=st.integers(1, 9),
    events=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), max_size=40),
)
def test_places_are_bounded_shared_and_given_back(places: int, events: list[tuple[str, int, bool]]) -> None:
    """The requests are arbitrary; each takes some turns of the event loop to arrive, or is cancelled."""
    reading: Counter[str] = Counter()
    ended: Counter[str] = Counter()

    async def main() -> None:
        shared = Arrivals(places, 5.0)

        async def one(holder: str, turns: int) -> None:
            async def read() -> bytes:
                reading[holder] += 1
                try:
                    assert reading.total() <= places
                    assert reading[holder] <= max(1, places - max(1, places // 4))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    return b"request"
                finally:
                    reading[holder] -= 1

            assert await shared.receive(holder, read) == b"request"
            ended[holder] += 1

        tasks = []
        for holder, turns, cancelled in events:
            tasks.append(asyncio.create_task(one(holder, turns)))
            await asyncio.sleep(0)
            if cancelled:
                tasks[len(tasks) // 2].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
        assert ended.total() == results.count(None)
        # All places are free again.
        most = max(1, places - max(1, places // 4))
        began = [asyncio.Event() for _ in range(most)]

        async def wait(event: asyncio.Event) -> bytes:
            event.set()
            await asyncio.gather(*(other.wait() for other in began))
            return b"request"

        await asyncio.gather(*(shared.receive("a", lambda event=event: wait(event)) for event in began))

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_late_request_and_one_that_gave_way_are_told_apart() -> None:
    async def main() -> None:
        shared = Arrivals(4, 0.2)
        never = asyncio.Event()
        with pytest.raises(RequestError, match=r"did not arrive within 0\.2 s"):
            await shared.receive("a", never.wait)

        patient = Arrivals(4, 60.0)
        others = [asyncio.create_task(patient.receive(holder, never.wait)) for holder in "aaabc"]
        await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        assert [task.done() for task in others] == [True, False, False, False, False]
        with pytest.raises(RequestError, match=r"longer than 1 s to arrive while others waited"):
            others[0].result()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"request_timeout_seconds": 0.0}, r"request_timeout_seconds is 0\.0; allowed: 0\.1 to 3600"),
        (
            {"max_arriving_bytes": 20 * MIB - 1},
            "max_arriving_bytes is 20971519; allowed: at least 20971520, five times",
        ),
    ],
)
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RouterConfig(**options)
