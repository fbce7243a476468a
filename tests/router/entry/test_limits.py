"""Limits of API keys: classes of service, requests and tokens a minute, requests at once."""

from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.client import Exhausted, KvrelayError
from kvrelay.router.config import ServiceClass
from kvrelay.router.entry.limits import KeyLimits, Limits
from kvrelay.router.errors import LimitReached
from support.http_calls import HELLO
from support.router_fakes import fake, key_file, pair, silent
from support.scenes import Serve

PROMPT = [5] * 20


async def test_tokens_a_minute(serve: Serve, tmp_path: Path) -> None:
    cluster = await serve(*pair(), api_keys=key_file(tmp_path, b="tokens_per_minute=50"))
    client = cluster.client_of(api_key="b")
    await client.complete(PROMPT, max_tokens=8)
    await client.tokenize("free of charge")
    with pytest.raises(Exhausted, match="tokens_per_minute, 50, are used up") as refused:
        await client.complete(PROMPT * 2, max_tokens=8)
    assert refused.value.retry_after is not None
    assert 10 < refused.value.retry_after <= 60
    assert cluster.outcomes.count("exhausted") == 1


async def test_classes_of_service_and_requests_a_minute(serve: Serve, tmp_path: Path) -> None:
    classes = {"batch": ServiceClass(), "chat": ServiceClass(weight=4, first_token_timeout_seconds=1.5)}
    prefill, decode = pair()
    keys = key_file(tmp_path, a="classes=batch requests_per_minute=3", b="", c="classes=batch")
    cluster = await serve(prefill, decode, api_keys=keys, classes=classes)

    async def ask(key: str, name: str) -> tuple[int, str, int]:
        """Status, text of the error, and seconds after which to try again."""
        headers = {"Authorization": f"Bearer {key}"}
        call = cluster.http.session.post("/v1/completions", json={**HELLO, "slo_class": name}, headers=headers)
        async with call as response:
            error = (await response.json()).get("error", {"message": ""})
            return response.status, error["message"], int(response.headers.get("Retry-After", 0))

    served = (200, "", 0)
    assert await ask("a", "batch") == served
    for name in ("chat", ""):
        status, said, _ = await ask("a", name)
        assert (status, said.partition("allowed")[2]) == (403, " for this API key: 'batch'")
    with pytest.raises(KvrelayError, match="allowed for this API key: 'batch'") as refused:
        await cluster.client_of(api_key="c").complete(PROMPT, slo_class="chat")
    assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED
    status, said, seconds = await ask("a", "batch")
    assert (status, "requests_per_minute, 3, are used up" in said) == (429, True)
    assert 10 < seconds <= 20
    status, said, _ = await ask("b", "fast")
    assert status == 400
    assert said.startswith("slo_class is 'fast'; allowed: 'default', 'interactive', 'batch', 'chat', or empty")
    assert await ask("b", "chat") == await ask("b", "") == served
    prefill.script = silent
    assert await ask("b", "chat") == (504, "no token within the router's first_token_timeout_seconds, 1.5", 0)


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
