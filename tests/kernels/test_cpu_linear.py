"""Native products and embedding equal their definitions, of dense and quantized weights: odd sizes, several threads."""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrelay.kernels import reference
from kvrelay.kernels.codes import GROUP_MULTIPLE, NUMBERS, SMALLEST_GROUP, CodedWeight, CodeType
from kvrelay.kernels.cpu.library import instruction_set
from kvrelay.kernels.cpu.packed import (
    BLOCK,
    EMBED,
    LINEAR,
    NORM,
    Arena,
    EmbedArgs,
    Epilogue,
    LinearArgs,
    NormArgs,
    PackedLinear,
    PackedMlp,
    PackedNorm,
)
from kvrelay.kernels.cpu.program import Buffer, Program, Team

DTYPES = (torch.float32, torch.bfloat16)
EXACT = 2e-6
ROUNDED = 2e-2
"""Tolerance where products of bfloat16 round activations to bfloat16 too."""


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, in] as int8, by its largest magnitude in each row, and the scales [T, 1]."""
    values = x.float()
    largest = values.abs().amax(1, keepdim=True)
    scales = torch.where(largest > 0, largest / 127, 1.0)
    return (values / scales).round_().to(torch.int8), scales


def random_codes(
    kind: CodeType, outputs: int, inputs: int, group: int, *, zeros: bool, minima: bool = False, seed: int = 0
) -> CodedWeight:
    """Random codes: any but NaN, which only fp8 has here."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 2**kind.bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    if kind is CodeType.FP8:
        found[(found & 0x7F) == 0x7F] = 0
    shape = (outputs, -(-inputs // group))
    largest = NUMBERS[kind]().nan_to_num(0).abs().max()
    scales = (0.5 + torch.rand(shape, generator=generator)) / largest
    points = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8) if zeros else None
    lowest = torch.rand(shape, generator=generator) - 0.5 if minima else None
    return CodedWeight(kind, found, scales, points, group, minima=lowest)


def error_of(dtype: torch.dtype, team: Team) -> float:
    """The error of a product of normally distributed numbers."""
    rounded = dtype == torch.bfloat16 and instruction_set(team.library) in ("amx", "avx512bf16")
    return ROUNDED if rounded else EXACT


class Product:
    """One product in buffers with padded rows; the padding is NaN."""

    def __init__(self, team: Team, linear: PackedLinear, x: Tensor, width: int) -> None:
        self._team = team
        self._rows = ctypes.c_int64(len(x))
        self.linear = linear
        self._padded_in = torch.full((len(x), linear.inputs + 5), torch.nan)
        self.input = self._padded_in[:, : linear.inputs]
        self.input.copy_(x)
        self._width = width
        self._padded_out = torch.full((len(x), width + 3), torch.nan)
        self.out = self._padded_out[:, :width]
        self._workspace = torch.full((linear.workspace_bytes // 4,), torch.nan)

    def run(self, args: LinearArgs) -> Tensor:
        args.rows = ctypes.addressof(self._rows)
        args.input, args.input_stride = self.input.data_ptr(), self.input.stride(0)
        args.out, args.out_stride = self._padded_out.data_ptr(), self._padded_out.stride(0)
        args.workspace = self._workspace.data_ptr()
        self._team.run(Program(self._team.library, (LINEAR, args)))
        assert self._padded_out[:, self._width :].isnan().all(), "written past the last output"
        return self.out


@dataclass(frozen=True)
class Case:
    """Sizes of a product, and the seed of its numbers."""

    rows: int
    inputs: int
    outputs: int
    threads: int
    seed: int

    @property
    def x(self) -> Tensor:
        return normal(self.rows, self.inputs, seed=self.seed)

    def codes(self, kind: CodeType, group: int, *, zeros: bool, minima: bool = False) -> CodedWeight:
        """A random weight."""
        group = min(group, self.inputs)
        return random_codes(kind, self.outputs, self.inputs, group, zeros=zeros, minima=minima, seed=self.seed)


def cases(rows: st.SearchStrategy[int]) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        rows=rows,
        inputs=st.sampled_from([1, 2, 7, 16, 32, 33, 64, 576, 1100]),
        outputs=st.sampled_from([1, 5, 16, 17, 48, 96, 100]),
        threads=st.integers(1, 4),
        seed=st.integers(0, 2**16),
    )


any_case = cases(st.one_of(st.integers(1, 40), st.sampled_from([64, 200, 500])))
groups = st.sampled_from([32, 64, 96, 128, 4096])


@settings(max_examples=60, deadline=None)
@given(
    case=any_case,
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    norm=st.booleans(),
    epilogue=st.sampled_from([Epilogue.STORE, Epilogue.ADD, Epilogue.GELU]),
)
def test_a_product_with_all_that_is_fused(
    team_of: Callable[[int], Team], case: Case, dtype: torch.dtype, bias: bool, norm: bool, epilogue: Epilogue
) -> None:
    team, inputs, outputs, seed = team_of(case.threads), case.inputs, case.outputs, case.seed
    weight = (normal(outputs, inputs, seed=seed) / math.sqrt(inputs)).to(dtype)
    offset = normal(outputs, seed=seed + 1) if bias else None
    scale = 1 + 0.3 * normal(inputs, seed=seed + 2) if norm else None
    x, before = normal(case.rows, inputs, seed=seed + 3), normal(case.rows, outputs, seed=seed + 4)
    product = Product(team, PackedLinear.pack(team, Arena(), weight, offset), x, outputs)
    if epilogue is Epilogue.ADD:
        product.out.copy_(before)
    found = product.run(product.linear.args(epilogue, scale, 1e-5))
    source = x if scale is None else reference.rms_norm(x, scale, 1e-5)
    expected = reference.linear(weight.float(), offset)(source)
    if epilogue is Epilogue.GELU:
        expected = reference.gelu(expected)
    elif epilogue is Epilogue.ADD:
        expected += before
    bound = 4 * error_of(dtype, team)
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 12, 13, 100])
@pytest.mark.parametrize("half", [BLOCK, 3 * BLOCK, 11 * BLOCK])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", [Epilogue.SILU_MUL, Epilogue.GELU_MUL])
@pytest.mark.some(40)
def test_a_gated_product(
    team_of: Callable[[int], Team], dtype: torch.dtype, rows: int, half: int, bias: bool, gate: Epilogue
) -> None:
    team = team_of(2)
    weight = (2 * normal(2 * half, 72) / math.sqrt(72)).to(dtype)
    offset = normal(2 * half) if bias else None
    x = normal(rows, 72)
    product = Product(team, PackedLinear.pack(team, Arena(), weight, offset), x, half)
    found = product.run(product.linear.args(gate))
    gated = reference.silu_mul if gate is Epilogue.SILU_MUL else reference.gelu_mul
    expected = gated(reference.linear(weight.float(), offset)(x))
    bound = 8 * error_of(dtype, team)
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (2, 7), (1, 100)], ids=str)
@pytest.mark.parametrize("gate", [Epilogue.SILU_MUL, Epilogue.RELU_SQUARED])
def test_an_mlp(team_of: Callable[[int], Team], gate: Epilogue, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """It is its two products one behind the other."""
    team, hidden, inner, buffer = team_of(2), 70, 6 * BLOCK, Buffer(np.float32)
    up = normal(2 * inner if gate.is_gated else inner, hidden, dtype=dtype) / hidden**0.5
    down = normal(hidden, inner, dtype=dtype, seed=1) / inner**0.5
    first, last = (PackedLinear.pack(team, Arena(), each, None) for each in (up, down))
    x = normal(*shape, hidden, seed=2)
    numbers = first(x.flatten(0, -2))
    between = reference.silu_mul(numbers) if gate.is_gated else numbers.relu().square()
    mlp = PackedMlp(team, first, gate, last, buffer)
    for _ in range(2):
        torch.testing.assert_close(mlp(x), last(between).view(x.shape), rtol=1e-5, atol=1e-5)
    assert mlp(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("width", [1, 15, 64, 100])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_a_norm(team_of: Callable[[int], Team], width: int, centered: bool, add: bool) -> None:
    """In other rows' strides, and in place."""
    team, rows = team_of(3), ctypes.c_int64(7)
    x, weight = 5 + normal(7, width), normal(width)
    bias = normal(width, seed=1) if centered else None
    source = torch.full((7, width + 5), torch.nan)
    source[:, :width] = x
    expected = reference.layer_norm(x, weight, bias, 1e-5) if centered else reference.rms_norm(x, weight, 1e-5)
    for out, before in ((torch.ones(7, width + 3), 1.0), (source, x)):
        args = NormArgs(
            rows=ctypes.addressof(rows),
            input=source.data_ptr(),
            input_stride=source.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            width=width,
            whole_width=width,
            eps=1e-5,
            centered=centered,
            add=add,
        )
        team.run(Program(team.library, (NORM, args)))
        wanted = expected + before if add else expected
        torch.testing.assert_close(out[:, :width], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 15), (2, 5, 100)], ids=str)
