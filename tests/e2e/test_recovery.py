"""A co-located worker gives the tokens that a pair gives, and losing a worker under load costs time, not tokens.

The workers are on CPUs, or all of them on one GPU.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.client import Chunk, Client, Completion
from kvrelay.client.messages import completion
from support.processes import ProcessCluster, process_cluster

OUT = 150
REQUESTS, AT_ONCE = 16, 8
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")],
    ),
]


@pytest.fixture(scope="module", params=DEVICES)
def worker(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of the workers. Equal tokens in steps of any size need float32: in 16 bits, two nearly equal logits may
    change places."""
    engine = {"kv_memory_bytes": 16 * 2**20, "max_batch_tokens": 128, "max_sequences": 16, "threads": 1}
    return {"dtype": "float32", "engine": {"device": request.param, **engine}}


@pytest.fixture(scope="module")
def expected(worker: dict[str, Any], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Completion]:
    """The completions of one co-located worker, one prompt at a time."""
    folder = tmp_path_factory.mktemp("colocated")
    with process_cluster(folder, checkpoint, prefill=0, decode=0, colocated=1, worker=worker) as cluster:
        done = [ask(cluster, number) for number in range(REQUESTS)]
    for each in done:
        assert each.timeline.transfer_bytes == 0
        assert each.timeline.prefill_worker == each.timeline.decode_worker == "colocated-0"
    return done


@pytest.fixture(scope="module")
def cluster(
    worker: dict[str, Any], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessCluster]:
    with process_cluster(tmp_path_factory.mktemp("pair"), checkpoint, decode=2, worker=worker) as cluster:
        yield cluster


def ask(cluster: ProcessCluster, number: int, on_chunk: Callable[[], None] = lambda: None) -> Completion:
    """A greedy completion, or, for odd numbers, a drawn one."""
    rng = random.Random(number)
    prompt = rng.choices(range(4, 300), k=rng.randrange(1, 250))
    sampling: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": number} if number % 2 else {"temperature": 0}
    chunks: list[Chunk] = []
    with Client(cluster.router) as client:
        for chunk in client.generate(prompt, max_tokens=OUT, ignore_eos=True, timeout=120, **sampling):
            chunks.append(chunk)
            on_chunk()
    return completion(chunks)


def contents(done: list[Completion]) -> list[tuple[str, tuple[int, ...]]]:
    return [(each.text, each.token_ids) for each in done]


@pytest.mark.timeout(400)
def test_a_decode_worker_killed_under_load_costs_no_token(cluster: ProcessCluster, expected: list[Completion]) -> None:
    chunks = itertools.count(1)

    def on_chunk() -> None:
        if (
            next(chunks) == 1
        ):  # the other streams have just begun, or have yet to: one takes less than a tenth of a second
            cluster.processes["decode-0"].popen.kill()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = list(pool.map(lambda number: ask(cluster, number, on_chunk), range(REQUESTS)))
    assert contents(done) == contents(expected)
    retried = [each.timeline for each in done if each.timeline.retries]
    assert retried
    assert all((timeline.retries, timeline.decode_worker) == (1, "decode-1") for timeline in retried)
    cluster.wait_idle(20, but=["decode-0"])
