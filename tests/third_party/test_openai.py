"""The `openai` client against a router over scripted workers: what its users get from each kind of answer and error."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from kvrelay.internal.v1.worker_pb2 import Failure
from support.http_calls import HELLO, text_of, writer_of
from support.router_fakes import FakeCluster, FakeWorker, Job, colocated_of, fake, pair, silent, token_at, until
from support.scenes import Serve

Call = Callable[..., Awaitable[tuple[FakeCluster, AsyncOpenAI]]]
MESSAGES: list[Any] = [{"role": "developer", "content": "be short"}, {"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "fake", **HELLO}
CHAT: dict[str, Any] = {"model": "fake", "messages": MESSAGES}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALLED = 'I\'ll add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
"""Text with a tool call in Hermes' form."""
USAGE = {"include_usage": True}


class Point(BaseModel):
    x: int
    y: int


def writing(text: str) -> FakeWorker:
    return fake("colocated-0", writer_of(text), max_context=1024)


@pytest.fixture
def call(serve: Serve, stack: AsyncExitStack) -> Call:
    """Starts a router over workers, and makes a client of it that tries nothing again."""

    async def made(*workers: FakeWorker, **config: Any) -> tuple[FakeCluster, AsyncOpenAI]:
        cluster = await serve(*(workers or pair()), **config)
        client = AsyncOpenAI(base_url=f"{cluster.http.base}/v1", api_key="none", max_retries=0, timeout=50)
        stack.push_async_callback(client.close)
        return cluster, client

    return made


async def test_completions_whole_and_streamed(call: Call) -> None:
    _, client = await call()
    asked = {**ASKED, "n": 2, "seed": 5, "user": "somebody"}
    whole = await client.completions.create(**asked)
    assert [choice.text for choice in whole.choices] == [text_of([40, 41, 42, 43])] * 2
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 2
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 8
    texts, chunks = {0: "", 1: ""}, []
    async for chunk in await client.completions.create(**asked, stream=True, stream_options=USAGE):
        chunks.append(chunk)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert chunks[-1].usage == whole.usage
    (fingerprint,) = {each.system_fingerprint for each in (whole, *chunks)}
    assert str(fingerprint).startswith("fp_")


async def test_a_chat_with_all_that_openai_has_beside_it(call: Call) -> None:
    _, client = await call(writing("def name"))
    asked: dict[str, Any] = {
        **CHAT,
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
    assert (whole._request_id, whole.id) == ("mine", "chatcmpl-mine")
    raw = await client.chat.completions.with_raw_response.create(**asked, extra_body={"request_id": "other"})
    assert (raw.headers["x-request-id"], raw.parse().id) == ("other", "chatcmpl-other")
    async with client.chat.completions.stream(**asked, stream_options=USAGE) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage == whole.usage


async def test_tools_are_called_whole_and_streamed(call: Call) -> None:
    _, client = await call(writing(CALLED), tool_parser="hermes")
    asked = {**CHAT, "tools": [ADD]}
    whole = (await client.chat.completions.create(**asked)).choices[0]
    (called,) = whole.message.tool_calls
    assert (called.type, called.id[:5]) == ("function", "call_")
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "I'll add.")
    assert (called.function.name, json.loads(called.function.arguments)) == ("add", {"a": 1})
    async with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        streamed = (await stream.get_final_completion()).choices[0]
    assert kinds.count("tool_calls.function.arguments.delta") > 1
    assert streamed.message.tool_calls[0].function.parsed_arguments == {"a": 1}
    assert (streamed.finish_reason, streamed.message.content) == ("tool_calls", "I'll add.")
    # What was called goes back with its result, as the client's own objects.
    answer = {"role": "tool", "tool_call_id": called.id, "content": "1"}
    for message in (whole.message, streamed.message):
        again = {**asked, "messages": [*MESSAGES, message, answer]}
        assert (await client.chat.completions.create(**again)).choices
    # Without tools, or with none of them to be called, the text is the model's own.
    for change in ({"tools": [ADD], "tool_choice": "none"}, {}):
        (choice,) = (await client.chat.completions.create(**CHAT, **change)).choices
        assert (choice.finish_reason, choice.message.content) == ("stop", CALLED)


