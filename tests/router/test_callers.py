"""Identity of callers: by API key or certificate, never by what the message says."""

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from prometheus_client import generate_latest

from kvrelay.client import AsyncClient, Exhausted, InvalidRequest, Tls, Unauthenticated, Unavailable
from kvrelay.router.config import RouterConfig
from kvrelay.router.entry import callers
from kvrelay.router.entry.callers import ApiKeys
from kvrelay.v1.inference_pb2 import GenerateRequest, Resume, SamplingParams, TokenIds
from kvrelay.v1.inference_pb2_grpc import InferenceServiceStub
from support.key_edits import EDITS, UNREADABLE, WHOLE, digest, edit
from support.router_fakes import fake_cluster, pair, run
from support.secrets import secrets_in

PROMPT = [5, 6, 7]


def token_at(index: int) -> int:
    return 10 + index


def key_file(folder: Path, **keys: Sequence[str]) -> Path:
    """A file of API keys, by tenant."""
    lines = [f"{tenant}  {digest(key)}" for tenant, own in keys.items() for key in own]
    path = folder / "api_keys"
    path.write_text("# tenant, SHA-256 of the key\n\n" + "\n".join(lines) + "\n")
    return path


def test_a_key_tells_the_tenant_and_what_the_message_says_does_not(tmp_path: Path) -> None:
    keys = key_file(tmp_path, a=("key of a", "another of a"), b=("key of b",))

    async def test() -> None:
        async with fake_cluster(tmp_path / "m", *pair(token_at), api_keys=str(keys)) as cluster:
            at = cluster.router.address
            for number, (key, claim, tenant) in enumerate(
                (("key of a", "", "a"), ("another of a", "a", "a"), ("key of b", "b", "b"))
            ):
                async with AsyncClient(at, api_key=key) as client:
                    await client.complete(PROMPT, max_tokens=2, tenant=claim, timeout=10)
                for worker in ("prefill-0", "decode-0"):
                    assert (await cluster.job(worker, number)).submit.tenant == tenant
            async with AsyncClient(at, api_key="key of b") as client:
                with pytest.raises(InvalidRequest, match=r"tenant is 'a'; allowed: empty or 'b', the caller's"):
                    await client.complete(PROMPT, max_tokens=2, tenant="a", timeout=10)

    run(test)


def test_a_tenant_can_not_end_anothers_request_by_its_resume_key(tmp_path: Path) -> None:
    keys = key_file(tmp_path, a=("key of a",), b=("key of b",))
    sampling = SamplingParams(max_tokens=2, temperature=0)

    def request(number: int) -> GenerateRequest:
        resume = Resume(key=b"the same sixteen", call=number)
        return GenerateRequest(token_ids=TokenIds(ids=PROMPT), sampling=sampling, resume=resume)

    async def test() -> None:
        async with fake_cluster(tmp_path / "m", *pair(token_at), api_keys=str(keys)) as cluster:
            async with grpc.aio.insecure_channel(cluster.router.address) as channel:
                stub = InferenceServiceStub(channel)
                for scheme, key, number in (
                    ("Bearer", "key of a", 1),
                    ("bearer", "key of b", 2),
                    ("BEARER", "key of a", 2),
                ):
                    call = stub.Generate(request(number), metadata=(("authorization", f"{scheme} {key}"),), timeout=10)
                    assert [answer async for answer in call]
            worker = cluster.workers["prefill-0"]
            first, other, second = (job.submit.client_call.key for job in worker.jobs)
            assert first == second != other
            assert [fence.key for fence in worker.fences] == [other, second]

    run(test)


@pytest.mark.parametrize("key", [None, "", "wrong", "a", "key of a "])
def test_every_call_needs_a_known_key(tmp_path: Path, key: str | None) -> None:
    keys = key_file(tmp_path, a=("key of a,",))

    async def test() -> None:
        async with (
            fake_cluster(tmp_path / "m", *pair(token_at), api_keys=str(keys)) as cluster,
            AsyncClient(cluster.router.address, api_key=key, timeout=10) as client,
        ):
            for call in (
                client.complete(PROMPT, max_tokens=2),
                client.model_info(),
                client.tokenize("hello"),
                client.detokenize([5]),
            ):
                with pytest.raises(Unauthenticated, match="API key"):
                    await call
            assert not cluster.workers["prefill-0"].jobs

    run(test)


def test_without_authentication_all_share_one_tenant_and_none_can_be_claimed(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            fake_cluster(tmp_path, *pair(token_at)) as cluster,
            AsyncClient(cluster.router.address, api_key="unneeded", timeout=10) as client,
        ):
            await client.complete(PROMPT, max_tokens=2)
            assert (await cluster.job("prefill-0")).submit.tenant == ""
            with pytest.raises(InvalidRequest, match="this router knows no tenants"):
                await client.complete(PROMPT, max_tokens=2, tenant="a")

    run(test)


