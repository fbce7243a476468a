"""Native products and embedding equal their definitions: odd sizes, both types, several threads."""

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrelay.kernels import reference
from kvrelay.kernels.cpu.library import instruction_set
from kvrelay.kernels.cpu.packed import (
    BLOCK,
    EMBED,
    LINEAR,
    Arena,
    EmbedArgs,
    Epilogue,
    LinearArgs,
    PackedLinear,
)
from kvrelay.kernels.cpu.program import Program, Team

DTYPES = (torch.float32, torch.bfloat16)
EXACT = 2e-6
ROUNDED = 2e-2
"""Tolerance where products of bfloat16 round activations to bfloat16 too."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def error_of(dtype: torch.dtype, team: Team) -> float:
    """The error of a product of normally distributed numbers."""
    rounded = dtype == torch.bfloat16 and instruction_set(team.library) in ("amx", "avx512bf16")
    return ROUNDED if rounded else EXACT


class Product:
    """One product in buffers with padded rows; the padding is NaN."""

    def __init__(self, team: Team, linear: PackedLinear, x: Tensor, width: int) -> None:
        self._team = team
        self._rows = ctypes.c_int64(len(x))
        self._linear = linear
        self._in = torch.full((len(x), linear.inputs + 5), torch.nan)
        self._in[:, : linear.inputs] = x
        self._width = width
        self._padded_out = torch.full((len(x), width + 3), torch.nan)
        self.out = self._padded_out[:, :width]
        self._workspace = torch.full((linear.workspace_bytes // 4,), torch.nan)

    def run(self, args: LinearArgs) -> Tensor:
        args.rows = ctypes.addressof(self._rows)
        args.input, args.input_stride = self._in.data_ptr(), self._in.stride(0)
        args.out, args.out_stride = self._padded_out.data_ptr(), self._padded_out.stride(0)
        args.workspace = self._workspace.data_ptr()
        self._team.run(Program(self._team.library, (LINEAR, args)))
        assert self._padded_out[:, self._width :].isnan().all(), "written past the last output"
        return self.out


@settings(max_examples=120, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 30), st.sampled_from([64, 200, 500])),
    inputs=st.sampled_from([1, 2, 7, 16, 33, 64, 576, 1100]),
    outputs=st.sampled_from([1, 5, 16, 17, 48, 96, 100]),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    norm=st.booleans(),
    add=st.booleans(),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_a_product_with_all_that_is_fused(
    team_of: Callable[[int], Team],
    rows: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    bias: bool,
    norm: bool,
    add: bool,
    threads: int,
    seed: int,
) -> None:
    team = team_of(threads)
    weight = (normal(outputs, inputs, seed=seed) / math.sqrt(inputs)).to(dtype)
    offset = normal(outputs, seed=seed + 1) if bias else None
    scale = 1 + 0.3 * normal(inputs, seed=seed + 2) if norm else None
    x, before = normal(rows, inputs, seed=seed + 3), normal(rows, outputs, seed=seed + 4)
    product = Product(team, PackedLinear.pack(team, Arena(), weight, offset), x, outputs)
    if add:
        product.out.copy_(before)
    args = product._linear.args(Epilogue.ADD if add else Epilogue.STORE, scale, 1e-5)
    found = product.run(args)
    source = x if scale is None else reference.rms_norm(x, scale, 1e-5)
    expected = reference.linear(weight.float(), offset)(source) + (before if add else 0)
    bound = 4 * error_of(dtype, team)
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 12, 13, 100])
@pytest.mark.parametrize("half", [BLOCK, 3 * BLOCK, 11 * BLOCK])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_product(team_of: Callable[[int], Team], dtype: torch.dtype, rows: int, half: int, bias: bool) -> None:
    team = team_of(2)
    weight = (2 * normal(2 * half, 72) / math.sqrt(72)).to(dtype)
    offset = normal(2 * half) if bias else None
    x = normal(rows, 72)
    product = Product(team, PackedLinear.pack(team, Arena(), weight, offset), x, half)
    found = product.run(product._linear.args(Epilogue.SILU_MUL))
    expected = reference.silu_mul(reference.linear(weight.float(), offset)(x))
    bound = 8 * error_of(dtype, team)
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)


def test_a_gate_far_from_zero_neither_overflows_nor_turns_into_nan(team_of: Callable[[int], Team]) -> None:
    team = team_of(1)
    weight = torch.eye(2 * BLOCK)
    gates = torch.tensor([-200.0, -90.0, -87.5, -20.0, 0.0, 20.0, 88.0, 90.0, 200.0, -torch.inf, torch.inf, torch.nan])
    x = torch.ones(1, 2 * BLOCK)
    x[0, : len(gates)] = gates
    product = Product(team, PackedLinear.pack(team, Arena(), weight, None), x, BLOCK)
    # One value at a time, because the zeros of the identity times infinity would be NaN everywhere.
    for place, gate in enumerate(gates):
        x[0, :BLOCK] = 0.0
        x[0, place] = gate
        product._in[:, : 2 * BLOCK] = x
        found = product.run(product._linear.args(Epilogue.SILU_MUL))[0, place]
        if gate.isfinite():
            torch.testing.assert_close(found, torch.nn.functional.silu(gate), atol=1e-30, rtol=1e-5)
        else:
            assert not found.isfinite() or gate == -torch.inf


def test_a_row_does_not_depend_on_its_company(team_of: Callable[[int], Team]) -> None:
    """Results are equal to the last bit for every batch and number of threads."""
    weight = (normal(100, 200) / 14).to(torch.bfloat16)
    x = normal(300, 200)
    alone = torch.cat([PackedLinear.pack(team_of(1), Arena(), weight, None)(row[None]) for row in x])
    for threads in (1, 2, 3):
        linear = PackedLinear.pack(team_of(threads), Arena(), weight, None)
        for rows in (2, 7, 12, 13, 40, 300):
            assert torch.equal(linear(x[:rows]), alone[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 33])
@pytest.mark.parametrize("packed", [False, True])
def test_looking_up_is_exact(team_of: Callable[[int], Team], dtype: torch.dtype, width: int, packed: bool) -> None:
    team = team_of(2)
    table = normal(50, width).to(dtype)
    linear = PackedLinear.pack(team, Arena(), table, None)
    tokens = torch.tensor([0, 49, 7, 7, 31, 16, 15])
    rows, pointer = ctypes.c_int64(len(tokens)), ctypes.c_void_p(tokens.data_ptr())
    out = torch.full((len(tokens), width + 2), torch.nan)
    args = EmbedArgs(
        rows=ctypes.addressof(rows),
        tokens=ctypes.addressof(pointer),
        weight=(linear.packed if packed else table).data_ptr(),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        width=width,
        type=linear.type,
        packed=packed,
    )
    team.run(Program(team.library, (EMBED, args)))
    assert torch.equal(out[:, :width], table[tokens].float())
    assert out[:, width:].isnan().all()
