"""The `openai` client against a router over scripted workers: what its users get from each kind of answer and error."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from kvrelay.internal.v1.worker_pb2 import Failure
from support.http_calls import HELLO, writer_of
from support.router_fakes import FakeCluster, FakeWorker, Job, fake, pair, token_at
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


async def test_models_and_what_is_not_there(call: Call) -> None:
    cluster, client = await call()
    assert [model.owned_by async for model in await client.models.list()] == ["kvrelay"]
    for unknown in (
        client.embeddings.create(model="fake", input="x"),
        client.responses.create(model="fake", input="x"),
        client.files.list(),
        client.with_options(base_url=cluster.http.base).completions.create(**ASKED),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await unknown
        assert caught.value.code == "unknown_url"
        assert "Invalid URL (" in str(caught.value)
        assert "POST /v1/chat/completions, POST /v1/completions" in str(caught.value)


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
