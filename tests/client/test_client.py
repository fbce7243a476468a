"""The clients against a real router over scripted workers."""

import asyncio
import dataclasses
import gc
import math
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvrelay import client as package
from kvrelay.client import (
    AsyncClient,
    Cancelled,
    Chunk,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    KvrelayError,
    Timeline,
    Unavailable,
)
from kvrelay.client.messages import GenerateOptions, generate_request
from kvrelay.v1 import inference_pb2 as pb
from support.processes import wait_until
from support.router_fakes import FakeCluster, Job, background, decode_of, fake, pair, silent, token_at, tokens, until
from support.scenes import Serve


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCluster]:
    with background(tmp_path_factory.mktemp("router"), token_at) as cluster:
        yield cluster


def test_the_chunks_of_a_stream_are_its_completion(cluster: FakeCluster) -> None:
    with Client(cluster.router.address, timeout=10) as client:
        chunks = list(client.generate("hello", max_tokens=6, temperature=0))
        assert all(chunk.finish_reason is chunk.usage is chunk.timeline is None for chunk in chunks[:-1])
        completion = client.complete("hello", max_tokens=6, temperature=0)
        assert completion.text == "".join(chunk.text for chunk in chunks)
        assert completion.token_ids == tuple(token for chunk in chunks for token in chunk.token_ids)
        assert completion.finish_reason == chunks[-1].finish_reason == "length"
        assert completion.usage == chunks[-1].usage
        assert completion.timeline.transfer_bytes == 640
        ids = client.tokenize("hello")
        assert client.detokenize(ids) == "hello"
        assert client.complete(ids, max_tokens=2).usage.prompt_tokens == len(ids)
        chat = [{"role": "user", "content": "hello"}]
        assert client.complete(chat, max_tokens=2).usage.prompt_tokens == len(client.tokenize(chat))
        assert client.model_info().max_context == 64


def test_several_completions(cluster: FakeCluster) -> None:
    with Client(cluster.router.address, timeout=20) as client:
        chunks = list(client.generate("hello", max_tokens=6, n=3, seed=7))
        assert {chunk.index for chunk in chunks} == {0, 1, 2}
        ended = [chunk.index for chunk in chunks if chunk.finish_reason]
        assert sorted(ended) == [0, 1, 2]
        done = client.completions("hello", max_tokens=6, n=3, seed=7)
        for index, completion in enumerate(done):
            mine = [chunk for chunk in chunks if chunk.index == index]
            assert completion.text == "".join(chunk.text for chunk in mine)
            assert completion.token_ids == tokens(6)
            assert completion.seed == mine[0].seed
        assert len({completion.seed for completion in done}) == 3
        assert [completion.usage.prompt_tokens for completion in done] == [4, 0, 0]
        # Each is what a request of its own with its seed gives.
        assert client.complete("hello", max_tokens=6, seed=done[2].seed).text == done[2].text
        assert len(client.completions("hello", max_tokens=2)) == 1
        with pytest.raises(InvalidRequest, match="n is 3; allowed: 1 here; `completions` returns several"):
            client.complete("hello", n=3)

    async def test() -> None:
        async with AsyncClient(cluster.router.address, timeout=20) as client:
            again = await client.completions("hello", max_tokens=6, n=3, seed=7)
            assert [each.seed for each in again] == [each.seed for each in done]
            with pytest.raises(InvalidRequest, match="allowed: 1 here"):
                await client.complete("hello", n=2)

    asyncio.run(test())


@pytest.mark.parametrize("how", ["close", "del", "with"])
def test_leaving_a_stream_cancels_it_on_the_workers(cluster: FakeCluster, how: str) -> None:
    worker = cluster.workers["decode-0"]
    worker.script, script = silent, worker.script
    before = len(worker.jobs)
    try:
        with Client(cluster.router.address) as client:
            stream = client.generate("hello", max_tokens=6)
            next(stream)
            if how == "close":
                stream.close()
            elif how == "with":
                with stream:
                    pass
            else:
                del stream
                gc.collect()
            wait_until(lambda: len(worker.jobs) > before, "a job")
            wait_until(lambda: all(job.cancelled.is_set() for job in worker.jobs[before:]), "it is cancelled")
    finally:
        worker.script = script


