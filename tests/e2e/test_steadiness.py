"""Memory and threads don't grow with the number of requests."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from kvrelay.client import Client
from support.processes import ProcessCluster, process_cluster

GROWTH = 1.05


def resident(cluster: ProcessCluster) -> dict[str, int]:
    return {name: psutil.Process(process.pid).memory_info().rss for name, process in cluster.processes.items()}


def threads(cluster: ProcessCluster) -> dict[str, int]:
    return {name: psutil.Process(process.pid).num_threads() for name, process in cluster.processes.items()}


def serve(cluster: ProcessCluster, requests: int, seed: int) -> None:
    """Mixed requests, eight at once; one in eight is cancelled after its first token."""
    rng = random.Random(seed)
    jobs = [(rng.choices(range(300), k=rng.randrange(1, 200)), rng.randrange(1, 24)) for _ in range(requests)]

    with Client(cluster.router) as client, ThreadPoolExecutor(8) as pool:

        def run(number: int) -> None:
            prompt, count = jobs[number]
            with client.generate(prompt, max_tokens=count, temperature=1, ignore_eos=True, timeout=60) as stream:
                for _ in stream:
                    if number % 8 == 0:
                        break

        list(pool.map(run, range(requests)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_thousand_requests_leave_memory_flat_and_every_block_accounted_for(tmp_path: Path) -> None:
    """The model is in bfloat16 and steps have every size, because oneDNN caches code for each size."""
    worker = {"dtype": "bfloat16", "engine": {"kv_memory_bytes": 64 * 2**20, "threads": 1}}
    with process_cluster(tmp_path, "pico", worker=worker) as cluster:
        serve(cluster, 500, seed=0)
        cluster.wait_idle()
        before, threads_before = resident(cluster), threads(cluster)
        serve(cluster, 2000, seed=1)
        cluster.wait_idle()
        after = resident(cluster)
        assert {name: after[name] / before[name] for name in after if after[name] > GROWTH * before[name]} == {}
        assert all(count <= threads_before[name] + 2 for name, count in threads(cluster).items())
