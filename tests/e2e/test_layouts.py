"""Roles whose KV lies differently, over the whole road: block sizes, dtypes, the last chunk by groups of layers."""

import random
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import Client
from support.hash_runner import expected_tokens
from support.hash_worker import MODULE, WORKER_LAYOUT
from support.processes import MODULES, process_cluster

CHUNK = 64
OUT = 12
LENGTHS = (1, 7, 8, 63, 64, 65, 100, 129, 200)


def ask(router: str, prompt: list[int]) -> list[int]:
    with Client(router) as client:
        done = client.complete(prompt, max_tokens=OUT, temperature=0, ignore_eos=True, timeout=60)
    return list(done.token_ids)


@pytest.mark.parametrize("transport", ["auto", "tcp", "gloo"])
def test_the_last_chunk_leaves_by_groups_of_layers(tmp_path: Path, transport: str) -> None:
    """The hash model: one layer's bytes too early, and every later token is another."""
    engine = {"block_size": WORKER_LAYOUT.block_size, "max_batch_tokens": CHUNK, "kv_memory_bytes": 2**20}
    worker = {"engine": engine, "transfer": {"layer_groups": 2, "transport": transport}}
    modules = dict.fromkeys(MODULES, MODULE)
    with process_cluster(tmp_path, "pico", worker=worker, modules=modules) as cluster:
        for length in LENGTHS:
            prompt = random.Random(length).choices(range(200), k=length)
            assert ask(cluster.router, prompt) == expected_tokens(prompt, OUT, WORKER_LAYOUT), f"{length} tokens"
        cluster.wait_idle()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"engine": {"block_size": 32}}, {"engine": {"block_size": 16}}),
        ({"engine": {"block_size": 16}}, {"engine": {"block_size": 32}}),
        ({"engine": {"block_size": 16}, "transfer": {"layer_groups": 3}}, {"engine": {"block_size": 64}}),
    ],
)
def test_roles_of_different_block_sizes_give_the_tokens_of_equal_ones(
    prefill: dict[str, Any], decode: dict[str, Any], tmp_path: Path
) -> None:
    common = {"max_batch_tokens": CHUNK, "kv_memory_bytes": 8 * 2**20, "threads": 1}
    answers = []
    for number, roles in enumerate(({}, {"prefill": prefill, "decode": decode})):
        options = {
            role: {**roles.get(role, {}), "engine": {**common, **roles.get(role, {}).get("engine", {})}}
            for role in ("prefill", "decode")
        }
        with process_cluster(tmp_path / str(number), "pico", roles=options) as cluster:
            prompts = [random.Random(length).choices(range(2, 200), k=length) for length in LENGTHS]
            # Twice: the second time, decode has most of the prompt in blocks of its own.
            answers.append([ask(cluster.router, prompt) for prompt in prompts + prompts])
            cluster.wait_idle()
    assert answers[0] == answers[1]


def test_a_prefill_in_float32_serves_a_decode_in_bfloat16(tmp_path: Path) -> None:
    engine = {"max_batch_tokens": CHUNK, "kv_memory_bytes": 8 * 2**20, "threads": 1}
    roles = {"prefill": {"dtype": "float32"}, "decode": {"dtype": "bfloat16"}}
    with process_cluster(tmp_path, "pico", worker={"engine": engine}, roles=roles) as cluster:
        for length in LENGTHS:
            assert len(ask(cluster.router, random.Random(length).choices(range(2, 200), k=length))) == OUT
        cluster.wait_idle()
        log = (tmp_path / "decode-0.log").read_text()
    assert "KV is converted on arrival" in log
    assert "dtype: bfloat16 here, float32 there" in log
