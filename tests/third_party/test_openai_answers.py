"""The `openai` client against a router over scripted workers: what its users get from each kind of answer."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from kvrelay.v1.inference_pb2 import FINISH_REASON_STOP, TokenLogprobs
from support.http_calls import HELLO, serving, text_of, token_at, writer_of
from support.router_fakes import FakeCluster, FakeWorker, Job, colocated_of, decode_of, prefill_of, run, until

MESSAGES: list[Any] = [{"role": "developer", "content": "be short"}, {"role": "user", "content": "hi"}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALLED = 'I\'ll add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
USAGE = {"include_usage": True}


class Point(BaseModel):
    x: int
    y: int


def writing(text: str) -> FakeWorker:
    return FakeWorker("colocated-0", "colocated", writer_of(text), max_context=1024)


@asynccontextmanager
async def calling(
    folder: Path, *workers: FakeWorker, make: Callable[..., Any] = AsyncOpenAI, **config: Any
) -> AsyncIterator[tuple[FakeCluster, Any]]:
    """A router, and a client of it."""
    async with serving(folder, *workers, **config) as (cluster, http):
        client = make(base_url=f"{http.base}/v1", api_key="none", max_retries=0, timeout=50)
        try:
            yield cluster, client
        finally:
            closed = client.close()
            if closed is not None:
                await closed


def test_completions_whole_and_streamed(tmp_path: Path) -> None:
    async def test() -> None:
        async with calling(tmp_path) as (_, client):
            asked: dict[str, Any] = {"model": "fake", **HELLO, "n": 2, "seed": 5, "user": "somebody"}
            whole = await client.completions.create(**asked)
            assert [choice.text for choice in whole.choices] == [text_of([40, 41, 42, 43])] * 2
            assert [choice.finish_reason for choice in whole.choices] == ["length"] * 2
            assert whole.usage.completion_tokens == 8
            assert whole.usage.total_tokens == whole.usage.prompt_tokens + 8
            texts, chunks = {0: "", 1: ""}, []
            async for chunk in await client.completions.create(**asked, stream=True, stream_options=USAGE):
                chunks.append(chunk)
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
            assert list(texts.values()) == [choice.text for choice in whole.choices]
            assert chunks[-1].usage == whole.usage
            fingerprints = {each.system_fingerprint for each in (whole, *chunks)}
            assert len(fingerprints) == 1
            assert str(fingerprints.pop()).startswith("fp_")

    run(test)


def test_a_chat_with_all_that_openai_has_beside_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with calling(tmp_path, writing("def name")) as (_, client):
            asked: dict[str, Any] = {
                "model": "fake",
                "messages": MESSAGES,
                "max_completion_tokens": 400,
                "metadata": {"run": "1"},
                "store": False,
                "service_tier": "auto",
                "safety_identifier": "u",
                "prompt_cache_key": "k",
                "extra_headers": {"X-Request-Id": "mine"},
            }
            whole = await client.chat.completions.create(**asked)
            assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("def name", "stop")
            assert whole.choices[0].message.refusal is None
            assert whole._request_id == "mine"
            assert whole.id == "chatcmpl-mine"
            raw = await client.chat.completions.with_raw_response.create(**asked, extra_body={"request_id": "other"})
            assert raw.headers["x-request-id"] == "other"
            assert raw.parse().id == "chatcmpl-other"
            async with client.chat.completions.stream(**asked, stream_options=USAGE) as stream:
                async for _ in stream:
                    pass
                final = await stream.get_final_completion()
            assert final.choices[0].message.content == whole.choices[0].message.content
            assert final.usage == whole.usage

    run(test)


def test_tools_are_called_whole_and_streamed(tmp_path: Path) -> None:
    async def test() -> None:
        asked: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": [ADD]}
        async with calling(tmp_path, writing(CALLED), tool_parser="hermes") as (_, client):
            whole = (await client.chat.completions.create(**asked)).choices[0]
            (call,) = whole.message.tool_calls
            assert (whole.finish_reason, whole.message.content) == ("tool_calls", "I'll add.")
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
            async with client.chat.completions.stream(**asked) as stream:
                kinds = [event.type async for event in stream]
                streamed = (await stream.get_final_completion()).choices[0]
            assert "tool_calls.function.arguments.delta" in kinds
            assert streamed.message.tool_calls[0].function.parsed_arguments == {"a": 1}
            assert streamed.finish_reason == "tool_calls"
            # What was called goes back with its result, as the client's own objects.
            answer = {"role": "tool", "tool_call_id": call.id, "content": "1"}
            for message in (whole.message, streamed.message):
                again = {**asked, "messages": [*MESSAGES, message, answer]}
                assert (await client.chat.completions.create(**again)).choices

    run(test)


def test_a_structured_answer_is_parsed(tmp_path: Path) -> None:
    async def test() -> None:
        worker = writing('{"x": 1, "y": -2}')
        async with calling(tmp_path, worker) as (_, client):
            asked: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "response_format": Point}
            parsed = await client.chat.completions.parse(**asked)
            assert parsed.choices[0].message.parsed == Point(x=1, y=-2)
            async with client.chat.completions.stream(**asked) as stream:
                assert (await stream.get_final_completion()).choices[0].message.parsed == Point(x=1, y=-2)
            for job in worker.jobs:
                assert json.loads(job.submit.sampling.constraint.json_schema)["required"] == ["x", "y"]

    run(test)


def test_logprobs_of_both_apis(tmp_path: Path) -> None:
    async def script(job: Job) -> None:
        values = [TokenLogprobs(logprob=-0.5, top_ids=[71, 70], top_logprobs=[-0.25, -0.5], rank=2)]
        job.send(0, (70,), logprobs=values)
        job.send(1, (71,), FINISH_REASON_STOP, logprobs=values)

    async def test() -> None:
        async with calling(tmp_path, FakeWorker("colocated-0", "colocated", script)) as (_, client):
            text = (await client.completions.create(model="fake", prompt="a", logprobs=2)).choices[0]
            assert text.logprobs.token_logprobs == [-0.5, -0.5]
            assert text.logprobs.tokens == [text_of([70]), text_of([71])]
            asked: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
            chat = (await client.chat.completions.create(**asked)).choices[0]
            assert [entry.logprob for entry in chat.logprobs.content] == [-0.5, -0.5]
            assert [top.logprob for top in chat.logprobs.content[0].top_logprobs] == [-0.25, -0.5]
            async with client.chat.completions.stream(**asked) as stream:
                async for _ in stream:
                    pass
                assert (await stream.get_final_completion()).choices[0].logprobs == chat.logprobs

    run(test)


def test_models(tmp_path: Path) -> None:
    async def test() -> None:
        async with calling(tmp_path, served_model_name=("main", "org/other")) as (_, client):
            assert [model.id async for model in await client.models.list()] == ["main", "org/other"]
            assert (await client.models.retrieve("org/other")).owned_by == "kvrelay"

    run(test)


def test_the_blocking_client_in_threads(tmp_path: Path) -> None:
    async def test() -> None:
        async with calling(tmp_path, make=OpenAI) as (cluster, client):

            def ask() -> str:
                chunks = client.completions.create(model="fake", **HELLO, stream=True)
                return "".join(chunk.choices[0].text for chunk in chunks)

            texts = await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(8)))
            assert set(texts) == {text_of([40, 41, 42, 43])}
            assert cluster.router._front.running == 0

    run(test)


def test_many_streams_at_once(tmp_path: Path) -> None:
    count = 40

    async def test() -> None:
        workers = (
            FakeWorker("prefill-0", "prefill", prefill_of(token_at)),
            FakeWorker("decode-0", "decode", decode_of(token_at, pause=0.001)),
        )
        async with calling(tmp_path, *workers) as (cluster, client):

            async def ask(length: int) -> str:
                stream = await client.completions.create(model="fake", prompt="hello", max_tokens=length, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            lengths = [1 + at % 50 for at in range(count)]
            texts = await asyncio.gather(*map(ask, lengths))
            assert texts == [text_of(list(range(40, 40 + length))) for length in lengths]
            await until(lambda: cluster.router._front.running == 0, "nothing runs")

    run(test)


@pytest.mark.parametrize("way", ["break", "close", "task"])
def test_a_stream_that_is_left_frees_its_workers(tmp_path: Path, way: str) -> None:
    async def some(job: Job) -> None:
        job.send(job.base, (40,))

    async def test() -> None:
        async with calling(tmp_path, FakeWorker("colocated-0", "colocated", some)) as (cluster, client):
            stream = await client.completions.create(model="fake", prompt="hello", stream=True)
            if way == "break":
                async with stream:
                    async for _ in stream:
                        break
            elif way == "close":
                await anext(stream)
                await stream.close()
            else:
                task = asyncio.create_task(anext(stream))
                await task
                waiting = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                await stream.close()
            job = await cluster.job("colocated-0")
            await asyncio.wait_for(job.cancelled.wait(), 5)
            await until(lambda: cluster.router._front.running == 0, "nothing runs")
            assert [record.outcome for record in cluster.records] == ["cancelled"]

    run(test)


def test_a_worker_that_answers_after_all_serves_the_next_one(tmp_path: Path) -> None:
    """A connection is used again after an answer, whole or streamed."""

    async def test() -> None:
        async with calling(tmp_path, FakeWorker("colocated-0", "colocated", colocated_of(token_at))) as (_, client):
            for stream in (False, True, False, True):
                answer = await client.completions.create(model="fake", **HELLO, stream=stream)
                if stream:
                    assert [chunk async for chunk in answer]

    run(test)