def test_a_norm_of_tensors(team_of: Callable[[int], Team], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows that don't lie one behind the other too; results are rounded once."""
    norm = PackedNorm(team_of(2), weight := normal(shape[-1], seed=1), 1e-5)
    wide = 3 * normal(*shape[:-1], shape[-1] + 3, dtype=dtype)
    for x in (wide[..., 2:-1], wide[..., 2:-1].contiguous()):
        expected = reference.rms_norm(x.float(), weight, 1e-5)
        bound = 1e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(norm(x).float(), expected, atol=1e-5, rtol=bound)
        assert norm(x).dtype == dtype
    with pytest.raises(TypeError, match=r"dtype is torch\.float16; allowed: float32, bfloat16"):
        norm(wide[..., 2:-1].half())


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
        product.input.copy_(x)
        found = product.run(product.linear.args(Epilogue.SILU_MUL))[0, place]
        if gate.isfinite():
            torch.testing.assert_close(found, torch.nn.functional.silu(gate), atol=1e-30, rtol=1e-5)
        else:
            assert not found.isfinite() or gate == -torch.inf


@settings(max_examples=80, deadline=None)
@given(
    case=any_case,
    kind=st.sampled_from(CodeType),
    group=st.one_of(groups, st.just(SMALLEST_GROUP)),
    shift=st.sampled_from(["", "zeros", "minima"]),
)
def test_a_product_with_codes(
    team_of: Callable[[int], Team], case: Case, kind: CodeType, group: int, shift: str
) -> None:
    group = group if kind is CodeType.INT8 else max(group, GROUP_MULTIPLE)
    weight = case.codes(kind, group, zeros=shift == "zeros" and kind is CodeType.INT4, minima=shift == "minima")
    bias = normal(case.outputs)
    found = PackedLinear.pack(team_of(case.threads), Arena(), weight, bias)(case.x)
    expected = reference.linear(weight.dequantize(), bias)(case.x)
    # With weights of 4 bits, inputs are rounded to 8 bits; `test_a_product_of_4_bits_rounds_spans_of_inputs` is exact.
    rounded = 2 * ROUNDED if kind.bits == 4 else ROUNDED
    torch.testing.assert_close(found, expected, atol=rounded * math.sqrt(case.inputs), rtol=rounded)


@settings(max_examples=60, deadline=None)
@given(case=any_case)
def test_a_product_with_rounded_inputs(team_of: Callable[[int], Team], case: Case) -> None:
    """The sums are exact: the only error is an input near the middle of two integers that is rounded to the other
    one."""
    weight = replace(case.codes(CodeType.INT8, case.inputs, zeros=False), round_inputs=True)
    bias = normal(case.outputs)
    found = PackedLinear.pack(team_of(case.threads), Arena(), weight, bias)(case.x)
    integers, scales = round_rows(case.x)
    expected = reference.linear(weight.dequantize(), bias)(integers.float() * scales)
    assert (found - expected).norm() <= 3e-3 * expected.norm() + 2 * scales.max()


@pytest.mark.parametrize("inputs", [512, 2048, 11008, 28672])
def test_inputs_of_long_rows_keep_16_bits(team_of: Callable[[int], Team], inputs: int) -> None:
    """Each bit counts beside an outlier; a result has the same bits whatever the number of rows."""
    weight = random_codes(CodeType.INT8, 48, inputs, inputs, zeros=False)
    x = normal(33, inputs)
    x[:, 5] = 1000.0
    weight.codes[0], weight.codes[1] = 127, 128  # the largest sums that there can be
    x[1] = 1000.0
    product = PackedLinear.pack(team_of(2), Arena(), weight, None)
    found = product(x)
    scale = x.abs().amax(1, keepdim=True).double() / 32767
    expected = (x.double() / scale).round() * scale @ weight.dequantize().double().T
    # One or two inputs of a row may be so near the middle of two integers that they are rounded to the other one.
    bound = 2 * scale * weight.dequantize().abs().max() + 1e-6 * expected.abs()
    assert ((found.double() - expected).abs() <= bound).all()
    for rows in (1, 4, 5, 16, 17):
        assert torch.equal(product(x[:rows]), found[:rows])


def rounded_spans(x: Tensor, span: int) -> tuple[Tensor, float]:
    """`x` [T, in] with each `span` inputs rounded to int8 by their own largest, and the largest scale."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % span))
    integers, scales = round_rows(padded.view(-1, span))
    return (integers.float() * scales).view(padded.shape)[:, : x.shape[1]], scales.max().item()


@settings(max_examples=60, deadline=None)
@given(
    case=cases(st.integers(1, 6)),
    kind=st.sampled_from([CodeType.INT4, CodeType.FP4]),
    group=groups,
    exponent=st.integers(-40, 30),
    minima=st.booleans(),
)
def test_a_product_of_4_bits_rounds_spans_of_inputs(
    team_of: Callable[[int], Team], case: Case, kind: CodeType, group: int, exponent: int, minima: bool
) -> None:
    """The rounding loses nothing else, whatever the magnitudes of a span. (With AMX, more rows are multiplied as
    bfloat16.)"""
    weight, x = case.codes(kind, group, zeros=kind is CodeType.INT4 and not minima, minima=minima), case.x
    x[:, : case.inputs // 2] *= 10.0**exponent
    found = PackedLinear.pack(team_of(case.threads), Arena(), weight, None)(x)
    rounded, scale = rounded_spans(x, 64 if group >= case.inputs or group % 64 == 0 else 32)
    expected = reference.linear(weight.dequantize(), None)(rounded)
    assert (found - expected).norm() <= 3e-3 * expected.norm() + 2 * scale


@pytest.mark.parametrize("kind", [CodeType.INT8, CodeType.INT4])
@pytest.mark.parametrize("rows", [1, 40])
def test_inputs_that_are_not_finite_show(team_of: Callable[[int], Team], kind: CodeType, rows: int) -> None:
    x = normal(rows, 200)
    x[0, 3], x[-1, 199] = torch.inf, torch.nan
    linear = PackedLinear.pack(team_of(1), Arena(), random_codes(kind, 40, 200, 64, zeros=False), None)
    found = linear(x)
    assert not found[[0, -1]].isfinite().any()
    assert found[1:-1].isfinite().all()


@pytest.mark.parametrize(
    "weight",
    [
        (normal(100, 200) / 14).to(torch.bfloat16),
        random_codes(CodeType.INT8, 100, 200, 200, zeros=False),
        replace(random_codes(CodeType.INT8, 100, 200, 200, zeros=False), round_inputs=True),
        random_codes(CodeType.FP8, 100, 200, 200, zeros=False),
        random_codes(CodeType.INT4, 100, 200, 64, zeros=True),
        random_codes(CodeType.INT4, 100, 200, 32, zeros=False, minima=True),
        random_codes(CodeType.FP4, 100, 200, 32, zeros=False),
    ],
    ids=["bfloat16", "int8", "w8a8", "fp8", "int4", "int4 with minima", "fp4"],
)
def test_a_row_does_not_depend_on_its_company(team_of: Callable[[int], Team], weight: Tensor | CodedWeight) -> None:
    """Results are equal to the last bit for every batch and number of threads. (Not with 8 bits in groups.)"""
    few_bits = isinstance(weight, CodedWeight) and weight.type.bits == 4
    if few_bits and team_of(1).library.kvrelay_tiles_used():
        pytest.skip("AMX multiplies many rows with weights of 4 bits as bfloat16")
    x = normal(300, 200)
    single = PackedLinear.pack(team_of(1), Arena(), weight, None)
    alone = torch.cat([single(row[None]) for row in x])
    for threads in (1, 2, 3):
        linear = PackedLinear.pack(team_of(threads), Arena(), weight, None)
        for rows in (2, 7, 12, 13, 40, 300):
            assert torch.equal(linear(x[:rows]), alone[:rows])


def table_of(kind: torch.dtype | CodeType, width: int) -> Tensor | CodedWeight:
    if isinstance(kind, torch.dtype):
        return normal(50, width).to(kind)
    return random_codes(kind, 50, width, min(32, width), zeros=kind is CodeType.INT4, minima=kind is CodeType.INT8)


@pytest.mark.parametrize(
    ("kind", "packed"),
    [*((dtype, packed) for dtype in DTYPES for packed in (False, True)), *((kind, True) for kind in CodeType)],
    ids=str,
)
@pytest.mark.parametrize("width", [1, 16, 33, 70])
def test_looking_up_is_exact(
    team_of: Callable[[int], Team], kind: torch.dtype | CodeType, width: int, packed: bool
) -> None:
    team, table = team_of(2), table_of(kind, width)
    dense = isinstance(table, Tensor)
    linear = PackedLinear.pack(team, Arena(), table, None)
    parts = linear.args(Epilogue.STORE)
    tokens = torch.tensor([0, 49, 7, 7, 31, 16, 15])
    rows, pointer = ctypes.c_int64(len(tokens)), ctypes.c_void_p(tokens.data_ptr())
    out = torch.full((len(tokens), width + 2), torch.nan)
    embed = EmbedArgs(
        rows=ctypes.addressof(rows),
        tokens=ctypes.addressof(pointer),
        weight=table.data_ptr() if dense and not packed else parts.weight,
        scales=parts.scales,
        zeros=parts.zeros,
        minima=parts.minima,
        group=parts.group,
        out=out.data_ptr(),
        out_stride=out.stride(0),
        width=width,
        count=len(table) if dense else len(table.codes),
        type=parts.type,
        packed=packed,
    )
    for scale in (1.0, 3.0):
        embed.scale = scale
        team.run(Program(team.library, (EMBED, embed)))
        assert torch.equal(out[:, :width], (table.float() if dense else table.dequantize())[tokens] * scale)
    assert out[:, width:].isnan().all()
