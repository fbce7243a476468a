"""Decode workers die while completions obey schemas: each is valid, and equal to the one without a death."""

import itertools
import json
import random
import signal
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import jsonschema
import pytest

from kvrelay.client import Client, Completion
from support.processes import ProcessCluster, process_cluster
from support.schemas import random_schema

ENGINE = {"max_batch_tokens": 64, "kv_memory_bytes": 8 * 2**20, "threads": 1}
AT_ONCE = 6
PROMPT = "def value():\n    return "


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    folder = tmp_path_factory.mktemp("structured")
    with process_cluster(folder, "pico", decode=2, worker={"engine": ENGINE}) as cluster:
        yield cluster


def ask(client: Client, seed: int) -> tuple[dict[str, Any], Completion]:
    schema = random_schema(random.Random(seed))
    options = {"repetition_penalty": 1.1} if seed % 2 else {}
    return schema, client.complete(PROMPT, json_schema=schema, seed=seed, temperature=1.0, timeout=120, **options)


def wait_for_half(asked: Collection[Future[Any]]) -> None:
    """Returns when half of the answers are there."""
    for _ in itertools.islice(as_completed(asked, timeout=120), len(asked) // 2):
        pass


@pytest.mark.parametrize(
    ("rounds", "each"), [(3, 8), pytest.param(20, 50, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_schemas_are_obeyed_through_kills(cluster: ProcessCluster, rounds: int, each: int) -> None:
    done: dict[int, Completion] = {}
    with Client(cluster.router) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        for turn in range(rounds):
            asked = {pool.submit(ask, client, seed): seed for seed in range(turn * each, (turn + 1) * each)}
            wait_for_half(asked)
            victim = f"decode-{turn % 2}"
            cluster.processes[victim].popen.send_signal(signal.SIGKILL)
            cluster.replace(victim)
            for future, seed in asked.items():
                schema, completion = future.result(timeout=120)
                assert completion.finish_reason == "stop"
                jsonschema.validate(json.loads(completion.text), schema)
                done[seed] = completion
        moved = [seed for seed, completion in done.items() if completion.timeline.retries]
        assert moved
        for seed in moved:
            assert ask(client, seed)[1].token_ids == done[seed].token_ids
    cluster.wait_idle()
