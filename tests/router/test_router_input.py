"""Bad input: INVALID_ARGUMENT names field, value and limit, without the prompt, and the router continues."""

import logging
import math
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvrelay.client import AsyncClient, InvalidRequest, KvrelayError
from kvrelay.internal.v1.worker_pb2 import CONTEXT_LIMIT_OPTION, CONTEXT_LIMIT_POOL
from kvrelay.router.errors import InvalidArgument
from kvrelay.router.grpc_face import parse
from kvrelay.v1.inference_pb2 import ChatMessages, GenerateRequest, SamplingParams, TokenIds, TokenizeRequest
from support.router_fakes import fake_cluster, pair, run
from support.tokenizers import TEMPLATE, byte_level_tokenizer

SECRET = "swordfish"
CONTEXT, VOCAB = 64, 400

# (options, the error's text)
BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, r"sampling\.max_tokens is 0; allowed: 1 or more"),
    ({"max_tokens": CONTEXT}, r"sampling\.max_tokens is 64; allowed: up to \d+: the prompt has \d+ tokens .* is 64"),
    ({"max_tokens": 5, "min_tokens": 6}, r"sampling\.min_tokens is 6; allowed: 0 to max_tokens, 5 here"),
    ({"temperature": math.nan}, r"sampling\.temperature is nan; allowed: 0 to 100"),
    ({"temperature": math.inf}, r"sampling\.temperature is inf; allowed: 0 to 100"),
    ({"temperature": -0.1}, r"sampling\.temperature is -0\.1; allowed: 0 to 100"),
    ({"temperature": 100.1}, r"sampling\.temperature is 100\.1; allowed: 0 to 100"),
    ({"top_p": 0.0}, r"sampling\.top_p is 0\.0; allowed: above 0, up to 1"),
    ({"top_p": 1.01}, r"sampling\.top_p is 1\.01; allowed: above 0, up to 1"),
    ({"top_p": math.nan}, r"sampling\.top_p is nan; allowed: above 0, up to 1"),
    ({"min_p": -0.5}, r"sampling\.min_p is -0\.5; allowed: 0 to 1"),
    ({"min_p": math.nan}, r"sampling\.min_p is nan; allowed: 0 to 1"),
    ({"stop": ["x"] * 17}, r"sampling\.stop: number of strings is 17; allowed: at most 16"),
    ({"stop": ["x", ""]}, r"sampling\.stop\[1\]: number of characters is 0; allowed: 1 to 256"),
    ({"stop": ["x" * 257]}, r"sampling\.stop\[0\]: number of characters is 257; allowed: 1 to 256"),
    ({"stop_token_ids": [1] * 65}, r"sampling\.stop_token_ids: number of ids is 65; allowed: at most 64"),
    ({"stop_token_ids": [1, VOCAB]}, r"sampling\.stop_token_ids\[1\] is 400; allowed: 0 to 399"),
    ({"presence_penalty": 2.1}, r"sampling\.presence_penalty is 2\.1; allowed: -2 to 2"),
    ({"frequency_penalty": -3.0}, r"sampling\.frequency_penalty is -3\.0; allowed: -2 to 2"),
    ({"frequency_penalty": math.nan}, r"sampling\.frequency_penalty is nan; allowed: -2 to 2"),
    ({"repetition_penalty": 0.0}, r"sampling\.repetition_penalty is 0\.0; allowed: 0\.01 to 10"),
    ({"repetition_penalty": 1e-30}, r"sampling\.repetition_penalty is 1e-30; allowed: 0\.01 to 10"),
    ({"repetition_penalty": math.inf}, r"sampling\.repetition_penalty is inf; allowed: 0\.01 to 10"),
    ({"logit_bias": {7: 101.0}}, r"sampling\.logit_bias\[7\] is 101\.0; allowed: -100 to 100"),
    ({"logit_bias": {7: math.nan}}, r"sampling\.logit_bias\[7\] is nan; allowed: -100 to 100"),
    ({"logit_bias": {VOCAB: 1.0}}, r"sampling\.logit_bias: id is 400; allowed: 0 to 399"),
    (
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        r"sampling\.logit_bias: number of entries is 1025; allowed: at most 1024",
    ),
    ({"bad_words": ["x"] * 65}, r"sampling\.bad_words: number of strings is 65; allowed: at most 64"),
    ({"bad_words": [""]}, r"sampling\.bad_words\[0\]: number of characters is 0; allowed: 1 to 256"),
    ({"logprobs": 21}, r"sampling\.logprobs is 21; allowed: 0 to 20"),
    ({"prompt_logprobs": 21}, r"sampling\.prompt_logprobs is 21; allowed: 0 to 20"),
    ({"choice": ["a"] * 1025}, r"sampling\.constraint\.choice\.texts: number of texts is 1025; allowed: 1 to 1024"),
    ({"json_schema": '{"type"'}, r"sampling\.constraint\.json_schema is .*; allowed: a JSON Schema, as JSON"),
    ({"request_id": "a" * 129}, r"request_id is 'a+\.\.\.; allowed: 1 to 128 printable ASCII"),
    ({"request_id": "ä"}, r"request_id is 'ä'; allowed: 1 to 128 printable ASCII"),
    ({"request_id": "a\n"}, r"request_id is 'a\\n'; allowed: 1 to 128 printable ASCII"),
    ({"tenant": "t" * 129}, r"tenant is 't+\.\.\.; allowed: empty: this router knows no tenants; see router\.api_keys"),
]

BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", r"text is ''; allowed: at least 1 character"),
    ([], r"token_ids\.ids is \[\]; allowed: at least 1 id"),
    ([3, VOCAB, 2**32 - 1], r"token_ids\.ids\[1\] is 400; allowed: 0 to 399"),
    ([3] * CONTEXT, r"prompt: number of tokens is 64; allowed: up to 63: the model's context is 64"),
    (f"{SECRET} " * 50, r"prompt: number of tokens is \d+; allowed: up to 63"),
]


def test_each_mistake_is_named_and_the_router_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with fake_cluster(tmp_path, *pair(lambda index: 40 + index)) as cluster:
            async with AsyncClient(cluster.router.address, timeout=10) as client:
                for options, expected in BAD_OPTIONS:
                    with pytest.raises(InvalidRequest, match=expected) as caught:
                        await client.complete(SECRET, **options)
                    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
                    assert SECRET not in str(caught.value)
                for prompt, expected in BAD_PROMPTS:
                    with pytest.raises(InvalidRequest, match=expected) as caught:
                        await client.complete(prompt, max_tokens=1)
                    assert SECRET not in str(caught.value)
                count = len(BAD_OPTIONS) + len(BAD_PROMPTS)
                assert [record.outcome for record in cluster.records] == ["invalid"] * count
                completion = await client.complete(SECRET, max_tokens=3, top_k=10**6, stop=["x"] * 16, temperature=100)
                assert completion.usage.completion_tokens == 3
            assert len(cluster.workers["prefill-0"].jobs) == 1

    with caplog.at_level(logging.DEBUG, logger="kvrelay"):
        run(test)
    assert caplog.records
    assert not any(SECRET in str(vars(record)) for record in caplog.records)


