"""Identity of callers: by API key or certificate, never by what the message says."""

import asyncio
import hashlib
import time
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient, InvalidRequest, Tls, Unauthenticated, Unavailable
from kvrelay.router.entry import callers
from kvrelay.router.entry.callers import ApiKeys
from kvrelay.v1.inference_pb2 import GenerateRequest, Resume, SamplingParams, TokenIds
from support.router_fakes import pair
from support.scenes import Serve
from support.secrets import secrets_in

PROMPT = [5, 6, 7]
KEPT, REMOVED = "kept", "removed"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


WHOLE = f"a {digest(KEPT)}\nb {digest(REMOVED)}\n"
"""The file with both keys."""
EDITS = ["removed", "swapped", "a typo on its line", "a typo on another line", "emptied", "deleted"]
UNREADABLE = ("emptied", "deleted")
"""Edits after which no key is left."""


def edit(path: Path, way: str) -> None:
    """Removes the key REMOVED and keeps KEPT, as far as the edit can."""
    kept = f"a {digest(KEPT)}\n"
    if way == "removed":
        path.write_text(kept)
    elif way == "swapped":
        (path.parent / "new").write_text(kept)
        (path.parent / "new").rename(path)
    elif way == "a typo on its line":
        path.write_text(f"{kept}b {digest(REMOVED)[:-1]}\n")
    elif way == "a typo on another line":
        path.write_text(f"{kept}c nonsense\n")
    elif way == "emptied":
        path.write_text("")
    else:
        path.unlink()


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """A file with two keys of the tenant a, and one of b."""
    path = tmp_path / "api_keys"
    known = (("a", "key of a"), ("a", "another of a"), ("b", "key of b"))
    path.write_text("# tenant, SHA-256 of the key\n\n" + "".join(f"{name}  {digest(key)}\n" for name, key in known))
    return str(path)


async def test_a_key_tells_the_tenant_and_what_the_message_says_does_not(serve: Serve, keys: str) -> None:
    cluster = await serve(*pair(), api_keys=keys)
    known = (("key of a", "", "a"), ("another of a", "a", "a"), ("key of b", "b", "b"))
    for number, (key, claim, tenant) in enumerate(known):
        await cluster.client_of(api_key=key).complete(PROMPT, max_tokens=2, tenant=claim)
        for worker in ("prefill-0", "decode-0"):
            assert (await cluster.job(worker, number)).submit.tenant == tenant
    with pytest.raises(InvalidRequest, match=r"tenant is 'a'; allowed: empty or 'b', the caller's"):
        await cluster.client_of(api_key="key of b").complete(PROMPT, max_tokens=2, tenant="a")


async def test_a_tenant_can_not_end_anothers_request_by_its_resume_key(serve: Serve, keys: str) -> None:
    sampling = SamplingParams(max_tokens=2, temperature=0)
    cluster = await serve(*pair(), api_keys=keys)
    for scheme, key, number in (("Bearer", "key of a", 1), ("bearer", "key of b", 2), ("BEARER", "key of a", 2)):
        resume = Resume(key=b"the same sixteen", call=number)
        request = GenerateRequest(token_ids=TokenIds(ids=PROMPT), sampling=sampling, resume=resume)
        call = cluster.stub.Generate(request, metadata=(("authorization", f"{scheme} {key}"),), timeout=10)
        assert [answer async for answer in call]
    worker = cluster.workers["prefill-0"]
    first, other, second = (job.submit.client_call.key for job in worker.jobs)
    assert first == second != other
    assert b"the same sixteen" not in (first, other)
    assert [fence.key for fence in worker.fences] == [other, second]


async def test_every_call_needs_a_known_key(serve: Serve, keys: str) -> None:
    cluster = await serve(*pair(), api_keys=keys)
    for key in (None, "", "wrong", "a", "key of"):
        client = cluster.client_of(api_key=key)
        for call in (client.complete(PROMPT), client.model_info(), client.tokenize("hello"), client.detokenize([5])):
            with pytest.raises(Unauthenticated, match="API key"):
                await call
    assert not cluster.workers["prefill-0"].jobs


async def test_a_client_certificate_names_the_tenant(serve: Serve, tmp_path: Path) -> None:
    folder, name = secrets_in(tmp_path, "mutual").folder / "certificates", "router.kvrelay.internal"
    files = {"tls_certificate": "router.crt", "tls_key": "router.key", "tls_client_ca": "ca.crt"}
    cluster = await serve(*pair(), **{option: str(folder / file) for option, file in files.items()})
    mine = Tls(folder / "ca.crt", folder / "operator.crt", folder / "operator.key", server_name=name)
    await cluster.client_of(tls=mine).complete(PROMPT, max_tokens=2)
    assert (await cluster.job("prefill-0")).submit.tenant == "kvrelay operator"
    for tls in (Tls(folder / "ca.crt", server_name=name), None):
        with pytest.raises(Unavailable):
            await cluster.client_of(tls=tls).complete(PROMPT, max_tokens=2, timeout=10)


async def test_a_key_that_any_edit_removes_is_refused_within_a_second(serve: Serve, tmp_path: Path) -> None:
    async def check(way: str) -> None:
        path = tmp_path / way
        path.mkdir()
        path = path / "api_keys"
        path.write_text(WHOLE)
        cluster = await serve(*pair(), api_keys=str(path))

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
        assert not await known("removed"), way
        assert await known("kept") == (way not in UNREADABLE), way
        assert cluster.metric("kvrelay_router_api_key_mistakes") == (way not in ("removed", "swapped")), way
        path.write_text(WHOLE)
        assert await known("removed"), f"a whole file holds at once after: {way}"

    await asyncio.gather(*map(check, EDITS))


def test_a_file_that_is_being_swapped_takes_no_key_away(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(keys)
    whole = path.read_text()
    known, start = ApiKeys(path), time.monotonic()
    passed = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: start + passed)
    for change in (path.unlink, lambda: path.write_text(""), lambda: path.write_text(whole[:70])):
        change()
        assert known.grant("key of a")
        passed += 0.8 * callers.SWAP_SECONDS
        assert known.grant("key of a")
        path.write_text(whole)
        assert known.grant("key of a")
    path.unlink()
    assert known.grant("key of a")
    passed += callers.SWAP_SECONDS
    assert known.grant("key of a") is None


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
        (None, r"api_keys .*/api_keys: No such file"),
    ],
)
def test_a_mistake_in_the_keys_is_named_without_what_it_says(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "api_keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        ApiKeys(path)
    assert "secret" not in str(caught.value)
