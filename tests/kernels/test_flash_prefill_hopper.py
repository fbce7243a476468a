"""Prefill attention on Hopper: its machine code overlaps what it should. `test_gluon_prefill` is about its results."""

import re

import pytest
import torch
from paged_kv import Sequences, blank, check_close, check_counts, coded_sequences, make_sequences, tiles_of
from torch import Tensor
from triton_compile import Compiler

from kvrelay.kernels.flash_prefill_hopper import ROWS, flash_prefill_hopper


def launch_blank(dim: int, group: int, block_size: int, window: int, dtype: torch.dtype) -> None:
    query, kv, tables = blank((2 * group, 2, dim), 1, block_size, dtype, dtype)
    tiles = torch.zeros(1, 4, dtype=torch.int32)
    flash_prefill_hopper(query, kv, tables, tiles, window, torch.zeros_like(query))


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
    (kernel,) = compiler.compile(90, launch_blank, *launch)
    kernel.check_fits()
    assert kernel.tensor_cores == "wgmma"
    assert "cp.async.bulk.tensor.3d" in kernel.ptx
    assert {"240", "24"} <= set(re.findall(r"setmaxnreg\.dec\.sync\.aligned\.u32\s+(\d+)", kernel.ptx))
    order = instructions(kernel.sass)
    # The compiler serializes products whose accumulators it must touch while they are under way: it then waits after
    # each one. Here it waits after all of a step's: those of the scores and those of the values.
    batches = [len(batch) for batch in re.findall(r"[M.]+(?=w)", order.replace("e", ""))]
    assert min(batches) > 1
    # From one wait for products to the next: most of a step's 34 exponentials are issued behind its first product, in
    # the first step, in each loop and in the last step, of both consumers.
    steps = [step[step.find("M") :].count("e") for step in order.split("w")]
    assert sum(count >= 24 for count in steps) == 2 * (5 if launch[3] else 4), order


def instructions(sass: str) -> str:
    """One letter for each product (M), exponential (e), wait for products (w) and begin of a batch of products (.)."""
    letters = {"HGMMA": "M", "MUFU.EX2": "e", "WARPGROUP.DEPBAR": "w", "WARPGROUP.ARRIVE": "."}
    return "".join(letters[found] for found in re.findall("|".join(map(re.escape, letters)), sass))


def run(case: Sequences, window: int = 0) -> Tensor:
    out = torch.empty_like(case.query)
    flash_prefill_hopper(case.query, case.kv, case.block_tables, tiles_of(case, ROWS, window), window, out)
    return out


@pytest.fixture
def hopper(gpu: torch.device) -> torch.device:
    """A GPU of the architecture that the kernel is for."""
    if torch.cuda.get_device_capability(gpu) != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    return gpu


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 1000])
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(8, 2, 128), (14, 2, 64)], ids=str)
def test_on_a_gpu(
    hopper: torch.device, shape: tuple[int, int, int], dtype: torch.dtype, block_size: int, window: int
) -> None:
    case = make_sequences(
        shape, [2500, 700, 64, 5], [900, 700, 1, 5], block_size=block_size, dtype=dtype, device=hopper
    )
    check_close(run(case, window), case.expected(window))


@pytest.mark.gpu
def test_on_a_gpu_no_key_is_lost(hopper: torch.device) -> None:
    case = coded_sequences((4, 2, 128), [4200], [900], dtype=torch.bfloat16, device=hopper, block_size=64)
    check_counts(run(case), case.expected())
