"""Bad input: INVALID_ARGUMENT names field, value and limit, without the prompt, and the router continues."""

import logging
import math
import re
from typing import Any

import grpc
import pytest

from kvrelay.client import InvalidRequest
from kvrelay.internal.v1.worker_pb2 import CONTEXT_LIMIT_OPTION, CONTEXT_LIMIT_POOL
from kvrelay.v1.inference_pb2 import ChatMessages, GenerateRequest, TokenizeRequest
from support.router_fakes import pair
from support.scenes import Serve
from support.tokenizers import byte_level_tokenizer

SECRET = "swordfish"
CONTEXT, VOCAB = 64, 400

RANGES: list[tuple[str, str, tuple[float, ...]]] = [
    ("temperature", "0 to 100", (math.nan, math.inf, -0.1, 100.1)),
    ("top_p", "above 0, up to 1", (0.0, 1.01, math.nan)),
    ("min_p", "0 to 1", (-0.5, math.nan)),
    ("presence_penalty", "-2 to 2", (2.1,)),
    ("frequency_penalty", "-2 to 2", (-3.0, math.nan)),
    ("repetition_penalty", "0.01 to 10", (0.0, 1e-30, math.inf)),
    ("logprobs", "0 to 20", (21,)),
    ("prompt_logprobs", "0 to 20", (21,)),
]
"""Options that are numbers, the text of what is allowed, and values that aren't."""
BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: value}, re.escape(f"sampling.{name} is {value}; allowed: {allowed}"))
        for name, allowed, values in RANGES
        for value in values
    ),
    ({"max_tokens": 0}, r"sampling\.max_tokens is 0; allowed: 1 or more"),
    ({"max_tokens": CONTEXT}, r"sampling\.max_tokens is 64; allowed: up to \d+: the prompt has \d+ tokens .* is 64"),
    ({"max_tokens": 5, "min_tokens": 6}, r"sampling\.min_tokens is 6; allowed: 0 to max_tokens, 5 here"),
    ({"stop": ["x"] * 17}, r"sampling\.stop: number of strings is 17; allowed: at most 16"),
    ({"stop": ["x", ""]}, r"sampling\.stop\[1\]: number of characters is 0; allowed: 1 to 256"),
    ({"stop": ["x" * 257]}, r"sampling\.stop\[0\]: number of characters is 257; allowed: 1 to 256"),
    ({"stop_token_ids": [1] * 65}, r"sampling\.stop_token_ids: number of ids is 65; allowed: at most 64"),
    ({"stop_token_ids": [1, VOCAB]}, r"sampling\.stop_token_ids\[1\] is 400; allowed: 0 to 399"),
    ({"logit_bias": {7: 101.0}}, r"sampling\.logit_bias\[7\] is 101\.0; allowed: -100 to 100"),
    ({"logit_bias": {7: math.nan}}, r"sampling\.logit_bias\[7\] is nan; allowed: -100 to 100"),
    ({"logit_bias": {VOCAB: 1.0}}, r"sampling\.logit_bias: id is 400; allowed: 0 to 399"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, r"sampling\.logit_bias: number of entries is 1025; .* most 1024"),
    ({"bad_words": ["x"] * 65}, r"sampling\.bad_words: number of strings is 65; allowed: at most 64"),
    ({"bad_words": [""]}, r"sampling\.bad_words\[0\]: number of characters is 0; allowed: 1 to 256"),
    ({"choice": ["a"] * 1025}, r"sampling\.constraint\.choice\.texts: number of texts is 1025; allowed: 1 to 1024"),
    ({"json_schema": '{"type"'}, r"sampling\.constraint\.json_schema is .*; allowed: a JSON Schema, as JSON"),
    ({"request_id": "a" * 129}, r"request_id is 'a+\.\.\.; allowed: 1 to 128 printable ASCII"),
    ({"request_id": "ä"}, r"request_id is 'ä'; allowed: 1 to 128 printable ASCII"),
    ({"request_id": "a\n"}, r"request_id is 'a\\n'; allowed: 1 to 128 printable ASCII"),
    ({"tenant": "t" * 129}, r"tenant is 't+\.\.\.; allowed: empty: this router knows no tenants; see router\.api_keys"),
]
"""Options of a request, and the error's text."""
BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", r"text is ''; allowed: at least 1 character"),
    ([], r"token_ids\.ids is \[\]; allowed: at least 1 id"),
    ([3, VOCAB, 2**32 - 1], r"token_ids\.ids\[1\] is 400; allowed: 0 to 399"),
    ([3] * CONTEXT, r"prompt: number of tokens is 64; allowed: up to 63: the model's context is 64"),
    (f"{SECRET} " * 50, r"prompt: number of tokens is \d+; allowed: up to 63"),
]


