"""Decode workers die while completions obey schemas: each is valid, and equal to the one without a death."""

import json
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


def kill_decodes(cluster: ProcessCluster, due: threading.Semaphore, over: threading.Event) -> int:
    """Kills and replaces a decode worker each time that `due` says so; returns how often."""
    kills = 0
    while due.acquire() and not over.is_set():
        name = f"decode-{kills % 2}"
        cluster.processes[name].popen.send_signal(signal.SIGKILL)
        cluster.replace(name)
        kills += 1
    return kills


@pytest.mark.parametrize(
    ("count", "kill_every"), [(24, 8), pytest.param(1000, 50, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_schemas_are_obeyed_through_kills(cluster: ProcessCluster, count: int, kill_every: int) -> None:
    due, over = threading.Semaphore(0), threading.Event()
    with Client(cluster.router) as client, ThreadPoolExecutor(AT_ONCE) as pool, ThreadPoolExecutor(1) as killer:
        killing = killer.submit(kill_decodes, cluster, due, over)
        done = []
        for number, (schema, completion) in enumerate(pool.map(lambda seed: ask(client, seed), range(count)), 1):
            assert completion.finish_reason == "stop"
            jsonschema.validate(json.loads(completion.text), schema)
            done.append(completion)
            if number % kill_every == kill_every // 2:
                due.release()
        over.set()
        due.release()
        assert killing.result() >= count // kill_every - 1
        assert sum(completion.timeline.retries for completion in done) >= 1
        moved = [seed for seed, completion in enumerate(done) if completion.timeline.retries]
        for seed in moved:
            assert ask(client, seed)[1].token_ids == done[seed].token_ids
    cluster.wait_idle()