@pytest.mark.parametrize(
    ("context_limit", "named"),
    [
        (CONTEXT_LIMIT_POOL, r"the KV pool of a worker \(engine\.kv_memory_bytes\) holds 48 tokens"),
        (CONTEXT_LIMIT_OPTION, r"the workers' option engine\.max_context is 48"),
    ],
)
def test_a_prompt_over_a_workers_limit_is_told_what_limits_it(tmp_path: Path, context_limit: int, named: str) -> None:
    async def test() -> None:
        prefill, decode = pair(lambda index: 40 + index)
        decode.model.max_context, decode.model.context_limit = 48, context_limit
        async with (
            fake_cluster(tmp_path, prefill, decode) as cluster,
            AsyncClient(cluster.router.address, timeout=10) as client,
        ):
            with pytest.raises(InvalidRequest, match=f"number of tokens is 50; allowed: up to 47: {named}"):
                await client.complete([3] * 50, max_tokens=1)
            with pytest.raises(InvalidRequest, match=f"allowed: up to 8: the prompt has 40 tokens and {named}"):
                await client.complete([3] * 40, max_tokens=9)
            with pytest.raises(InvalidRequest, match=f"number of bytes is 90000; allowed: up to [0-9]+, {named}"):
                await client.complete("a" * 90000, max_tokens=1)
            assert (await client.complete([3] * 40, max_tokens=8)).usage.completion_tokens == 8

    run(test)


def test_the_default_of_max_tokens_is_cut_to_what_the_context_leaves(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            fake_cluster(tmp_path, *pair(lambda index: 40)) as cluster,
            AsyncClient(cluster.router.address, timeout=10) as client,
        ):
            assert (await client.complete([3] * 60)).usage.completion_tokens == 4
            assert (await client.complete([3] * 63)).usage.completion_tokens == 1

    run(test)


def test_bytes_that_are_no_request_are_refused_by_name(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            fake_cluster(tmp_path, *pair(lambda index: 40)) as cluster,
            grpc.aio.insecure_channel(cluster.router.address) as channel,
        ):
            generate = channel.unary_stream("/kvrelay.v1.InferenceService/Generate")
            tokenize = channel.unary_unary("/kvrelay.v1.InferenceService/Tokenize")
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

    run(test)


def test_other_calls(tmp_path: Path) -> None:
    async def test() -> None:
        tokenizer = byte_level_tokenizer()
        async with (
            fake_cluster(tmp_path, *pair(lambda index: 40)) as cluster,
            AsyncClient(cluster.router.address, timeout=10) as client,
        ):
            info = await client.model_info()
            assert (info.name, info.vocab_size, info.max_context, info.eos_token_ids) == (
                "fake",
                VOCAB,
                CONTEXT,
                (1,),
            )
            assert info.has_chat_template
            text = "größer 日本語 🙂"
            ids = await client.tokenize(text)
            assert ids == tokenizer.encode(text).ids
            assert await client.detokenize(ids) == text
            long = "def __init__(self):\n" * 3000
            assert await client.tokenize(long) == tokenizer.encode(long).ids
            chat = [{"role": "user", "content": "hi"}]
            assert await client.tokenize(chat) == tokenizer.encode("<s>user: hi\n<s>assistant:").ids
            assert "user" in TEMPLATE or (await client.complete(chat, max_tokens=1)).token_ids == (40,)
            with pytest.raises(InvalidRequest, match=r"messages: number of messages is 0"):
                await client._unary(lambda stub: stub.Tokenize, TokenizeRequest(messages=ChatMessages()))
            with pytest.raises(InvalidRequest, match=r"token_ids\[0\] is 400; allowed: 0 to 399"):
                await client.detokenize([VOCAB])
            with pytest.raises(InvalidRequest, match=r"input is None"):
                await client._unary(lambda stub: stub.Tokenize, TokenizeRequest())
            with pytest.raises(KvrelayError, match=r"text is ''"):
                await client.tokenize("")

    run(test)


def test_bytes_are_a_request_or_an_invalid_argument() -> None:
    source = random.Random(1)
    request = GenerateRequest(
        request_id="r", token_ids=TokenIds(ids=range(300)), sampling=SamplingParams(stop=["ä"], seed=1, temperature=2)
    )
    good = request.SerializeToString()
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(source.randrange(1, 4)):
            data[source.randrange(len(data))] = source.randrange(256)
        with suppress(InvalidArgument):
            parse(GenerateRequest, bytes(data[: source.randrange(len(data) + 1)]), CONTEXT)
