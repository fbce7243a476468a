"""The prefill kernels in Gluon equal the definition in any order of their partitions, and need each of their waits."""

import importlib.util
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from gluon_interpreter import interpreted
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_kv import Sequences, blank, check_close, check_counts, coded_sequences, make_sequences, tiles_of
from torch import Tensor

from kvrelay.kernels import flash_prefill_blackwell, flash_prefill_hopper

CPU = torch.device("cpu")
KERNELS = pytest.mark.parametrize(
    "module", [flash_prefill_hopper, flash_prefill_blackwell], ids=["hopper", "blackwell"]
)


def run(module: types.ModuleType, case: Sequences, window: int = 0, seed: int = 0) -> Tensor:
    """What the kernel writes, interpreted."""
    out = torch.empty_like(case.query)
    with interpreted(module, seed):
        (launch,) = [
            value for name, value in vars(module).items() if name.startswith("flash_") and not hasattr(value, "fn")
        ]
        launch(case.query, case.kv, case.block_tables, tiles_of(case, module.PREFILL.rows, window), window, out)
    return out


CASES = {
    "rows": st.lists(st.tuples(st.integers(0, 400), st.integers(1, 140)), min_size=1, max_size=2),
    "shape": st.sampled_from([(4, 2, 64), (3, 1, 64), (8, 1, 128)]),
    "block_size": st.sampled_from([64, 128]),
    "window": st.sampled_from([0, 0, 1, 50, 64, 130, 300]),
    "seed": st.integers(0, 99),
}


def check(
    module: types.ModuleType,
    rows: list[tuple[int, int]],
    shape: tuple[int, int, int],
    block_size: int,
    window: int,
    seed: int,
) -> None:
    contexts = [start + length for start, length in rows]
    case = make_sequences(shape, contexts, [length for _, length in rows], block_size=block_size, device=CPU, seed=seed)
    check_close(run(module, case, window, seed), case.expected(window))


@KERNELS
@settings(max_examples=8, deadline=None)
@given(**CASES)
def test_they_equal_the_definition(module: types.ModuleType, **case: Any) -> None:
    check(module, **case)


@pytest.mark.slow
@KERNELS
@settings(max_examples=100, deadline=None)
@given(**CASES)
def test_they_equal_the_definition_in_more_cases(module: types.ModuleType, **case: Any) -> None:
    check(module, **case)


@KERNELS
@pytest.mark.parametrize("block_size", [64, 128])
def test_they_lose_no_key_and_read_none_twice(module: types.ModuleType, block_size: int) -> None:
    case = coded_sequences(
        (4, 2, 128), [700, 64, 3], [33, 64, 3], dtype=torch.float16, device=CPU, block_size=block_size
    )
    check_counts(run(module, case), case.expected())


@KERNELS
@pytest.mark.parametrize("length", [1, 9])
def test_they_read_no_page_before_the_window(module: types.ModuleType, length: int) -> None:
    window = 20
    case = make_sequences((4, 2, 64), [128 + length + window], [length], block_size=64, device=CPU)
    expected = case.expected(window)
    case.block_tables[0, :2] = 0  # A block of NaN: pages that no query sees any more belong to others.
    check_close(run(module, case, window), expected)


def growing(tokens: int, growth: float, seed: int = 0) -> Sequences:
    """A sequence of 900 keys, each longer than the one before it, so that every step has scores greater than before."""
    case = make_sequences((4, 1, 64), [900], [tokens], block_size=64, device=CPU, seed=seed)
    case.query.abs_()
    lengths = torch.linspace(0, growth, 900, dtype=torch.float16)
    for position in range(900):
        block, slot = int(case.block_tables[0, position // 64]), position % 64
        case.kv.pool[block, case.kv.layer, 0, :, slot] = lengths[position]
    return case


@KERNELS
@pytest.mark.parametrize("growth", [0.5, 2.0, 8.0, 30.0])
def test_scores_may_grow_slowly_or_fast(module: types.ModuleType, growth: float) -> None:
    """So sums are rescaled in all steps, or, below the slack, hardly ever."""
    case = growing(20, growth)
    check_close(run(module, case), case.expected())


@KERNELS
@pytest.mark.parametrize(
    ("kv_dtype", "block_size", "dim"),
    [(torch.int8, 64, 128), (torch.float16, 64, 128), (torch.bfloat16, 16, 128), (torch.bfloat16, 64, 80)],
    ids=str,
)
def test_what_they_do_not_take_is_refused(
    module: types.ModuleType, kv_dtype: torch.dtype, block_size: int, dim: int
) -> None:
    query, kv, tables = blank((4, 2, dim), 1, block_size, torch.bfloat16, kv_dtype)
    tiles = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"allowed: "):
        module.PREFILL.launch((query, kv, tables, tiles, 0, torch.zeros_like(query)))


WAIT = re.compile(r"mbarrier\.wait\(.*\)$|fence_async_shared\(\)$", re.MULTILINE)
NOT_FOR_RESULTS = ("turns", "init")
"""The turns of two consumers are for speed. The fence behind the barriers' `init` is not simulated."""


def waits() -> list[tuple[types.ModuleType, int]]:
    """Each wait and fence of the kernels that results depend on, by its number in the source."""
    found = []
    for module in (flash_prefill_hopper, flash_prefill_blackwell):
        source = Path(module.__file__).read_text()
        for number, wait in enumerate(WAIT.finditer(source)):
            lines = source[: wait.end()].splitlines()[-2:]
            if not any(word in line for word in NOT_FOR_RESULTS for line in lines):
                found.append((module, number))
    return found


def without_wait(module: types.ModuleType, number: int, folder: Path) -> tuple[types.ModuleType, str]:
    """The module without one of its waits, and its text."""
    source = Path(module.__file__).read_text()
    found = list(WAIT.finditer(source))[number]
    path = folder / "changed.py"
    path.write_text(source[: found.start()] + "pass" + source[found.end() :])
    spec = importlib.util.spec_from_file_location(f"changed_{folder.name}", path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed, found.group()


@pytest.mark.parametrize(("module", "number"), waits(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_without_any_of_their_waits_some_order_is_wrong(module: types.ModuleType, number: int, tmp_path: Path) -> None:
    changed, wait = without_wait(module, number, tmp_path)
    case = growing(60, 8.0)
    expected = case.expected()
    for seed in range(40):
        try:
            check_close(run(changed, case, seed=seed), expected)
        except (RuntimeError, AssertionError):
            return
    pytest.fail(f"40 orders are right without {wait}")
