"""Limits of API keys: classes of service, requests and tokens a minute, requests at once."""

import asyncio
import hashlib
from pathlib import Path

import aiohttp
import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.client import AsyncClient, Exhausted
from kvrelay.router.config import ServiceClass
from kvrelay.router.entry.limits import KeyLimits, Limits
from kvrelay.router.errors import LimitReached
from kvrelay.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub
from support.router_fakes import FakeWorker, Job, colocated_of, fake_cluster, pair, run, silent

PROMPT = [5] * 20
KEY = "a key"


def token_at(index: int) -> int:
    return 10 + index


def keys(folder: Path, *options: str) -> str:
    """A file with a key for each text of options: KEY, then KEY 1, ..."""
    path = folder / "api_keys"
    names = [KEY, *(f"{KEY} {number}" for number in range(1, len(options)))]
    lines = [
        f"tenant-{number} {hashlib.sha256(name.encode()).hexdigest()} {text}"
        for number, (name, text) in enumerate(zip(names, options, strict=True))
    ]
    path.write_text("\n".join(lines))
    return str(path)


def test_requests_at_once(tmp_path: Path) -> None:
    path = keys(tmp_path, "concurrent=2", "")

    async def test() -> None:
        prefill, decode = pair(token_at)
        prefill.script, answer = silent, prefill.script
        async with (
            fake_cluster(tmp_path / "m", prefill, decode, api_keys=path) as cluster,
            AsyncClient(cluster.router.address, api_key=KEY, timeout=20) as client,
            AsyncClient(cluster.router.address, api_key=f"{KEY} 1", timeout=20) as other,
        ):
            running = [asyncio.create_task(client.complete(PROMPT, max_tokens=2)) for _ in range(2)]
            await cluster.job("prefill-0", 1)
            with pytest.raises(Exhausted, match="2 requests of the API key are in flight; its limit") as refused:
                await client.complete(PROMPT, max_tokens=2)
            assert refused.value.retry_after == 1.0
            unlimited = asyncio.create_task(other.complete(PROMPT, max_tokens=2))
            third: Job = await cluster.job("prefill-0", 2)
            for job in [*prefill.jobs[:2], third]:
                await answer(job)
            await asyncio.gather(*running, unlimited)
            prefill.script = answer
            await client.complete(PROMPT, max_tokens=2)

    run(test)


def test_requests_and_tokens_a_minute(tmp_path: Path) -> None:
    path = keys(tmp_path, "requests_per_minute=3", "tokens_per_minute=50")

    async def test() -> None:
        async with (
            fake_cluster(tmp_path / "m", *pair(token_at), api_keys=path) as cluster,
            AsyncClient(cluster.router.address, api_key=KEY, timeout=20) as client,
            AsyncClient(cluster.router.address, api_key=f"{KEY} 1", timeout=20) as other,
        ):
            for _ in range(3):
                await client.complete(PROMPT, max_tokens=2)
            with pytest.raises(Exhausted, match="requests_per_minute, 3, are used up") as refused:
                await client.complete(PROMPT, max_tokens=2)
            assert refused.value.retry_after is not None
            assert 10 < refused.value.retry_after <= 20
            await other.complete(PROMPT, max_tokens=8)
            await client.tokenize("free of charge")
            with pytest.raises(Exhausted, match="tokens_per_minute, 50, are used up"):
                await other.complete(PROMPT * 2, max_tokens=8)
            assert [record.outcome for record in cluster.records].count("exhausted") == 2

    run(test)


def test_classes_of_service(tmp_path: Path) -> None:
    path = keys(tmp_path, "classes=batch", "")
    classes = {"batch": ServiceClass(), "chat": ServiceClass(weight=4, first_token_timeout_seconds=0.3)}

    async def test() -> None:
        prefill, decode = pair(token_at)
        async with (
            fake_cluster(tmp_path / "m", prefill, decode, api_keys=path, classes=classes) as cluster,
            grpc.aio.insecure_channel(cluster.router.address) as channel,
        ):
            generate = InferenceServiceStub(channel).Generate

            async def ask(key: str, name: str) -> str:
                """Status and text of the error; "OK" without one."""
                sampling = SamplingParams(max_tokens=2)
                request = GenerateRequest(token_ids=TokenIds(ids=PROMPT), sampling=sampling, slo_class=name)
                call = generate(request, metadata=(("authorization", f"Bearer {key}"),), timeout=20)
                try:
                    async for _ in call:
                        pass
                except grpc.aio.AioRpcError as error:
                    return f"{error.code().name}: {error.details()}"
                return "OK"

            assert await ask(KEY, "batch") == "OK"
            for name in ("chat", ""):
                said = await ask(KEY, name)
                assert said.startswith("PERMISSION_DENIED")
                assert said.endswith("allowed for this API key: 'batch'")
            said = await ask(f"{KEY} 1", "fast")
            assert said.startswith(
                "INVALID_ARGUMENT: slo_class is 'fast'; allowed: 'default', 'batch', 'chat', or empty"
            )
            assert await ask(f"{KEY} 1", "chat") == await ask(f"{KEY} 1", "") == "OK"
            prefill.script = silent
            said = await ask(f"{KEY} 1", "chat")
            assert said == "DEADLINE_EXCEEDED: no token within the router's first_token_timeout_seconds, 0.3"

    run(test)


def test_limits_and_classes_over_http(tmp_path: Path) -> None:
    path = keys(tmp_path, "classes=default requests_per_minute=2")
    body, classes = {"prompt": "hello", "max_tokens": 2}, {"batch": ServiceClass()}

    async def test() -> None:
        async with (
            fake_cluster(tmp_path / "m", *pair(token_at), api_keys=path, http_port=0, classes=classes) as cluster,
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session,
        ):
            url = f"http://{cluster.router.http_address}/v1/completions"
            for slo_class, status, said in (
                ("", 200, ""),
                ("batch", 403, "slo_class"),
                ("", 429, "requests_per_minute"),
            ):
                async with session.post(url, json={**body, "slo_class": slo_class}) as response:
                    assert response.status == status
                    if status == 200:
                        continue
                    error = (await response.json())["error"]
                    assert said in error["message"]
                    assert ("Retry-After" in response.headers) == (status == 429)

    run(test)


def test_a_session_is_named_by_header_cache_key_or_user(tmp_path: Path) -> None:
    """The requests of a session go to the same workers, out of several that are equally good."""
    workers = [FakeWorker(f"colocated-{at}", "colocated", colocated_of(token_at)) for at in range(8)]

    async def test() -> None:
        async with (
            fake_cluster(tmp_path / "m", *workers, http_port=0) as cluster,
            aiohttp.ClientSession() as session,
        ):
            url = f"http://{cluster.router.http_address}/v1/completions"

            async def places(body: dict[str, str], headers: dict[str, str]) -> int:
                """The number of workers that serve six such requests."""
                before = [len(worker.jobs) for worker in workers]
                for number in range(6):
                    given = {"prompt": f"hello {number}", "max_tokens": 2, **body}
                    async with session.post(url, json=given, headers=headers) as response:
                        assert response.status == 200
                return sum(len(worker.jobs) > count for worker, count in zip(workers, before, strict=True))

            assert await places({}, {}) > 1
            assert await places({"user": "somebody"}, {}) == 1
            assert await places({"prompt_cache_key": "a conversation"}, {}) == 1
            assert await places({}, {"X-Session-Id": "a conversation"}) == 1

    run(test)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 150), st.integers(0, 50)), max_size=60),
)
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
