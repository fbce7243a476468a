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
CONVERTED = "KV is converted on arrival"
ENGINE = {"max_batch_tokens": CHUNK, "kv_memory_bytes": 8 * 2**20, "threads": 1}


def ask(router: str, prompt: list[int]) -> list[int]:
    with Client(router) as client:
        done = client.complete(prompt, max_tokens=OUT, temperature=0, ignore_eos=True, timeout=60)
    return list(done.token_ids)


def answers(folder: Path, roles: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """The answers of a pair with these options by role, twice: then decode has most KV in its prefix cache."""
    with process_cluster(folder, "pico", worker={"engine": ENGINE}, roles=roles) as cluster:
        prompts = [random.Random(length).choices(range(2, 200), k=length) for length in LENGTHS]
        first, again = ([ask(cluster.router, prompt) for prompt in prompts] for _ in range(2))
        cluster.wait_idle()
    return first, again


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], list[list[int]]]:
    return answers(tmp_path_factory.mktemp("equal"), {})


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(32, 16), pytest.param(16, 64, marks=pytest.mark.more), pytest.param(16, 32, marks=pytest.mark.slow)],
)
def test_roles_of_different_block_sizes_give_the_tokens_of_equal_ones(
    expected: tuple[list[list[int]], list[list[int]]], prefill: int, decode: int, tmp_path: Path
) -> None:
    sizes = {"prefill": prefill, "decode": decode}
    roles = {role: {"engine": {**ENGINE, "block_size": size}} for role, size in sizes.items()}
    assert answers(tmp_path, roles) == expected


def kept(prefill: str, decode: str) -> dict[str, Any]:
    """Roles that keep their KV as these kinds."""
    return {role: {"engine": {**ENGINE, "kv_dtype": kind}} for role, kind in (("prefill", prefill), ("decode", decode))}


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (
            {"prefill": {"dtype": "float32"}, "decode": {"dtype": "bfloat16"}},
            (CONVERTED, "dtype: bfloat16 here, float32 there"),
        ),
        # The sender makes the 8 bits, and the receiver everything else of them.
        pytest.param(kept("auto", "int8"), (), marks=pytest.mark.more),
        pytest.param(kept("int8", "int8"), (), marks=pytest.mark.slow),
        pytest.param(kept("int8", "auto"), (CONVERTED,), marks=pytest.mark.slow),
    ],
    ids=["float32 to bfloat16", "auto to int8", "int8 to int8", "int8 to auto"],
)
def test_roles_may_keep_kv_in_different_dtypes(roles: dict[str, Any], said: tuple[str, ...], tmp_path: Path) -> None:
    first, again = answers(tmp_path, roles)
    assert all(len(tokens) == OUT for tokens in first)
    assert again == first, "from the very same KV, in decode's prefix cache"
    log = (tmp_path / "decode-0.log").read_text()
    assert (CONVERTED in log) == bool(said)
    assert all(words in log for words in said)
