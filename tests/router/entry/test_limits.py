"""Limits of API keys: classes of service, requests and tokens a minute, requests at once."""

import asyncio
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.client import Exhausted
from kvrelay.router.config import ServiceClass
from kvrelay.router.entry.limits import KeyLimits, Limits
from kvrelay.router.errors import LimitReached
from kvrelay.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds
from support.http_calls import HELLO
from support.router_fakes import fake, key_file, pair, silent
from support.scenes import Serve

PROMPT = [5] * 20


async def test_requests_at_once(serve: Serve, tmp_path: Path) -> None:
    prefill, decode = pair()
    prefill.script, answer = silent, prefill.script
    cluster = await serve(prefill, decode, api_keys=key_file(tmp_path, a="concurrent=2", b=""))
    a, b = cluster.client_of(api_key="a"), cluster.client_of(api_key="b")
    running = [asyncio.create_task(a.complete(PROMPT, max_tokens=2)) for _ in range(2)]
    await cluster.job("prefill-0", 1)
    with pytest.raises(Exhausted, match="2 requests of the API key are in flight; its limit") as refused:
        await a.complete(PROMPT, max_tokens=2)
    assert refused.value.retry_after == 1.0
    unlimited = asyncio.create_task(b.complete(PROMPT, max_tokens=2))
    await cluster.job("prefill-0", 2)
    for job in prefill.jobs:
        await answer(job)
    await asyncio.gather(*running, unlimited)
    prefill.script = answer
    await a.complete(PROMPT, max_tokens=2)


async def test_requests_and_tokens_a_minute(serve: Serve, tmp_path: Path) -> None:
    keys = key_file(tmp_path, a="requests_per_minute=3", b="tokens_per_minute=50")
    cluster = await serve(*pair(), api_keys=keys)
    a, b = cluster.client_of(api_key="a"), cluster.client_of(api_key="b")
    for _ in range(3):
        await a.complete(PROMPT, max_tokens=2)
    with pytest.raises(Exhausted, match="requests_per_minute, 3, are used up") as refused:
        await a.complete(PROMPT, max_tokens=2)
    assert refused.value.retry_after is not None
    assert 10 < refused.value.retry_after <= 20
    await b.complete(PROMPT, max_tokens=8)
    await a.tokenize("free of charge")
    with pytest.raises(Exhausted, match="tokens_per_minute, 50, are used up"):
        await b.complete(PROMPT * 2, max_tokens=8)
    assert cluster.outcomes.count("exhausted") == 2


async def test_classes_of_service(serve: Serve, tmp_path: Path) -> None:
    classes = {"batch": ServiceClass(), "chat": ServiceClass(weight=4, first_token_timeout_seconds=0.3)}
    prefill, decode = pair()
    keys = key_file(tmp_path, a="classes=batch", b="")
    cluster = await serve(prefill, decode, api_keys=keys, classes=classes)

    async def ask(key: str, name: str) -> str:
        """Status and text of the error; "OK" without one."""
        sampling = SamplingParams(max_tokens=2)
        request = GenerateRequest(token_ids=TokenIds(ids=PROMPT), sampling=sampling, slo_class=name)
        call = cluster.stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),), timeout=20)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "OK"

    assert await ask("a", "batch") == "OK"
    for name in ("chat", ""):
        said = await ask("a", name)
        assert said.startswith("PERMISSION_DENIED")
        assert said.endswith("allowed for this API key: 'batch'")
    said = await ask("b", "fast")
    assert said.startswith("INVALID_ARGUMENT: slo_class is 'fast'; allowed: 'default', 'batch', 'chat', or empty")
    assert await ask("b", "chat") == await ask("b", "") == "OK"
    prefill.script = silent
    said = await ask("b", "chat")
    assert said == "DEADLINE_EXCEEDED: no token within the router's first_token_timeout_seconds, 0.3"


async def test_limits_and_classes_over_http(serve: Serve, tmp_path: Path) -> None:
    keys = key_file(tmp_path, a="classes=default requests_per_minute=2")
    cluster = await serve(*pair(), api_keys=keys, classes={"batch": ServiceClass()})
    url, headers = "/v1/completions", {"Authorization": "Bearer a"}
    for slo_class, status, said in (("", 200, ""), ("batch", 403, "slo_class"), ("", 429, "requests_per_minute")):
        async with cluster.http.session.post(url, json={**HELLO, "slo_class": slo_class}, headers=headers) as response:
            assert response.status == status
            assert said in (await response.json()).get("error", {}).get("message", "")
            assert (1 <= int(response.headers.get("Retry-After", 0)) <= 60) == (status == 429)


async def test_a_session_is_named_by_header_cache_key_or_user(serve: Serve) -> None:
    """The requests of a session go to the same workers, out of several that are equally good."""
    workers = [fake(f"colocated-{at}") for at in range(8)]
    cluster = await serve(*workers)

    async def places(body: dict[str, str], headers: dict[str, str]) -> int:
        """The number of workers that serve six such requests."""
        before = [len(worker.jobs) for worker in workers]
        for number in range(6):
            given = {"prompt": f"hello {number}", "max_tokens": 2, **body}
            assert (await cluster.http.post("/v1/completions", given, headers=headers))[0] == 200
        return sum(len(worker.jobs) > count for worker, count in zip(workers, before, strict=True))

    assert await places({}, {}) > 1
    assert await places({"user": "somebody"}, {}) == 1
    assert await places({"prompt_cache_key": "a conversation"}, {}) == 1
    assert await places({}, {"X-Session-Id": "a conversation"}) == 1


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 100), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 150), st.integers(0, 50)), max_size=60))
def test_no_minute_has_much_more_than_a_minutes_tokens(limit: int, asks: list[tuple[float, int, int]]) -> None:
    """The limit is two buckets, as a full one may be used at once, and the last request that it lets start."""
    now = 0.0
    limits, uses = Limits(tokens_per_minute=limit), KeyLimits(lambda: now)
    started: list[tuple[float, int]] = []
    for pause, prompt, completion in asks:
        now += pause
        meter = uses.request("key", limits)
        try:
            meter.prompt(prompt)
        except LimitReached as refused:
            now += float(refused.metadata[0][1]) / 1000
            meter.prompt(prompt)  # it may start as soon as it was told
        meter.generated(completion)
        started.append((now, prompt + completion))
    for start, _ in started:
        minute = [tokens for at, tokens in started if start <= at < start + 60]
        assert sum(minute) <= 2 * limit + minute[-1] + max(prompt for _, prompt, _ in asks)
