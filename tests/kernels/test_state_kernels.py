"""Triton's kernels of layers with a state: equal their definitions, and compile for GPUs that this machine lacks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from state_steps import STEPS, Scene
from triton_compile import Compiler, each_architecture

from kvrelay.kernels.states import StateRows, TimeStep
from kvrelay.kernels.triton.states.ops import TritonStateOps

# The interpreter truncates when it converts to bfloat16, so only the tests of compilation use that type.
more = pytest.mark.more
OPS = TritonStateOps()
DTYPE = torch.bfloat16
FLOAT32_STACK = 1024
"""Bytes of a thread's registers that the chunk-wise forms may spill in float32."""


SIZES: list[tuple[Any, ...]] = [
    *(("conv", *sizes) for sizes in ((150, 4), (37, 3))),
    *(("ssd", *sizes) for sizes in ((2, 1, 64, 32), (6, 3, 20, 9))),
    *(("delta", *sizes, channels) for sizes in ((4, 2, 20, 9), (1, 1, 64, 32)) for channels in (False, True)),
    ("wkv", 150),
]
"""Operations, and arguments of `Scene`'s checks."""


@pytest.mark.parametrize(
    ("step", "dtype"),
    [
        (STEPS[0], "float32"),
        pytest.param(STEPS[1], "float32", marks=more),
        *(pytest.param(step, "float16", marks=more) for step in STEPS),
    ],
)
@pytest.mark.parametrize("operation", SIZES, ids=str)
def test_equals_its_definition(
    device: torch.device, step: list[tuple[int, int]], dtype: str, operation: tuple[Any, ...]
) -> None:
    name, *sizes = operation
    getattr(Scene(step, dtype, device), f"check_{name}")(OPS, *sizes)


def test_channels_that_decay_are_carried_over_chunks(device: torch.device) -> None:
    Scene([(5, 20), (0, 1)], "float32", device).check_delta(OPS, 2, 1, 20, 9, True)


def launch_others(float32: bool) -> None:
    """Launches each other kernel as a layer of a published model would: a prompt, and a token."""
    rows = StateRows.of(np.array([300, 1]), np.array([0, 5]), np.array([0, 1]), torch.device("cpu"))
    dtype = torch.float32 if float32 else DTYPE

    def made(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=of)

    exact = torch.float32
    OPS.conv(made(301, 1024), made(1024, 4), made(1024), made(2, 4, 1024), rows, silu=True)
    states = made(2, 24, 128, 64, of=exact)
    x, of_b, heads = made(301, 24, 64), made(301, 1, 128), made(24)
    OPS.ssd(x, made(301, 24), heads, of_b, of_b, heads, TimeStep(heads, True, 0.0, 1e9), states, rows)
    q, v, states = made(301, 16, 128), made(301, 32, 128), made(2, 32, 128, 128, of=exact)
    OPS.delta(q, q, v, made(301, 32), made(301, 32), states, rows, normalized=True)
    OPS.wkv(made(301, 768), made(301, 768), made(768), made(768), made(2, 3, 768, of=exact), rows)


def launch_channels(float32: bool) -> None:
    """Launches the kernels of Kimi Delta Attention as a layer of Kimi-Linear would."""
    rows = StateRows.of(np.array([300, 1]), np.array([0, 5]), np.array([0, 1]), torch.device("cpu"))
    q, heads = torch.zeros((301, 32, 128), dtype=torch.float32 if float32 else DTYPE), torch.zeros((301, 32))
    OPS.delta(q, q, q, q.float(), heads, torch.zeros((2, 32, 128, 128)), rows, normalized=True)


@pytest.mark.parametrize(("launch", "count"), [(launch_others, 7), (launch_channels, 3)])
@pytest.mark.parametrize("float32", [False, True])
@each_architecture
def test_compiled(
    compiler: Compiler, architecture: int, float32: bool, launch: Callable[[bool], None], count: int
) -> None:
    """The chunk-wise forms of 16-bit numbers multiply on tensor cores, and spill no register. Those of float32, which
    is for comparisons, hold each operand three times for their three products in tf32."""
    kernels = compiler.compile(architecture, launch, float32)
    assert len(kernels) == count
    for kernel in kernels:
        of_chunks = kernel.name in ("ssd_kernel", "delta_kernel", "channel_pairs_kernel")
        kernel.check_fits(FLOAT32_STACK if float32 and of_chunks else 0)
        if of_chunks and not float32:
            assert kernel.tensor_cores, kernel.name
