"""Requests of gRPC on their way: bounded in time and in memory, whoever sends them."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.faces import arrivals
from kvrelay.router.faces.arrivals import Arrivals
from kvrelay.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds, TokenizeRequest
from support.hostile import PartialCall
from support.router_fakes import key_file, pair, until
from support.scenes import Serve

MIB = 2**20
GENERATE = "/kvrelay.v1.InferenceService/Generate"
CHECK = "/grpc.health.v1.Health/Check"
REFLECT = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
METHODS = (GENERATE, "/kvrelay.v1.InferenceService/Tokenize", CHECK, "/grpc.health.v1.Health/Watch", REFLECT)
REQUEST = GenerateRequest(token_ids=TokenIds(ids=[5, 6]), sampling=SamplingParams(max_tokens=2)).SerializeToString()


def begin(channel: grpc.aio.Channel, method: str, key: str = "") -> Any:
    """A call that sends headers and no message."""
    metadata = (("authorization", f"Bearer {key}"),) if key else None
    return channel.stream_stream(method)(metadata=metadata, timeout=90)


async def test_a_call_without_a_key_is_refused_before_its_message_comes(serve: Serve, tmp_path: Path) -> None:
    cluster = await serve(*pair(), api_keys=key_file(tmp_path, a=""))
    for key in ("", "b"):
        assert await begin(cluster.channel, GENERATE, key).code() is grpc.StatusCode.UNAUTHENTICATED
    known = begin(cluster.channel, GENERATE, "a")
    await until(lambda: cluster.calls == 1, "the call was admitted")
    await known.write(REQUEST)
    await known.done_writing()
    assert [answer async for answer in known]


@pytest.mark.parametrize("method", METHODS)
async def test_a_message_that_does_not_come_ends_its_call(serve: Serve, method: str) -> None:
    cluster = await serve(*pair(), request_timeout_seconds=0.3)
    call = begin(cluster.channel, method)
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "did not arrive within 0.3 s" in await call.details()
    assert cluster.calls == 0


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("/kvrelay.v1.InferenceService/Tokenize", TokenizeRequest(text="a b").SerializeToString()),
        (CHECK, b""),
        (REFLECT, ServerReflectionRequest(list_services="*").SerializeToString()),
    ],
)
async def test_an_answer_that_nobody_reads_ends_its_call(serve: Serve, method: str, message: bytes) -> None:
    cluster = await serve(*pair(), idle_timeout_seconds=0.3)
    async with PartialCall(cluster.router.address, method, len(message), message=message) as call:
        await call.push()
        connections = cluster.router._doors.grpc

        def calls() -> int:
            known = map(connections.of, connections.peers())
            return sum(each.calls for each in known if each is not None)

        await until(calls, "the call has come")
        await until(lambda: not calls(), "the call has ended")
        assert cluster.calls == 0


async def test_a_call_without_a_message_is_told_so(serve: Serve) -> None:
    cluster = await serve(*pair())
    for method in METHODS:
        call = begin(cluster.channel, method)
        await call.done_writing()
        expected = grpc.StatusCode.OK if method == REFLECT else grpc.StatusCode.INVALID_ARGUMENT
        assert await call.code() is expected, method
    unary = cluster.channel.unary_unary(CHECK, Empty.SerializeToString, health_pb2.HealthCheckResponse.FromString)
    assert (await unary(Empty(), timeout=10)).status == health_pb2.HealthCheckResponse.SERVING


async def test_one_tenants_unfinished_requests_do_not_keep_out_anothers(serve: Serve, tmp_path: Path) -> None:
    """Two tenants that take all places don't keep a third one out either."""
    cluster = await serve(
        *pair(),
        api_keys=key_file(tmp_path, a="", b="", c=""),
        max_message_bytes=MIB,
        max_arriving_bytes=10 * MIB,
        request_timeout_seconds=60.0,
    )

    async def served(key: str) -> None:
        await cluster.client_of(api_key=key).complete([5, 6], max_tokens=2)

    stalled = [begin(cluster.channel, GENERATE, "a") for _ in range(30)]
    await until(lambda: cluster.calls == 30, "they have begun")
    await served("b")
    await until(lambda: cluster.calls == 30, "b's request has ended, and none of a's gave up its place for it")
    stalled += [begin(cluster.channel, GENERATE, "b") for _ in range(30)]
    # Those of a may give up places while those of b begin.
    await until(lambda: cluster.calls + sum(call.done() for call in stalled) == 60, "they have begun")
    for _ in range(3):
        await served("c")
    ended = [call for call in stalled if call.done()]
    assert {await call.code() for call in ended} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    said = f"the request took longer than {arrivals.PATIENCE_SECONDS:g} s to arrive while others waited to send theirs"
    assert {await call.details() for call in ended} == {said}
    for call in stalled:
        call.cancel()
    await cluster.idle()


@given(
    places=st.integers(1, 9),
    events=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), max_size=40),
)
async def test_places_are_bounded_shared_and_given_back(places: int, events: list[tuple[str, int, bool]]) -> None:
    """The requests are arbitrary; each takes some turns of the event loop to arrive, or is cancelled."""
    reading: Counter[str] = Counter()
    ended: Counter[str] = Counter()

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
