"""The HTTP face over scripted workers: what OpenAI's clients send and get."""

import asyncio
from typing import Any

import grpc
import pytest

from kvrelay.client import InvalidRequest
from kvrelay.internal.v1.worker_pb2 import Failure
from kvrelay.router.request.validation import completion_seed
from kvrelay.v1.inference_pb2 import (
    FINISH_REASON_STOP,
    TokenLogprobs,
)
from support.http_calls import CHAT, HELLO, text_of, usage_of, writer_of
from support.router_fakes import Job, after, decode_of, fake, pair, until
from support.scenes import Serve


async def test_both_apis_give_the_tokens_of_grpc_whole_and_streamed(serve: Serve) -> None:
    cluster = await serve(*pair())
    http = cluster.http
    expected = (await cluster.client.complete("hello", max_tokens=4)).text
    status, whole = await http.post("/v1/completions", {**HELLO, "return_token_ids": True})
    assert status == 200
    assert whole["object"] == "text_completion"
    assert whole["model"] == "fake"
    assert whole["choices"] == [
        {"index": 0, "text": expected, "logprobs": None, "finish_reason": "length", "token_ids": [40, 41, 42, 43]}
    ]
    assert whole["usage"] == usage_of(4, 4, 1)
    chunks = await http.stream("/v1/completions", HELLO)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    status, chat = await http.post("/v1/chat/completions", CHAT)
    assert status == 200
    message = {"role": "assistant", "content": expected, "refusal": None}
    assert chat["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    chunks = await http.stream("/v1/chat/completions", CHAT)
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    (fingerprint,) = {each["system_fingerprint"] for each in (whole, chat, *chunks)}
    assert fingerprint.startswith("fp_")


async def test_every_form_of_a_prompt_is_served_in_order(serve: Serve) -> None:
    cluster = await serve(*pair())
    for prompt, prompts in (("hello", 1), ([5, 6, 7], 1), (["hello", "def"], 2), ([[5, 6, 7], [8]], 2)):
        status, answer = await cluster.http.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "n": 2})
        assert status == 200, answer
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * prompts))
        assert answer["usage"]["completion_tokens"] == 4 * prompts
    echoed = {"prompt": ["hello", [40, 41]], "max_tokens": 1, "echo": True, "n": 2}
    _, answer = await cluster.http.post("/v1/completions", echoed)
    assert [choice["text"] for choice in answer["choices"]] == ["helloG"] * 2 + ["GHG"] * 2
    assert cluster.calls == 0


async def test_usage_comes_at_the_end_of_a_stream_or_in_every_chunk_or_not_at_all(serve: Serve) -> None:
    http = (await serve(fake("colocated-0", writer_of("def name")))).http
    for path, body in (("/v1/completions", HELLO), ("/v1/chat/completions", CHAT)):
        _, whole = await http.post(path, body)
        chunks = await http.stream(path, body)
        assert all("usage" not in chunk for chunk in chunks)
        options: dict[str, Any] = {"include_usage": True}
        *chunks, last = await http.stream(path, {**body, "stream_options": options})
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        options["continuous_usage_stats"] = True
        *chunks, last = await http.stream(path, {**body, "stream_options": options})
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert chunks[-1]["usage"] == last["usage"] == whole["usage"]


async def test_completions_of_one_prompt_begin_when_its_kv_is_cached_and_have_seeds_of_their_own(serve: Serve) -> None:
    begin, prefill = asyncio.Event(), fake("prefill-0")
    cluster = await serve(prefill, fake("decode-0", after(begin, decode_of())))
    task = asyncio.create_task(cluster.http.post("/v1/completions", {**HELLO, "n": 3, "seed": 11, "max_tokens": 5}))
    first = await cluster.job("decode-0")
    assert (await cluster.http.get("/health"))[0] == 200
    assert [job.submit.sampling.seed for job in prefill.jobs] == [11]
    begin.set()
    status, answer = await task
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [job.submit.sampling.seed for job in prefill.jobs] == [completion_seed(11, index) for index in range(3)]
    assert len({job.submit.request_id for job in prefill.jobs}) == 3
    assert first.submit.sampling.seed == 11
    # The prompt counts once, and what later completions found in the caches isn't a part of the answer.
    assert answer["usage"] == usage_of(4, 15, 1)
    await until(lambda: len(cluster.records) == 3, "each completion is noted")
    assert sum(record.usage().prompt_tokens for record in cluster.records) == 4


