"""A bundled model's worker changes its role with streams on it, and a pool goes to zero and back: how long each takes.

The figures are printed (`pytest -s`); `benchmarks/NOTES.md` has those of a quiet machine.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from typing import Any

import pytest

from kvrelay.client import Client
from support.processes import START_SECONDS, wait_until
from support.supervised import Supervised, all_ready, supervised

STREAMS = 6
PROMPT, OUT = 48, 500
ENGINE = {"kv_memory_bytes": 16 * 2**20, "threads": 1}
SWITCH_SECONDS = 3.0
BUSY = 3.0
"""Factor by which a machine that runs other tests, too, may be slower."""
CLIENT_SECONDS = 120.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    """One prefill and two decode workers that can take any role, and a router."""
    options: dict[str, Any] = {"model": "pico", "dtype": "float32", "engine": ENGINE, "drain_seconds": 1.0}
    members: dict[str, dict[str, Any]] = {
        f"worker-{index}": {"module": "kvrelay.cluster.processes.worker", "options": {"role": role, **options}}
        for index, role in enumerate(("prefill", "decode", "decode"))
    }
    router = {"model": "pico", "grpc_port": 0, "http_port": None}
    members["router-0"] = {"module": "kvrelay.router", "options": router}
    with supervised(tmp_path_factory.mktemp("pico"), members, drain_seconds=1.0) as cluster:
        all_ready(cluster)
        yield cluster
        assert cluster.process is not None
        assert cluster.process.stop() == 0
        assert cluster.alive() == []


def prompt(number: int) -> list[int]:
    return [(number * 7919 + position * 104729) % 500 + 1 for position in range(PROMPT)]


def ask(router: str, number: int, begun: Semaphore) -> tuple[list[int], float]:
    """The tokens of one greedy stream, and the longest time between two chunks."""
    tokens: list[int] = []
    longest, last = 0.0, None
    with Client(router) as client:
        chunks = client.generate(
            prompt(number), max_tokens=OUT, temperature=0.0, ignore_eos=True, timeout=CLIENT_SECONDS
        )
        for chunk in chunks:
            now = time.monotonic()
            if last is None:
                begun.release()
            else:
                longest = max(longest, now - last)
            last = now
            tokens += chunk.token_ids
    return tokens, longest


def run(pool: ThreadPoolExecutor, router: str) -> Sequence["Future[tuple[list[int], float]]"]:
    """Streams that have all begun."""
    begun = Semaphore(0)
    streams = [pool.submit(ask, router, number, begun) for number in range(STREAMS)]
    for _ in streams:
        assert begun.acquire(timeout=CLIENT_SECONDS)
    return streams


def streams_on(cluster: Supervised, name: str) -> int:
    return cluster.member(name).load.requests.running


@pytest.mark.slow
def test_a_worker_of_the_bundled_model_takes_another_role_in_seconds(cluster: Supervised) -> None:
    router = cluster.member("router-0").member.address
    with ThreadPoolExecutor(STREAMS) as pool:
        expected = [stream.result()[0] for stream in run(pool, router)]
        assert all(len(tokens) == OUT for tokens in expected)
        before = cluster.member("worker-2").member
        streams = run(pool, router)
        wait_until(lambda: streams_on(cluster, "worker-2"), "streams on the worker", CLIENT_SECONDS)
        moved = streams_on(cluster, "worker-2")
        began = time.monotonic()
        cluster.settle(cluster.control.set_role("worker-2", "prefill"))
        seconds = time.monotonic() - began
        after = cluster.member("worker-2").member
        found = [stream.result() for stream in streams]
    pause = max(longest for _, longest in found)
    print(f"\nrole switch {seconds:.2f} s, {moved} streams on the worker, longest pause {pause:.2f} s")
    assert [tokens for tokens, _ in found] == expected
    assert after.pid == before.pid
    assert after.incarnation != before.incarnation
    assert seconds < SWITCH_SECONDS * BUSY


@pytest.mark.slow
def test_a_pool_of_the_bundled_model_starts_from_zero(cluster: Supervised) -> None:
    cluster.settle(cluster.control.scale({"prefill": 0, "decode": 0}))
    began = time.monotonic()
    revision = cluster.control.scale({"prefill": 1, "decode": 1})
    cluster.settle(revision)
    seconds = time.monotonic() - began
    tokens, _ = ask(cluster.member("router-0").member.address, 1, Semaphore(0))
    print(f"\ncold start {seconds:.2f} s, first answer complete {time.monotonic() - began:.2f} s")
    assert len(tokens) == OUT
    assert seconds < START_SECONDS
