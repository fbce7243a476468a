"""A co-located worker gives the tokens that a pair gives, and losing a worker under load costs time, not tokens.

The workers are on CPUs, or all of them on one GPU.
"""

import itertools
import random
from collections.abc import Callable
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


@pytest.mark.timeout(400)
@pytest.mark.parametrize("device", DEVICES)
def test_a_pair_whose_decode_worker_is_killed_under_load_gives_the_tokens_of_a_co_located_worker(
    checkpoint: Path, tmp_path: Path, device: str
) -> None:
    """Equal tokens in steps of any size need float32: in 16 bits, two nearly equal logits may change places."""
    engine = {"kv_memory_bytes": 16 * 2**20, "max_batch_tokens": 128, "max_sequences": 16, "threads": 1}
    worker = {"dtype": "float32", "engine": {"device": device, **engine}}
    with process_cluster(
        tmp_path / "colocated", checkpoint, prefill=0, decode=0, colocated=1, worker=worker
    ) as cluster:
        expected = [ask(cluster, number) for number in range(REQUESTS)]  # one at a time
    for each in expected:
        assert each.timeline.transfer_bytes == 0
        assert each.timeline.prefill_worker == each.timeline.decode_worker == "colocated-0"
    chunks = itertools.count(1)
    with process_cluster(tmp_path / "pair", checkpoint, decode=2, worker=worker) as cluster:

        def on_chunk() -> None:
            # The other streams have just begun, or have yet to: one takes less than a tenth of a second.
            if next(chunks) == 1:
                cluster.processes["decode-0"].popen.kill()

        with ThreadPoolExecutor(AT_ONCE) as pool:
            done = list(pool.map(lambda number: ask(cluster, number, on_chunk), range(REQUESTS)))
        assert [(each.text, each.token_ids) for each in done] == [(each.text, each.token_ids) for each in expected]
        retried = [each.timeline for each in done if each.timeline.retries]
        assert retried
        assert all((timeline.retries, timeline.decode_worker) == (1, "decode-1") for timeline in retried)
        cluster.wait_idle(20, but=["decode-0"])
