"""Backpressure: with a full decode worker, prompts wait at the router, and prefill's memory stays free for others."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvrelay.client import ChunkStream, Client
from support.hash_runner import VOCAB_SIZE, expected_tokens
from support.hash_worker import MODULE, STEP_SECONDS, WORKER_LAYOUT
from support.processes import ProcessCluster, process_cluster, wait_until

REQUESTS = 32
OUT = 24
LONG = 250
"""Tokens that fill nearly all of decode's blocks, with their prompt, and take five seconds of steps."""
HOLDERS = 12
"""Requests that hold decode's blocks: even the smallest (9 blocks) fill them and prefill's backlog together."""
PREFILL_BLOCKS = 512
DECODE_BLOCKS = 48
SHARE = 0.1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """One worker of each role on the hash model; decode's blocks fit three or four of the prompts.

    Steps are so slow that decode's blocks stay held for several heartbeats, so the status shows them.
    """

    def engine(blocks: int) -> dict[str, dict[str, int]]:
        size = blocks * WORKER_LAYOUT.block_bytes
        return {"engine": {"block_size": 8, "max_batch_tokens": 128, "kv_memory_bytes": size, "threads": 1}}

    with process_cluster(
        tmp_path_factory.mktemp("pressed"),
        "pico",
        roles={"prefill": engine(PREFILL_BLOCKS), "decode": engine(DECODE_BLOCKS)},
        router={"backlog_share": SHARE},
        modules={"prefill": MODULE, "decode": MODULE},
        variables={STEP_SECONDS: "0.02"},
    ) as cluster:
        yield cluster


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(VOCAB_SIZE), k=rng.randrange(70, 110)) for _ in range(count)]


class Watch:
    """The most blocks held on prefill, and the most requests waiting at the router, that the status showed."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self._cluster = cluster
        self._over = threading.Event()
        self.held = self.waited = 0

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.03):
            loads = {status.member.name: status.load for status in self._cluster.status().members}
            self.held = max(self.held, loads["prefill-0"].blocks.held)
            self.waited = max(self.waited, loads["router-0"].requests.waiting)


def test_the_crowd_waits_at_the_router_and_not_in_prefills_memory(cluster: ProcessCluster) -> None:
    """Prefill would compute everything at once without backpressure: 32 prompts of about 12 blocks fit its 512."""
    crowd = prompts(0, REQUESTS)
    with Watch(cluster) as watch, Client(cluster.router) as client, ThreadPoolExecutor(REQUESTS) as pool:

        def ask(prompt: list[int]) -> tuple[int, ...]:
            return client.complete(prompt, max_tokens=OUT, temperature=0, ignore_eos=True, timeout=60).token_ids

        for prompt, tokens in zip(crowd, pool.map(ask, crowd), strict=True):
            assert list(tokens) == expected_tokens(prompt, OUT, WORKER_LAYOUT)
    # The backlog that may wait for decode, hand-offs into decode's free blocks, and the prompts that compute.
    assert watch.held <= SHARE * PREFILL_BLOCKS + DECODE_BLOCKS + 2 * 14
    assert watch.waited >= REQUESTS // 2
    cluster.wait_idle()


def test_a_cancel_in_the_queue_is_over_at_once_and_lets_others_on(cluster: ProcessCluster) -> None:
    crowd = prompts(1, HOLDERS + 10)
    with Client(cluster.router) as client:

        def waiting() -> int:
            return cluster.member("router-0").load.requests.waiting

        def generate(some: list[list[int]], tokens: int) -> list[ChunkStream]:
            return [
                client.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True, timeout=60)
                for prompt in some
            ]

        # Calls reach the router in any order, and short ones that came first would be served before the long ones.
        holders = generate(crowd[:HOLDERS], LONG)
        wait_until(lambda: waiting() >= 1, lambda: f"long ones wait at the router: {cluster.status()}")
        others = generate(crowd[HOLDERS:], 4)
        wait_until(lambda: waiting() >= len(others), lambda: f"the others wait behind them: {cluster.status()}")
        before = cluster.load_now("decode-0").computed_tokens
        for stream in holders:
            stream.close()
        for prompt, stream in zip(crowd[HOLDERS:], others, strict=True):
            tokens = [token for chunk in stream for token in chunk.token_ids]
            assert tokens == expected_tokens(prompt, 4, WORKER_LAYOUT)
        wait_until(lambda: waiting() == 0, "no request waits")
    computed = cluster.load_now("decode-0").computed_tokens - before
    assert computed < HOLDERS * LONG / 2, "those that were cancelled have not run to their ends"
    cluster.wait_idle()