def test_a_client_certificate_names_the_tenant(tmp_path: Path) -> None:
    secrets = secrets_in(tmp_path, "mutual")
    folder = secrets.folder / "certificates"
    options = {
        "tls_certificate": str(folder / "router.crt"),
        "tls_key": str(folder / "router.key"),
        "tls_client_ca": str(folder / "ca.crt"),
    }
    name = "router.kvrelay.internal"

    async def test() -> None:
        async with fake_cluster(tmp_path / "m", *pair(token_at), **options) as cluster:
            at = cluster.router.address
            mine = Tls(folder / "ca.crt", folder / "operator.crt", folder / "operator.key", server_name=name)
            async with AsyncClient(at, tls=mine) as client:
                await client.complete(PROMPT, max_tokens=2, timeout=10)
                assert (await cluster.job("prefill-0")).submit.tenant == "kvrelay operator"
            for tls in (Tls(folder / "ca.crt", server_name=name), None):
                async with AsyncClient(at, tls=tls) as client:
                    with pytest.raises(Unavailable):
                        await client.complete(PROMPT, max_tokens=2, timeout=10)

    run(test)


def test_one_tenant_can_not_take_the_memory_of_another(tmp_path: Path) -> None:
    """The tenants call from one address: a gateway may call for all of them."""
    keys = key_file(tmp_path, a=("key of a",), b=("key of b",))
    limits = {"max_queued_bytes": 200_000, "max_message_bytes": 20_000}

    async def test() -> None:
        prefill, decode = pair(token_at)

        async def never(job: object) -> None:
            await asyncio.Event().wait()

        prefill.script = never
        async with fake_cluster(tmp_path / "m", prefill, decode, api_keys=str(keys), **limits) as cluster:
            at = cluster.router.address
            async with AsyncClient(at, api_key="key of a") as a, AsyncClient(at, api_key="key of b") as b:
                text = "x" * 15_000
                running = asyncio.ensure_future(a.complete("hello", timeout=20))
                await cluster.job("prefill-0")
                answers = await asyncio.gather(*(a.tokenize(text) for _ in range(40)), return_exceptions=True)
                assert any(isinstance(answer, Exhausted) for answer in answers), "its own share is bounded"
                await b.tokenize(text)
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    run(test)


@pytest.mark.parametrize("way", EDITS)
def test_a_key_that_any_edit_removes_is_refused_within_a_second(tmp_path: Path, way: str) -> None:
    path = tmp_path / "api_keys"
    path.write_text(WHOLE)

    async def test() -> None:
        async with fake_cluster(tmp_path / "m", *pair(token_at), api_keys=str(path)) as cluster:

            async def known(key: str) -> bool:
                async with AsyncClient(cluster.router.address, api_key=key, timeout=10) as client:
                    try:
                        await client.model_info()
                    except Unauthenticated:
                        return False
                    return True

            assert await known("kept")
            assert await known("removed")
            edit(path, way)
            # Nobody calls meanwhile: the time counts from the edit, not from the next call.
            await asyncio.sleep(1.0)
            assert not await known("removed")
            assert await known("kept") == (way not in UNREADABLE)
            metrics = generate_latest(cluster.router.metrics.registry).decode()
            mistakes = re.findall(r"kvrelay_router_api_key_mistakes\{.*\} (.*)", metrics)
            assert mistakes == ["0.0" if way in ("removed", "swapped") else "1.0"]
            path.write_text(WHOLE)
            assert await known("removed"), "a whole file holds at once"

    run(test)


def test_a_file_that_is_being_swapped_takes_no_key_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = key_file(tmp_path, a=("first",))
    whole = path.read_text()
    keys, start = ApiKeys(path), time.monotonic()
    passed = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: start + passed)
    for change in (path.unlink, lambda: path.write_text(""), lambda: path.write_text(whole[:70])):
        change()
        assert keys.grant("first")
        passed += 0.8 * callers.SWAP_SECONDS
        assert keys.grant("first")
        path.write_text(whole)
        assert keys.grant("first")
    path.unlink()
    assert keys.grant("first")
    passed += callers.SWAP_SECONDS
    assert keys.grant("first") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key"),
        ("# none\n", "holds no key"),
        ("a secret-in-plain-text\n", "line 1; allowed: a tenant"),
        (f"{'t' * 129} {'0' * 64}\n", "line 1"),
        (f"a {'0' * 64}\nb {'0' * 63}\n", "line 2"),
        (f"a {'0' * 64} secret\n", "line 1; allowed"),
        (f"a {'0' * 64} size=1\n", "line 1: option size; allowed: classes, weight, requests_per_minute"),
        (f"a {'0' * 64} weight=0\n", "weight is '0'; allowed: a number above 0, up to 1000"),
        (f"a {'0' * 64} concurrent=1.5\n", "concurrent is '1.5'; allowed: a number above 0"),
    ],
)
def test_a_mistake_in_the_keys_is_named_without_what_it_says(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "api_keys"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        ApiKeys(path)
    assert "secret" not in str(caught.value)


def test_missing_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"api_keys .*/nowhere: No such file"):
        ApiKeys(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tls_certificate": "c"}, "tls_key is ''; allowed: a file exactly if tls_certificate is one"),
        ({"tls_key": "k"}, "tls_key is 'k'"),
        ({"tls_client_ca": "ca"}, "tls_client_ca is 'ca'; allowed: with tls_certificate only"),
    ],
)
def test_half_of_a_tls_configuration_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RouterConfig(**options)