async def test_grpc_names_the_model_the_seeds_and_the_limit_of_completions(serve: Serve) -> None:
    cluster = await serve(*pair(), served_model_name=("main", "other"))
    done = await cluster.client.completions("hello", model="other", n=3, seed=7, max_tokens=4)
    assert [each.seed for each in done] == [completion_seed(7, index) for index in range(3)]
    for options, code, said in (
        ({"model": "fake"}, grpc.StatusCode.NOT_FOUND, "model is 'fake'; allowed: 'main', 'other', or empty"),
        ({"n": 129}, grpc.StatusCode.INVALID_ARGUMENT, "n is 129; allowed: 1 to 128"),
    ):
        with pytest.raises(InvalidRequest, match=said) as caught:
            await cluster.client.completions("hello", **options)
        assert caught.value.code is code


async def test_a_failed_completion_ends_the_others(serve: Serve) -> None:
    async def script(job: Job) -> None:
        if job.submit.sampling.seed == completion_seed(5, 1):
            job.fail(Failure.CODE_INTERNAL)
        else:
            job.send(job.base, (40, 41))

    worker = fake("colocated-0", script)
    cluster = await serve(worker)
    status, answer = await cluster.http.post("/v1/completions", {**HELLO, "n": 3, "seed": 5, "max_tokens": 30})
    assert status == 500
    assert answer["error"]["type"] == "server_error"
    for job in worker.jobs:
        if job.submit.sampling.seed != completion_seed(5, 1):
            await asyncio.wait_for(job.cancelled.wait(), 5)
    assert cluster.calls == 0


async def test_tokenize_and_detokenize(serve: Serve) -> None:
    http = (await serve(*pair())).http
    text = "def name größer 🙂"
    _, answer = await http.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 64
    assert await http.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": text})
    _, chat = await http.post("/tokenize", {"messages": CHAT["messages"]})
    _, completion = await http.post("/v1/chat/completions", CHAT)
    assert chat["count"] == completion["usage"]["prompt_tokens"]


async def test_logprobs_have_the_forms_of_both_apis(serve: Serve) -> None:
    def values(ids: tuple[int, ...]) -> list[TokenLogprobs]:
        tops = ((at + 1, at) for at in ids)
        return [TokenLogprobs(logprob=-0.5, top_ids=top, top_logprobs=[-0.25, -0.5], rank=2) for top in tops]

    async def script(job: Job) -> None:
        sampling = job.submit.sampling
        prompt = job.submit.token_ids[: job.submit.prompt_tokens]
        asked = values(tuple(prompt[1:])) if sampling.HasField("prompt_logprobs") else []
        first = values((70,)) if sampling.HasField("logprobs") else []
        job.send(0, (70,), logprobs=first, prompt_logprobs=asked, prompt_logprobs_first=1)
        job.send(1, (71,), FINISH_REASON_STOP, logprobs=values((71,)) if first else [])

    http = (await serve(fake("colocated-0", script))).http
    body = {"prompt": [72, 73], "max_tokens": 2, "logprobs": 2, "echo": True}
    _, whole = await http.post("/v1/completions", body)
    assert "choices" in whole, whole
    logprobs = whole["choices"][0]["logprobs"]
    names = [text_of([token]) for token in (72, 73, 70, 71)]
    assert logprobs["tokens"] == names
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {text_of([74]): -0.25, names[1]: -0.5}
    assert logprobs["text_offset"] == [sum(map(len, names[:at])) for at in range(4)]
    chunks = await http.stream("/v1/completions", body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [name for part in parts if part for name in part["tokens"]] == names
    _, alone = await http.post("/v1/completions", {**body, "max_tokens": 0})
    assert alone["choices"][0]["logprobs"]["tokens"] == names[:2]
    assert alone["usage"]["completion_tokens"] == 0
    _, chat = await http.post("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2})
    content = chat["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == names[2:]
    assert content[0]["bytes"] == list(names[2].encode())
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.25, -0.5]
    chunks = await http.stream("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2})
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == content
