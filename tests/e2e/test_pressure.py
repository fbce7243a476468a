"""Many more requests than the pools fit: they wait for free blocks, and no deadlock arises."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvrelay.client import Client
from support.processes import process_cluster

REQUESTS = 48
TOKENS = 24


def test_pools_of_a_few_prompts_serve_a_crowd(checkpoint: Path, tmp_path: Path) -> None:
    """Each role has two workers with blocks for about four prompts: tokens alone and in the crowd are equal."""
    rng = random.Random(0)
    prompts = [rng.choices(range(300), k=rng.randrange(100, 220)) for _ in range(REQUESTS)]
    engine = {"max_batch_tokens": 64, "kv_memory_bytes": 2**20, "threads": 1}
    with (
        process_cluster(tmp_path, checkpoint, prefill=2, decode=2, worker={"engine": engine}) as cluster,
        Client(cluster.router) as client,
    ):

        def tokens(prompt: list[int]) -> tuple[int, ...]:
            options = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "timeout": 60}
            return client.complete(prompt, **options).token_ids

        with ThreadPoolExecutor(REQUESTS) as pool:
            crowded = list(pool.map(tokens, prompts))
        assert crowded[::6] == [tokens(prompt) for prompt in prompts[::6]]
        cluster.wait_idle()