def test_errors_of_the_blocking_client(cluster: FakeCluster) -> None:
    with Client(cluster.router.address) as client:
        with pytest.raises(InvalidRequest, match=r"sampling\.top_p is 2\.0") as caught:
            client.complete("hello", top_p=2.0)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(InvalidRequest, match="text is ''"):
            client.tokenize("")
        with pytest.raises(DeadlineExceeded):
            client.complete("hello", timeout=1e-6)
        stream = client.generate("hello", max_tokens=2)
        stream.close()
        with pytest.raises(Cancelled):
            list(stream)
    with Client("127.0.0.1:1") as client, pytest.raises(Unavailable):
        client.complete("hello", timeout=10)


def test_one_client_serves_many_threads(cluster: FakeCluster) -> None:
    with Client(cluster.router.address, timeout=20) as client, ThreadPoolExecutor(16) as threads:
        done = list(threads.map(lambda _: client.complete("hello", max_tokens=9), range(16)))
    assert [completion.token_ids for completion in done] == [tokens(9)] * 16


async def test_the_async_client(serve: Serve) -> None:
    async def decode(job: Job) -> None:
        if job.submit.sampling.max_tokens == 6:
            await decode_of()(job)

    cluster = await serve(fake("prefill-0"), fake("decode-0", decode))
    client = cluster.client
    chunks: list[Chunk] = [chunk async for chunk in client.generate("hello", max_tokens=6)]
    completion = await client.complete("hello", max_tokens=6)
    assert completion.token_ids == tuple(token for chunk in chunks for token in chunk.token_ids)
    with pytest.raises(DeadlineExceeded):
        await client.complete("hello", max_tokens=7, timeout=0.1)
    stream = client.generate("hello", max_tokens=7)
    await anext(stream)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await stream.aclose()
    with pytest.raises(Cancelled):
        await reading
    # A cancelled task stays cancelled: that is no error of the call.
    async with client.generate("hello", max_tokens=7) as stream:
        task = asyncio.create_task(client.complete("hello", max_tokens=7))
        await anext(stream)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: cluster.outcomes.count("cancelled") >= 2, "cancelled on the router")


