"""The `openai` client against a router over scripted workers: the class and the fields of each error."""

import asyncio
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD
from kvrelay.internal.v1.worker_pb2 import Failure
from kvrelay.router.config import ServiceClass
from support.http_calls import HELLO, serving, token_at
from support.router_fakes import FakeWorker, Job, colocated_of, run, silent, until

ASKED: dict[str, Any] = {"model": "fake", **HELLO}
KEY = "right"


def client_of(base: str, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(**{"base_url": f"{base}/v1", "api_key": KEY, "max_retries": 0, "timeout": 50, **options})


def keys(folder: Path, *options: str) -> str:
    """A file with the key KEY for the first options, `KEY 1` for the second ones, and so on."""
    path = folder / "keys"
    names = [KEY, *(f"{KEY} {number}" for number in range(1, len(options)))]
    lines = [
        f"tenant-{at} {sha256(name.encode()).hexdigest()} {given}\n"
        for at, (name, given) in enumerate(zip(names, options, strict=True))
    ]
    path.write_text("".join(lines))
    return str(path)


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("completions", {"extra_body": {"foo": 1}}, "foo", "unknown_parameter"),
    ("completions", {"temperature": "hot"}, "temperature", "invalid_type"),
    ("completions", {"temperature": 101.5}, "temperature", "decimal_above_max_value"),
    ("completions", {"n": 0}, "n", "integer_below_min_value"),
    ("completions", {"stop": "x" * 300}, "stop", "string_above_max_length"),
    ("completions", {"best_of": 3}, "best_of", "unsupported_value"),
    ("completions", {"max_tokens": 61}, "max_tokens", "context_length_exceeded"),
    ("completions", {"prompt": [9999]}, "prompt[0]", "invalid_value"),
    ("completions", {"prompt": [5] * 64}, "prompt", "context_length_exceeded"),
    ("chat", {"messages": []}, "messages", "array_below_min_length"),
    ("chat", {"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    ("chat", {"store": True}, "store", "unsupported_value"),
    ("chat", {"extra_headers": {"X-Request-Id": "x" * 129}}, "header X-Request-Id", "invalid_value"),
]


def test_a_bad_request_names_its_field(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as (cluster, http), client_of(http.base) as client:
            for api, change, param, code in BAD:
                create = client.completions.create if api == "completions" else client.chat.completions.create
                asked = ASKED if api == "completions" else {"model": "fake", "messages": [{"role": "user"}]}
                with pytest.raises(openai.BadRequestError) as caught:
                    await create(**{**asked, **change})
                error = caught.value
                assert (error.param, error.code, error.type) == (param, code, "invalid_request_error"), str(error)
                assert error.request_id
            assert cluster.router._front.running == 0

    run(test)


def test_what_is_not_there_says_what_is(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as (_, http), client_of(http.base) as client:
            with pytest.raises(openai.NotFoundError) as caught:
                await client.completions.create(**{**ASKED, "model": "gpt-5"})
            assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("gpt-5")
            async with client_of(http.base, base_url=http.base) as without_v1:
                for call in (
                    client.embeddings.create(model="fake", input="x"),
                    client.responses.create(model="fake", input="x"),
                    client.files.list(),
                    without_v1.completions.create(**ASKED),
                ):
                    with pytest.raises(openai.NotFoundError) as caught:
                        await call
                    assert caught.value.code == "unknown_url"
                    assert "Invalid URL (" in str(caught.value)
                    assert "POST /v1/chat/completions, POST /v1/completions" in str(caught.value)

    run(test)


def test_keys_that_are_not_known_or_not_allowed(tmp_path: Path) -> None:
    async def test() -> None:
        config: dict[str, Any] = {"api_keys": keys(tmp_path, "classes=batch"), "classes": {"batch": ServiceClass()}}
        async with serving(tmp_path / "m", **config) as (_, http):
            async with client_of(http.base, api_key="wrong") as client:
                for call in (client.completions.create(**ASKED), client.models.retrieve("fake")):
                    with pytest.raises(openai.AuthenticationError) as refused:
                        await call
                    assert (refused.value.code, refused.value.type) == ("invalid_api_key", "invalid_request_error")
            async with client_of(http.base) as client:
                with pytest.raises(openai.PermissionDeniedError) as forbidden:
                    await client.completions.create(**ASKED)
                assert "default" in str(forbidden.value)
                assert await client.completions.create(**ASKED, extra_body={"slo_class": "batch"})

    run(test)


def test_the_client_waits_as_long_as_it_is_told(tmp_path: Path) -> None:
    """The client's own retries read Retry-After; without retries, RateLimitError has it."""

    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", silent)
        async with serving(tmp_path, worker, max_requests=1) as (cluster, http), client_of(http.base) as client:
            running = asyncio.create_task(client.completions.create(**ASKED))
            job = await cluster.job("colocated-0")
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(**ASKED)
            assert caught.value.code == "rate_limit_exceeded"
            assert caught.value.response.headers["retry-after"] == "1"
            started = time.monotonic()
            patient = asyncio.create_task(client.with_options(max_retries=2).completions.create(**ASKED))
            await until(
                lambda: [record.outcome for record in cluster.records].count("exhausted") == 2, "it was refused"
            )
            worker.script = colocated_of(token_at)
            await worker.script(job)
            assert (await running).choices
            assert (await patient).choices
            assert time.monotonic() - started > 0.9
            assert [record.outcome for record in cluster.records].count("exhausted") == 2

    run(test)


def test_a_key_that_has_used_up_its_limit_is_told_for_how_long(tmp_path: Path) -> None:
    async def test() -> None:
        path = keys(tmp_path, "requests_per_minute=1")
        async with serving(tmp_path / "m", api_keys=path) as (_, http), client_of(http.base) as client:
            await client.completions.create(**ASKED)
            with pytest.raises(openai.RateLimitError, match="requests_per_minute") as caught:
                await client.completions.create(**ASKED)
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60

    run(test)


def test_defects_and_lost_workers(tmp_path: Path) -> None:
    async def failing(job: Job) -> None:
        job.fail(Failure.CODE_INTERNAL)

    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", failing)
        async with (
            serving(tmp_path, worker, worker_wait_seconds=0.0) as (cluster, http),
            client_of(http.base) as client,
        ):
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(**ASKED)
            assert (caught.value.status_code, caught.value.type) == (500, "server_error")

            async def late(job: Job) -> None:
                job.send(0, (40,))
                await begun.wait()
                job.fail(Failure.CODE_INTERNAL)

            # In a stream that has begun, the error is the last event.
            begun = asyncio.Event()
            worker.script = late
            stream = await client.completions.create(**ASKED, stream=True)
            assert await anext(stream)
            begun.set()
            with pytest.raises(openai.APIError) as broken:
                async for _ in stream:
                    pass
            assert not isinstance(broken.value, openai.APIConnectionError)
            assert (broken.value.type, broken.value.code) == ("server_error", None)
            cluster.announce(colocated_0=MEMBER_STATE_DEAD)
            await until(lambda: not cluster.router.registry.complete, "the worker is lost")
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(**ASKED)
            assert caught.value.status_code == 503

    run(test)


def test_a_client_that_waits_no_longer_cancels(tmp_path: Path) -> None:
    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", silent)
        async with serving(tmp_path, worker) as (cluster, http), client_of(http.base) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=0.5).completions.create(**ASKED)
            job = await cluster.job("colocated-0")
            await asyncio.wait_for(job.cancelled.wait(), 5)
            await until(lambda: cluster.router._front.running == 0, "nothing runs")
            # The router's own limits come as the status 504.
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(**ASKED, extra_headers={"X-Request-Timeout": "0.2"})
            assert caught.value.status_code == 504

    run(test)


def test_a_router_that_stops(tmp_path: Path) -> None:
    async def some(job: Job) -> None:
        job.send(job.base, (40,))

    async def test() -> None:
        worker = FakeWorker("colocated-0", "colocated", some)
        async with serving(tmp_path, worker) as (cluster, http), client_of(http.base) as client:
            stream = await client.completions.create(**ASKED, stream=True)
            assert await anext(stream)
            stopping = asyncio.create_task(cluster.router.stop(0.3))
            with pytest.raises(openai.APIError, match="shutting down"):
                async for _ in stream:
                    pass
            await stopping
            with pytest.raises(openai.APIConnectionError):
                await client.completions.create(**ASKED)

    run(test)
