"""A request that takes several calls: wherever the earlier one was lost, text and tokens are those of a single call."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from kvrelay.internal.v1.worker_pb2 import Blocks, Load, Requests
from kvrelay.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    GenerateRequest,
    GenerateResponse,
    Resume,
    SamplingParams,
)
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub
from support.router_fakes import FakeCluster, Job, fake, length_if, second_router, silent, until
from support.scenes import Serve
from support.tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
KEY = bytes(range(16))
TEXT = "größer 🙂🙃 STOP als 日 STO 🙂 on"
# One token per byte, so that characters and stop strings extend over several.
IDS = [TOKENIZER.token_to_id(byte) for word, _ in TOKENIZER.pre_tokenizer.pre_tokenize_str(TEXT) for byte in word]
EOS = 1
Rpc = Any


async def speaking(job: Job) -> None:
    """A co-located worker that says IDS; an end-of-sequence token follows them."""
    end = job.submit.sampling.max_tokens
    for index in range(job.base, min(end, len(IDS))):
        job.send(index, (IDS[index],), length_if(index == end - 1))
    if job.base <= len(IDS) < end:
        job.send(len(IDS), (EOS,), FINISH_REASON_STOP)


def request(call: int = 1, tokens: Any = (), key: bytes = KEY, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        text="hello",
        request_id="mine",
        sampling=SamplingParams(**{"max_tokens": len(IDS), "seed": 7, **sampling}),
        resume=Resume(key=key, call=call, token_ids=tokens),
    )


@pytest.fixture
def talk(serve: Serve, stack: AsyncExitStack) -> Callable[..., Awaitable[tuple[FakeCluster, Rpc, Rpc]]]:
    """Starts two routers over a worker that speaks; returns the cluster, and Generate of both."""

    async def start(**options: Any) -> tuple[FakeCluster, Rpc, Rpc]:
        cluster = await serve(fake("colocated-0", speaking, max_context=128), **options)
        second = await stack.enter_async_context(second_router(cluster))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(second.address))
        return cluster, cluster.stub.Generate, InferenceServiceStub(channel).Generate

    return start


async def read(call: Any) -> list[GenerateResponse]:
    return [response async for response in call]


def text_of(responses: list[GenerateResponse]) -> str:
    return "".join(response.text for response in responses)


def tokens_of(responses: list[GenerateResponse]) -> list[int]:
    return [token for response in responses for token in response.token_ids]


@pytest.mark.parametrize(
    ("n", "sampling", "shown", "reason"),
    [
        (1, {}, TEXT, FINISH_REASON_LENGTH),
        (1, {"max_tokens": len(IDS) + 5}, TEXT, FINISH_REASON_STOP),
        (1, {"max_tokens": len(IDS) + 1, "min_tokens": len(IDS) + 1}, TEXT, FINISH_REASON_STOP),
        (1, {"stop": ["STOP"]}, TEXT[: TEXT.index("STOP")], FINISH_REASON_STOP),
        (1, {"stop": ["🙃 STOP a", "STO 🙂 off"]}, TEXT[: TEXT.index("🙃 STOP")], FINISH_REASON_STOP),
        (1, {"stop": ["STOP"], "min_tokens": 25}, TEXT, FINISH_REASON_LENGTH),
        (1, {"stop": ["ößer"], "min_tokens": 9}, TEXT, FINISH_REASON_LENGTH),
        (3, {"stop": ["STOP"]}, TEXT[: TEXT.index("STOP")], FINISH_REASON_STOP),
        # The text ends inside a character.
        (1, {"max_tokens": 13, "stop": ["nope"]}, None, FINISH_REASON_LENGTH),
    ],
)
@pytest.mark.some(4)
async def test_a_call_that_was_lost_anywhere_goes_on_with_the_same_text(
    talk: Any, n: int, sampling: dict[str, Any], shown: str | None, reason: int
) -> None:
    """Each completion goes on where it was; one that had ended has its last message once more."""

    def each(responses: list[GenerateResponse]) -> list[list[GenerateResponse]]:
        """The responses of each completion."""
        return [[response for response in responses if response.index == index] for index in range(n)]

    _, one, two = await talk()
    asked = request(**sampling)
    asked.n = n
    responses = await read(one(asked))
    whole = each(responses)
    for complete in whole:
        assert shown is None or text_of(complete) == shown
        assert (complete[-1].finish_reason, complete[-1].timeline.resumes) == (reason, 0)
    if "stop" in sampling and reason == FINISH_REASON_STOP:
        assert TEXT.encode()[: len(tokens_of(whole[0]))].decode().endswith(tuple(sampling["stop"]))
    for cut in range(len(responses) + 1):
        before = each(responses[:cut])
        again = request(2, tokens_of(before[0]), key=b"%16d" % cut, **sampling)
        again.n = n
        for had in before[1:]:
            again.resume.others.add(ids=tokens_of(had))
        for had, rest, complete in zip(before, each(await read(two(again))), whole, strict=True):
            assert text_of(had) + text_of(rest) == text_of(complete), cut
            assert tokens_of(had) + tokens_of(rest) == tokens_of(complete), cut
            assert not any(response.finish_reason for response in rest[:-1])
            last = rest[-1]
            assert (last.finish_reason, last.usage, last.timeline.resumes) == (reason, complete[-1].usage, 1), cut


async def test_a_later_call_ends_the_earlier_one_wherever_it_is(talk: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    cluster, one, two = await talk()
    (worker,) = cluster.workers.values()
    worker.script = silent
    bystander = asyncio.create_task(read(one(request(key=b"another client's", max_tokens=3))))
    other = await cluster.job("colocated-0")
    lost = asyncio.create_task(read(one(request())))
    first = await cluster.job("colocated-0", 1)
    assert first.submit.request_id != other.submit.request_id
    worker.script = speaking
    rest = await read(two(request(2, IDS[:5])))
    assert tokens_of(rest) == IDS[5:]
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await lost
    assert ended.value.code() is grpc.StatusCode.ABORTED
    # Also within one router, which need not have noticed that the earlier call is lost.
    worker.script = silent
    lost = asyncio.create_task(read(two(request(3, IDS[:6]))))
    await cluster.job("colocated-0", 3)
    worker.script = speaking
    assert tokens_of(await read(two(request(4, IDS[:7])))) == IDS[7:]
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await lost
    assert ended.value.code() is grpc.StatusCode.ABORTED
    assert not bystander.done()
    other.send(0, tuple(IDS[:3]), FINISH_REASON_LENGTH)
    assert tokens_of(await bystander) == IDS[:3]
    assert [record.resumes > 0 for record in cluster.records if record.outcome == "length"] == [True, True, False]
    assert cluster.outcomes.count("cancelled") == 2
    assert KEY.hex() not in caplog.text
    assert repr(KEY) not in caplog.text
    assert "attempt failed" not in caplog.text, "it is no failure of the workers"


async def test_a_stream_that_goes_on_waits_before_new_requests_and_is_not_refused(talk: Any) -> None:
    cluster, one, _ = await talk(max_queue=0)

    def load(free: int) -> Load:
        blocks = Blocks(total=100, free=free, held=100 - free, size=4)
        return Load(blocks=blocks, requests=Requests(free_slots=free))

    await cluster.report("colocated-0", load(0))
    waiting = asyncio.create_task(read(one(request(2, IDS[:5]))))
    await until(lambda: cluster.router.waiting == 1, "it waits")
    with pytest.raises(grpc.aio.AioRpcError, match="wait for workers with capacity"):
        await read(one(request(key=b"of a new request")))
    await cluster.report("colocated-0", load(100))
    assert tokens_of(await waiting) == IDS[5:]
    assert [record.ttft_seconds for record in cluster.records if record.resumes] == [None]


async def test_what_is_wrong_with_a_later_call_is_named(talk: Any) -> None:
    bad: list[tuple[GenerateRequest, str]] = [
        (request(key=b"short"), r"resume\.key: number of bytes is 5; allowed: 16 to 64"),
        (request(key=bytes(65)), r"resume\.key: number of bytes is 65; allowed: 16 to 64"),
        (request(0), r"resume\.call is 0; allowed: 1 or more"),
        (request(1, [40]), r"resume: number of token ids is 1; allowed: 0 in the request's first call"),
        (request(2, [40, 400]), r"resume\.token_ids\[1\] is 400; allowed: 0 to 399"),
        (
            request(2, [40] * 6, max_tokens=5),
            r"resume\.token_ids: number of ids is 6; allowed: up to max_tokens, 5 here",
        ),
        (request(2, IDS, stop=["STOP"]), r"number of ids is \d+; allowed: \d+, with which a stop string ends"),
    ]
    many = request(2, [40])
    many.resume.others.add()
    bad.append((many, r"resume\.others: number of lists is 1; allowed: up to 0, one less than n"))
    other = request(2, [40])
    other.n = 2
    other.resume.others.add(ids=[400])
    bad.append((other, r"resume\.others\[0\]\.ids\[0\] is 400; allowed: 0 to 399"))
    unseeded = request(2, [40])
    unseeded.sampling.ClearField("seed")
    bad.append((unseeded, r"sampling\.seed is None; allowed: the seed of the request's first call, or temperature 0"))

    _, one, two = await talk()
    for wrong, expected in bad:
        with pytest.raises(grpc.aio.AioRpcError, match=expected) as caught:
            await read(one(wrong))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    unseeded.sampling.temperature = 0
    assert len(tokens_of(await read(two(unseeded)))) == len(IDS) - 1


async def test_a_router_that_is_stopped_refuses_new_streams_and_ends_the_others_in_time(talk: Any) -> None:
    cluster, one, two = await talk()
    (worker,) = cluster.workers.values()
    worker.script = silent
    running = asyncio.create_task(read(one(request())))
    job = await cluster.job("colocated-0")
    stopping = asyncio.create_task(cluster.router.stop(1.0))
    with pytest.raises(grpc.aio.AioRpcError, match="router-0 is shutting down") as refused:
        await read(one(request(key=b"of a new request")))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not running.done()
    with pytest.raises(grpc.aio.AioRpcError, match="router-0 is shutting down") as ended:
        await running
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(job.cancelled.wait(), 1)
    await stopping
    worker.script = speaking
    assert tokens_of(await read(two(request(2)))) == IDS
