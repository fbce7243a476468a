"""Large requests: refused by size before they cost anything, and held compactly; what holds the event loop is in
test_held_loop.py."""

import asyncio
import gc
import tracemalloc
from pathlib import Path

import pytest

from kvrelay.client import Exhausted, InvalidRequest
from kvrelay.internal.v1.worker_pb2 import Blocks, Load, Requests
from kvrelay.router.entry.admission import CHARGE, PEER_SHARE
from kvrelay.router.request.tokenizer import Tokenizer
from support.router_fakes import fake, silent, until
from support.scenes import Serve

CONTEXT = 128 * 1024
MIB = 2**20
MAX_QUEUED = 16 * MIB


async def test_what_is_too_large_for_good_is_a_mistake_and_not_a_full_cluster(serve: Serve) -> None:
    cluster = await serve(fake("colocated-0"))
    client = cluster.client
    for size in (20_000_000, 80_000_000):
        with pytest.raises(InvalidRequest):
            await client.complete("x" * size)
    with pytest.raises(InvalidRequest, match=r"request: number of bytes is 50000\d\d; allowed: up to 4194304"):
        await client.complete("x" * 5_000_000)
    with pytest.raises(InvalidRequest, match=r"more than 64 numbers can have"):
        await client.complete([5] * 4_000_000)
    with pytest.raises(InvalidRequest, match="request: number of bytes"):
        await client.tokenize("x" * 5_000_000)
    assert cluster.calls == 0


async def test_a_text_beyond_the_context_is_refused_before_it_is_tokenized(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await serve(fake("colocated-0"))
    longest = Tokenizer(Path(cluster.router.config.model)).longest_token_bytes

    def encode(*_: object, **__: object) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(Tokenizer, "_encode", encode)
    chat = [{"role": "user", "content": "x" * MIB}]
    for prompt in ("x" * MIB, "x" * (64 * longest + 1), chat):
        with pytest.raises(InvalidRequest, match=f"number of bytes is .* allowed: up to {64 * longest}, "):
            await cluster.client.complete(prompt)
    with pytest.raises(InvalidRequest, match="send a longer text in parts"):
        await cluster.client.tokenize("x" * MIB)
    assert cluster.calls == 0


@pytest.mark.more
async def test_queued_prompts_are_held_compactly_and_bounded(serve: Serve) -> None:
    """Requests wait for a decode worker; the router holds some bytes per token, and refuses what passes the bound."""
    prompt = [300] * (CONTEXT - 200)
    waiting = 6

    prefill, decode = fake("prefill-0", max_context=CONTEXT), fake("decode-0", max_context=CONTEXT)
    cluster = await serve(prefill, decode, max_message_bytes=MIB, max_queued_bytes=MAX_QUEUED)
    full = Load(blocks=Blocks(total=100, free=0, held=100, size=16), requests=Requests(free_slots=1))
    await cluster.report("decode-0", full)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    running = [asyncio.create_task(cluster.client.complete(prompt, max_tokens=2)) for _ in range(waiting)]
    await until(lambda: cluster.router.waiting == waiting, "all wait")
    gc.collect()
    per_prompt = (tracemalloc.get_traced_memory()[0] - before) / waiting
    tracemalloc.stop()
    print(f"{per_prompt / 2**20:.2f} MiB for each of {waiting} queued prompts of {len(prompt)} tokens")
    # The client's own messages are in this process too.
    assert per_prompt < 1.5 * MIB
    arriving = 2 * CHARGE * len(prompt)
    most = (MAX_QUEUED // PEER_SHARE - arriving) // (7 * len(prompt))
    for _ in range(2):  # what a cancelled request has held is free again
        while not any(task.done() for task in running):
            running.append(asyncio.create_task(cluster.client.complete(prompt, max_tokens=2)))
            await asyncio.wait(running, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(Exhausted, match="this client's requests hold") as refused:
            await next(task for task in running if task.done())
        assert refused.value.retry_after == 1.0
        assert len(running) > most, "at most seven bytes for each token"
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await cluster.idle()
        running = []


async def test_each_kind_of_call_counts_as_a_request(serve: Serve) -> None:
    worker = fake("colocated-0", silent)
    cluster = await serve(worker, max_requests=2)
    client = cluster.client
    running = [cluster.asking() for _ in range(2)]
    await cluster.job("colocated-0", 1)
    for call in (client.complete("hello"), client.tokenize("hello"), client.detokenize([40])):
        with pytest.raises(Exhausted, match="max_requests") as refused:
            await call
        assert refused.value.retry_after == 1.0
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await cluster.idle()
    assert await client.detokenize(await client.tokenize("hello")) == "hello"