async def test_a_structured_answer_is_parsed(call: Call) -> None:
    worker = writing('{"x": 1, "y": -2}')
    _, client = await call(worker)
    asked = {**CHAT, "response_format": Point}
    parsed = await client.chat.completions.parse(**asked)
    assert parsed.choices[0].message.parsed == Point(x=1, y=-2)
    async with client.chat.completions.stream(**asked) as stream:
        assert (await stream.get_final_completion()).choices[0].message.parsed == Point(x=1, y=-2)
    for job in worker.jobs:
        assert json.loads(job.submit.sampling.constraint.json_schema)["required"] == ["x", "y"]


async def test_the_blocking_client_in_threads(call: Call) -> None:
    cluster, _ = await call()

    def ask(client: OpenAI) -> str:
        chunks = client.completions.create(**ASKED, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with OpenAI(base_url=f"{cluster.http.base}/v1", api_key="none", max_retries=0, timeout=50) as client:
        texts = await asyncio.gather(*(asyncio.to_thread(ask, client) for _ in range(8)))
    assert set(texts) == {text_of([40, 41, 42, 43])}
    assert cluster.calls == 0


@pytest.mark.parametrize("way", ["break", "close", "task"])
async def test_a_stream_that_is_left_frees_its_workers(call: Call, way: str) -> None:
    async def some(job: Job) -> None:
        job.send(job.base, (token_at(job.base),))

    cluster, client = await call(fake("colocated-0", some))
    stream = await client.completions.create(model="fake", prompt="hello", stream=True)
    if way == "break":
        async with stream:
            async for _ in stream:
                break
    else:
        await anext(stream)
        if way == "task":
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await stream.close()
    await asyncio.wait_for((await cluster.job("colocated-0")).cancelled.wait(), 5)
    await cluster.idle()
    assert cluster.outcomes == ["cancelled"]


async def test_a_bad_request_names_its_field(call: Call) -> None:
    """The class of the exception and its fields; each mistake is in tests/router/faces/http/test_http_states.py."""
    _, client = await call()
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(**{**ASKED, "temperature": 101.5})
    error = caught.value
    assert (error.param, error.code, error.type) == ("temperature", "decimal_above_max_value", "invalid_request_error")
    assert error.request_id


async def test_models_and_what_is_not_there(call: Call) -> None:
    cluster, client = await call(served_model_name=("main", "org/other"))
    assert [model.id async for model in await client.models.list()] == ["main", "org/other"]
    assert (await client.models.retrieve("org/other")).owned_by == "kvrelay"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(**{**ASKED, "model": "gpt-5"})
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-5")
    for unknown in (
        client.embeddings.create(model="main", input="x"),
        client.responses.create(model="main", input="x"),
        client.files.list(),
        client.with_options(base_url=cluster.http.base).completions.create(**{**ASKED, "model": "main"}),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await unknown
        assert caught.value.code == "unknown_url"
        assert "Invalid URL (" in str(caught.value)
        assert "POST /v1/chat/completions, POST /v1/completions" in str(caught.value)


async def test_the_client_waits_as_long_as_it_is_told(call: Call) -> None:
    """The client's own retries read Retry-After; without retries, RateLimitError has it."""
    worker = fake("colocated-0", silent)
    cluster, client = await call(worker, max_requests=1)
    running = asyncio.create_task(client.completions.create(**ASKED))
    job = await cluster.job("colocated-0")
    with pytest.raises(openai.RateLimitError) as caught:
        await client.completions.create(**ASKED)
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.response.headers["retry-after"] == "1"
    started = time.monotonic()
    patient = asyncio.create_task(client.with_options(max_retries=2).completions.create(**ASKED))
    await until(lambda: cluster.outcomes.count("exhausted") == 2, "it was refused")
    worker.script = colocated_of()
    await worker.script(job)
    assert (await running).choices
    assert (await patient).choices
    assert time.monotonic() - started > 0.9
    assert cluster.outcomes.count("exhausted") == 2


async def test_a_stream_that_has_begun_ends_with_its_error(call: Call) -> None:
    begun = asyncio.Event()

    async def late(job: Job) -> None:
        job.send(0, (token_at(0),))
        await begun.wait()
        job.fail(Failure.CODE_INTERNAL)

    _, client = await call(fake("colocated-0", late))
    stream = await client.completions.create(**ASKED, stream=True)
    assert await anext(stream)
    begun.set()
    with pytest.raises(openai.APIError) as broken:
        async for _ in stream:
            pass
    assert not isinstance(broken.value, openai.APIConnectionError)
    assert (broken.value.type, broken.value.code) == ("server_error", None)
