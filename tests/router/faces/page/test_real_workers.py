"""The life of a request over real workers: the chunks of its prompt, and KV on the wire while the prompt computes."""

import json
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.http_calls import fetched
from support.processes import process_cluster

CHUNK = 64
CHUNKS = 4


def lives(url: str, name: str, running: "Future[Any]") -> Iterator[Any]:
    """The life of a request again and again, the last time when it has ended."""
    ended = False
    while not ended:
        ended = running.done()
        with suppress(urllib.error.HTTPError):  # it has not begun
            yield from json.loads(fetched(f"{url}/page/requests/{name}"))
        time.sleep(0.01)


def test_chunks_and_kv_are_seen_while_the_prompt_computes(tmp_path: Path) -> None:
    with process_cluster(
        tmp_path,
        "pico",
        worker={"engine": {"max_batch_tokens": CHUNK, "kv_memory_bytes": 32 * 2**20, "threads": 1}},
        router={"http_port": 0},
    ) as cluster:
        url = f"http://{cluster.member('router-0').member.http_address}"
        body = {"prompt": "x = 1\n" * 400, "max_tokens": 4, "temperature": 0, "request_id": "mine"}
        with ThreadPoolExecutor(1) as pool:
            found = list(lives(url, "mine", pool.submit(fetched, f"{url}/v1/completions", body)))
    shown = found[-1]
    tokens = shown["prompt_tokens"]
    assert tokens > CHUNKS * CHUNK
    computed = [count for _, count in shown["chunks"]]
    assert computed == list(range(CHUNK, tokens, CHUNK)), "after each step but the last"
    spans = {span["stage"]: span for span in shown["spans"]}
    assert spans["transfer"]["start"] < spans["prefill"]["end"] <= spans["transfer"]["end"]
    assert spans["prefill"]["start"] <= shown["chunks"][0][0] <= shown["chunks"][-1][0] < spans["prefill"]["end"]
    assert shown["transfer_bytes"] > 0
    growing = [len(life["chunks"]) for life in found if life["ttft"] is None]
    assert growing == sorted(growing)
    assert growing[-1] > 0, "seen before the first token"