async def test_each_mistake_is_named_and_the_router_continues(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="kvrelay")
    cluster = await serve(*pair())
    mistakes = [(SECRET, options, expected) for options, expected in BAD_OPTIONS]
    mistakes += [(prompt, {"max_tokens": 1}, expected) for prompt, expected in BAD_PROMPTS]
    for prompt, options, expected in mistakes:
        with pytest.raises(InvalidRequest, match=expected) as caught:
            await cluster.client.complete(prompt, **options)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert SECRET not in str(caught.value)
    assert cluster.outcomes == ["invalid"] * len(mistakes)
    good = await cluster.client.complete(SECRET, max_tokens=3, top_k=10**6, stop=["x"] * 16, temperature=100)
    assert good.usage.completion_tokens == 3
    assert len(cluster.workers["prefill-0"].jobs) == 1
    assert caplog.records
    assert not any(SECRET in str(vars(record)) for record in caplog.records)


@pytest.mark.parametrize(
    ("context_limit", "named"),
    [
        (CONTEXT_LIMIT_POOL, r"the KV pool of a worker \(engine\.kv_memory_bytes\) holds 48 tokens"),
        (CONTEXT_LIMIT_OPTION, r"the workers' option engine\.max_context is 48"),
    ],
)
async def test_a_prompt_over_a_workers_limit_is_told_what_limits_it(
    serve: Serve, context_limit: int, named: str
) -> None:
    prefill, decode = pair()
    decode.model.max_context, decode.model.context_limit = 48, context_limit
    cluster = await serve(prefill, decode)
    client = cluster.client
    with pytest.raises(InvalidRequest, match=f"number of tokens is 50; allowed: up to 47: {named}"):
        await client.complete([3] * 50, max_tokens=1)
    with pytest.raises(InvalidRequest, match=f"allowed: up to 8: the prompt has 40 tokens and {named}"):
        await client.complete([3] * 40, max_tokens=9)
    with pytest.raises(InvalidRequest, match=f"number of bytes is 90000; allowed: up to [0-9]+, {named}"):
        await client.complete("a" * 90000, max_tokens=1)
    assert (await client.complete([3] * 40, max_tokens=8)).usage.completion_tokens == 8


async def test_bytes_that_are_no_request_are_refused_by_name(serve: Serve) -> None:
    cluster = await serve(*pair())
    generate = cluster.channel.unary_stream("/kvrelay.v1.InferenceService/Generate")
    tokenize = cluster.channel.unary_unary("/kvrelay.v1.InferenceService/Tokenize")
    good = GenerateRequest(text=SECRET).SerializeToString()
    bad = good.replace(SECRET[:1].encode(), b"\xff")
    for payload in (bad, b"\x0f\xff"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(payload).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "not a valid kvrelay.v1.GenerateRequest: " in str(caught.value.details())
        assert "not UTF-8" in str(caught.value.details())
        assert SECRET[1:] not in str(caught.value.details())
    with pytest.raises(grpc.aio.AioRpcError, match=r"not a valid kvrelay\.v1\.TokenizeRequest: .* not UTF-8"):
        await tokenize(TokenizeRequest(text="a").SerializeToString().replace(b"a", b"\xc0"))
    assert await generate(good).read()


async def test_other_calls(serve: Serve) -> None:
    tokenizer = byte_level_tokenizer()
    cluster = await serve(*pair())
    client = cluster.client
    info = await client.model_info()
    assert (info.name, info.vocab_size, info.max_context, info.eos_token_ids) == ("fake", VOCAB, CONTEXT, (1,))
    assert info.has_chat_template
    text = "größer 日本語 🙂"
    ids = await client.tokenize(text)
    assert ids == tokenizer.encode(text).ids
    assert await client.detokenize(ids) == text
    long = "def __init__(self):\n" * 3000
    assert await client.tokenize(long) == tokenizer.encode(long).ids
    chat = [{"role": "user", "content": "hi"}]
    assert await client.tokenize(chat) == tokenizer.encode("<s>user: hi\n<s>assistant:").ids
    # What a request leaves out is cut to what the context leaves.
    assert (await client.complete([3] * 60)).usage.completion_tokens == 4
    assert (await client.complete([3] * 63)).usage.completion_tokens == 1
    for request, expected in (
        (TokenizeRequest(messages=ChatMessages()), r"messages: number of messages is 0"),
        (TokenizeRequest(), r"input is None"),
        (TokenizeRequest(text=""), r"text is ''"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=expected):
            await cluster.stub.Tokenize(request)
    with pytest.raises(InvalidRequest, match=r"token_ids\[0\] is 400; allowed: 0 to 399"):
        await client.detokenize([VOCAB])
