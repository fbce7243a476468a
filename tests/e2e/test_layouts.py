"""A prefill and a decode worker whose KV layouts differ, end to end: block sizes and dtypes."""

import random
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import Client
from support.processes import process_cluster

CHUNK = 64
OUT = 12
LENGTHS = (1, 7, 8, 63, 64, 65, 100, 129, 200)
ENGINE = {"max_batch_tokens": CHUNK, "kv_memory_bytes": 8 * 2**20, "threads": 1}


def ask(router: str, prompt: list[int]) -> list[int]:
    with Client(router) as client:
        done = client.complete(prompt, max_tokens=OUT, temperature=0, ignore_eos=True, timeout=60)
    return list(done.token_ids)


def answers(folder: Path, **block_sizes: int) -> list[list[int]]:
    """The answers of a pair with these block sizes by role, by default equal ones."""
    roles = {role: {"engine": {**ENGINE, "block_size": size}} for role, size in block_sizes.items()}
    with process_cluster(folder, "pico", worker={"engine": ENGINE}, roles=roles) as cluster:
        prompts = [random.Random(length).choices(range(2, 200), k=length) for length in LENGTHS]
        # Twice: the second time, decode has the KV of most of the prompt in its prefix cache.
        tokens = [ask(cluster.router, prompt) for prompt in prompts + prompts]
        cluster.wait_idle()
    return tokens


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return answers(tmp_path_factory.mktemp("equal"))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(32, 16), pytest.param(16, 64, marks=pytest.mark.more), pytest.param(16, 32, marks=pytest.mark.slow)],
)
def test_roles_of_different_block_sizes_give_the_tokens_of_equal_ones(
    expected: list[list[int]], prefill: int, decode: int, tmp_path: Path
) -> None:
    assert answers(tmp_path, prefill=prefill, decode=decode) == expected


def test_a_prefill_in_float32_serves_a_decode_in_bfloat16(tmp_path: Path) -> None:
    roles: dict[str, Any] = {"prefill": {"dtype": "float32"}, "decode": {"dtype": "bfloat16"}}
    with process_cluster(tmp_path, "pico", worker={"engine": ENGINE}, roles=roles) as cluster:
        for length in LENGTHS:
            assert len(ask(cluster.router, random.Random(length).choices(range(2, 200), k=length))) == OUT
        cluster.wait_idle()
        log = (tmp_path / "decode-0.log").read_text()
    assert "KV is converted on arrival" in log
    assert "dtype: bfloat16 here, float32 there" in log


SLOW = pytest.mark.slow


@pytest.mark.more
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("auto", "int8"), pytest.param("int8", "int8", marks=SLOW), pytest.param("int8", "auto", marks=SLOW)],
)
def test_either_role_may_keep_kv_in_int8(prefill: str, decode: str, tmp_path: Path) -> None:
    kinds = {"prefill": prefill, "decode": decode}
    roles = {role: {"engine": {**ENGINE, "kv_dtype": kind}} for role, kind in kinds.items()}
    with process_cluster(tmp_path, "pico", worker={"engine": ENGINE}, roles=roles) as cluster:
        prompts = [random.Random(length).choices(range(2, 200), k=length) for length in LENGTHS]
        first = [ask(cluster.router, prompt) for prompt in prompts]
        assert all(len(tokens) == OUT for tokens in first)
        # The second time, decode has the KV of most of the prompt in its prefix cache: the very same codes.
        assert [ask(cluster.router, prompt) for prompt in prompts] == first
        cluster.wait_idle()
        log = (tmp_path / "decode-0.log").read_text()
    # The sender makes the 8 bits, and the receiver everything else of them.
    assert ("KV is converted on arrival" in log) == (decode == "auto")
