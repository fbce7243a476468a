"""The life of a request over real workers: the chunks of its prompt, and KV on the wire while the prompt computes."""

import json
import urllib.request
from pathlib import Path
from typing import Any

from support.processes import free_port, process_cluster

CHUNK = 64
CHUNKS = 4
SECONDS = 60


def generate(port: int, ask: dict[str, Any]) -> list[tuple[str, Any]]:
    """The events of one generation."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/page/generate", json.dumps(ask).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        parts = response.read().decode().strip().split("\n\n")
    lines = (part.split("\n") for part in parts)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in lines]


def test_chunks_and_kv_are_seen_while_the_prompt_computes(tmp_path: Path) -> None:
    port = free_port()
    with process_cluster(
        tmp_path,
        "pico",
        worker={"engine": {"max_batch_tokens": CHUNK, "kv_memory_bytes": 32 * 2**20, "threads": 1}},
        router={"http_port": port},
    ):
        text = "x = 1\n" * 400
        found = generate(port, {"text": text, "max_tokens": 4, "temperature": 0})
    end = found[-1][1]
    shown = end["life"]
    tokens = shown["prompt_tokens"]
    assert tokens > CHUNKS * CHUNK
    computed = [count for _, count in shown["chunks"]]
    assert computed == list(range(CHUNK, tokens, CHUNK)), "after each step but the last"
    spans = {span["stage"]: span for span in shown["spans"]}
    assert spans["transfer"]["start"] < spans["prefill"]["end"] <= spans["transfer"]["end"]
    assert spans["prefill"]["start"] < shown["chunks"][0][0] <= shown["chunks"][-1][0] < spans["prefill"]["end"]
    assert shown["transfer_bytes"] > 0
    lives = [value for name, value in found if name == "life"]
    growing = [len(life["chunks"]) for life in lives if life["ttft"] is None]
    assert growing == sorted(growing)
    assert growing[-1] > 0, "seen before the first token"
