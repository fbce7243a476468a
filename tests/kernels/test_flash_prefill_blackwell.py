"""Prefill attention on Blackwell: what it compiles to. `test_gluon_prefill` is about its results."""

import re

import pytest
import torch
from paged_kv import Sequences, blank, check_close, check_counts, coded_sequences, make_sequences, tiles_of
from torch import Tensor
from triton_compile import Compiler

from kvrelay.kernels.flash_prefill_blackwell import ROWS, flash_prefill_blackwell

TENSOR_MEMORY_COLUMNS = 512
"""Of a multiprocessor (PTX ISA, tensor memory)."""


def launch_blank(dim: int, group: int, block_size: int, window: int, dtype: torch.dtype) -> None:
    query, kv, tables = blank((2 * group, 2, dim), 1, block_size, dtype, dtype)
    tiles = torch.zeros(1, 4, dtype=torch.int32)
    flash_prefill_blackwell(query, kv, tables, tiles, window, torch.zeros_like(query))


LAUNCHES = [
    (128, 4, 64, 0, torch.bfloat16),
    (128, 4, 64, 4096, torch.bfloat16),
    (128, 7, 128, 0, torch.float16),
    (64, 8, 64, 0, torch.bfloat16),
]


@pytest.mark.parametrize(
    "launch",
    [pytest.param(launch, marks=pytest.mark.slow if launch != LAUNCHES[0] else ()) for launch in LAUNCHES],
    ids=str,
)
def test_compiled(compiler: Compiler, launch: tuple[int, int, int, int, torch.dtype]) -> None:
    (kernel,) = compiler.compile(100, launch_blank, *launch)
    kernel.check_fits(stack=8)
    assert kernel.tensor_cores == "tcgen05"
    assert "cp.async.bulk.tensor.3d" in kernel.ptx
    assert {"tcgen05.ld", "tcgen05.st", "tcgen05.commit"} <= set(re.findall(r"tcgen05\.[a-z]+", kernel.ptx))
    (columns,) = re.findall(r"tcgen05\.alloc\.\S+ \[%r\d+\], (\d+);", kernel.ptx)
    assert int(columns) <= TENSOR_MEMORY_COLUMNS
    order = instructions(kernel.sass)
    # Spilled is at most what a partition reads once at its begin: nothing in a loop.
    assert not re.search(r"[^rs]s", order), order
    # Scores leave tensor memory before the exponentials, and weights return behind them, in each loop of both halves.
    steps = re.findall(r"l+(e+)t", order.replace("r", "").replace("s", "").replace("M", ""))
    assert len(steps) == 2 * (3 if launch[3] else 2), order
    assert all(len(step) >= 128 for step in steps)


def instructions(sass: str) -> str:
    """A letter for each product (M), exponential (e), load (l) and store (t) of tensor memory, spill (s), and change of
    the number of registers (r)."""
    letters = {"UTCHMMA": "M", "MUFU.EX2": "e", "LDTM": "l", "STTM": "t", "LDL": "s", "STL": "s", "USETMAXREG": "r"}
    return "".join(letters[found] for found in re.findall("|".join(map(re.escape, letters)), sass))


def run(case: Sequences, window: int = 0) -> Tensor:
    out = torch.empty_like(case.query)
    flash_prefill_blackwell(case.query, case.kv, case.block_tables, tiles_of(case, ROWS, window), window, out)
    return out


@pytest.fixture
def blackwell(gpu: torch.device) -> torch.device:
    """A GPU of the architecture that the kernel is for."""
    if torch.cuda.get_device_capability(gpu)[0] != 10:
        pytest.skip("needs a GPU of compute capability 10")
    return gpu


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 1000])
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(8, 2, 128), (14, 2, 64)], ids=str)
def test_on_a_gpu(
    blackwell: torch.device, shape: tuple[int, int, int], dtype: torch.dtype, block_size: int, window: int
) -> None:
    case = make_sequences(
        shape, [2500, 700, 64, 5], [900, 700, 1, 5], block_size=block_size, dtype=dtype, device=blackwell
    )
    check_close(run(case, window), case.expected(window))


@pytest.mark.gpu
def test_on_a_gpu_no_key_is_lost(blackwell: torch.device) -> None:
    case = coded_sequences((4, 2, 128), [4200], [900], dtype=torch.bfloat16, device=blackwell, block_size=64)
    check_counts(run(case), case.expected())