async def test_a_reader_that_is_cancelled_as_its_request_is_sent_cancels_the_request(serve: Serve) -> None:
    cluster = await serve(*pair())
    cluster.workers["decode-0"].script = silent
    before = asyncio.all_tasks()
    stream = cluster.client.generate("hello", max_tokens=6)
    reading: asyncio.Task[Chunk] = asyncio.create_task(stream.__anext__())
    for sending in asyncio.all_tasks() - before - {reading}:
        sending.add_done_callback(lambda _: reading.cancel())
    await asyncio.wait([reading])
    assert reading.cancelled()
    assert await cluster.client.model_info(), "what was sent before has come, too"
    await cluster.idle(5)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("x", {"max_tokens": -1}, r"sampling\.max_tokens: .*-1"),
        ("x", {"max_tokens": 2**32}, r"sampling\.max_tokens: .*4294967296"),
        ("x", {"max_tokens": 1.5}, r"sampling\.max_tokens"),
        ("x", {"seed": -1}, r"sampling\.seed"),
        ("x", {"temperature": "hot"}, r"sampling\.temperature"),
        ("x", {"stop": [1]}, r"sampling\.stop"),
        ("x", {"stop_token_ids": ["a"]}, r"sampling\.stop_token_ids"),
        ("x", {"bad_words": "word"}, r"sampling\.bad_words: it is str; allowed: a list"),
        ("x", {"choice": "yes"}, r"sampling\.constraint\.choice\.texts: it is str; allowed: a list"),
        ("secret \ud800", {}, r"text: not valid Unicode"),
        ([1, -1], {}, r"token_ids\.ids: .*-1"),
        ([1, "a"], {}, r"token_ids\.ids"),
        (b"bytes", {}, r"prompt is bytes"),
        (7, {}, r"prompt is int"),
        ([{"role": "user"}], {}, r"messages\[0\]; allowed: an object with role and content"),
        ([{"role": "user", "content": 1}], {}, r"messages\[0\]\.content"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(prompt: Any, options: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        generate_request(prompt, options)
    assert "secret" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_requests_say_what_was_asked_and_nothing_else() -> None:
    assert generate_request("x", {}) == pb.GenerateRequest(text="x")
    assert not generate_request("x", {"temperature": None, "max_tokens": None}).sampling.ListFields()
    full: GenerateOptions = {
        "max_tokens": 1,
        "min_tokens": 1,
        "temperature": 0.0,
        "top_k": 2,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 2**64 - 1,
        "stop": "end",
        "stop_token_ids": [3],
        "ignore_eos": True,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {7: 1.0},
        "bad_words": ["x"],
        "logprobs": 0,
        "prompt_logprobs": 2,
        "regex": "a+",
        "tenant": "t",
        "request_id": "r",
        "model": "m",
        "n": 2,
        "priority": -1,
        "slo_class": "batch",
        "cache_salt": "salt",
        "session": "s",
        "timeout": 1.0,
    }
    other_constraints = {"json_schema", "json_object", "choice", "grammar"}
    assert full.keys() == GenerateOptions.__annotations__.keys() - other_constraints
    request = generate_request([], full)
    named = {"tenant", "request_id", "model", "n", "priority", "slo_class", "cache_salt", "session"}
    assert {name: getattr(request, name) for name in named} == {name: full[name] for name in named}  # type: ignore[literal-required]
    assert request.WhichOneof("input") == "token_ids"
    assert list(request.sampling.stop) == ["end"]
    sampled = set(full) - named - {"timeout", "regex"} | {"constraint"}
    assert {field.name for field, _ in request.sampling.ListFields()} == sampled
    assert math.isnan(generate_request("x", {"temperature": math.nan}).sampling.temperature)
    with pytest.raises(TypeError, match=r"max_token$"):
        generate_request("x", {"max_token": 1})  # type: ignore[typeddict-unknown-key]  # the mistake under test


@pytest.mark.parametrize(
    ("options", "constraint"),
    [
        ({"json_schema": {"type": "integer"}}, pb.Constraint(json_schema='{"type": "integer"}')),
        ({"json_schema": "{}"}, pb.Constraint(json_schema="{}")),
        ({"json_object": True}, pb.Constraint(json_object=True)),
        ({"regex": "a|b"}, pb.Constraint(regex="a|b")),
        ({"choice": ["a", "b"]}, pb.Constraint(choice=pb.Choice(texts=["a", "b"]))),
        ({"grammar": "start: A"}, pb.Constraint(grammar="start: A")),
        ({"json_object": False, "regex": None}, None),
    ],
)
def test_each_kind_of_constraint_is_sent(options: Any, constraint: pb.Constraint | None) -> None:
    assert generate_request("x", options).sampling == pb.SamplingParams(constraint=constraint)
    with pytest.raises(InvalidRequest, match="are given; allowed: one of them"):
        generate_request("x", {"regex": "a", "choice": ["b"]})


def test_values_mirror_the_contract() -> None:
    scores = {field.name for field in pb.TokenLogprobs.DESCRIPTOR.fields}
    assert {field.name for field in dataclasses.fields(package.TokenLogprobs)} == scores
    assert {f.name for f in dataclasses.fields(Timeline)} == {field.name for field in pb.Timeline.DESCRIPTOR.fields}
    assert {f.name for f in dataclasses.fields(package.Usage)} == {f.name for f in pb.Usage.DESCRIPTOR.fields}
    info = {field.name for field in pb.GetModelInfoResponse.DESCRIPTOR.fields}
    assert {field.name for field in dataclasses.fields(package.ModelInfo)} == info
    errors = [value for value in vars(package).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert all(issubclass(error, KvrelayError) for error in errors)


@pytest.mark.parametrize("module", ["kvrelay.client", "kvrelay.router.server"])
def test_neither_client_nor_router_needs_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd="/").returncode == 0
