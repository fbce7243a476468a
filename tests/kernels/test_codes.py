"""Weights of 4 and 8 bits: what quantization loses, and that native products multiply with exactly what is left."""

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrelay.kernels import codes, reference
from kvrelay.kernels.codes import NUMBERS, CodedWeight, CodeType
from kvrelay.kernels.cpu.packed import EMBED, Arena, EmbedArgs, Epilogue, PackedLinear
from kvrelay.kernels.cpu.program import Program, Team

ROUNDED = 2e-2
"""Tolerance where weights and, on some CPUs, inputs are rounded to bfloat16."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def random_codes(kind: CodeType, outputs: int, inputs: int, group: int, *, zeros: bool, seed: int = 0) -> CodedWeight:
    """Random codes: any but NaN, which only fp8 has here."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 2**kind.bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    if kind is CodeType.FP8:
        found[(found & 0x7F) == 0x7F] = 0
    shape = (outputs, -(-inputs // group))
    largest = NUMBERS[kind]().nan_to_num(0).abs().max()
    scales = (0.5 + torch.rand(shape, generator=generator)) / largest
    points = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8) if zeros else None
    return CodedWeight(kind, found, scales, points, group)


@pytest.mark.parametrize(
    ("quantize", "lost"),
    [(codes.int8, 0.01), (codes.fp8, 0.03), (codes.int4, 0.11), (lambda w: codes.int4(w, 32), 0.1)],
)
@pytest.mark.parametrize("inputs", [1, 40, 576])
def test_what_quantization_loses_of_normal_weights(
    quantize: Callable[[Tensor], CodedWeight], lost: float, inputs: int
) -> None:
    weight = normal(200, inputs)
    left = quantize(weight).dequantize()
    assert left.shape == weight.shape
    assert (left - weight).norm() <= lost * weight.norm()
    assert torch.equal(quantize(torch.zeros(3, inputs)).dequantize(), torch.zeros(3, inputs))


def test_the_numbers_of_the_formats() -> None:
    assert NUMBERS[CodeType.INT8]()[[0, 127, 128, 255]].tolist() == [0, 127, -128, -1]
    assert NUMBERS[CodeType.FP8]()[[0x38, 0x7E, 0x01, 0xB8]].tolist() == [1.0, 448.0, 2.0**-9, -1.0]
    assert NUMBERS[CodeType.FP4]()[[1, 7, 15]].tolist() == [0.5, 6.0, -6.0]


@pytest.mark.parametrize(("group", "shape"), [(48, (4, 2)), (32, (4, 2))])
def test_groups_that_cannot_be_are_refused(group: int, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"allowed: (a multiple of 32|\[4, 3\])"):
        CodedWeight(CodeType.INT8, torch.zeros(4, 96, dtype=torch.uint8), torch.ones(shape), None, group)


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(CodeType),
    rows=st.one_of(st.integers(1, 30), st.sampled_from([64, 200, 500])),
    inputs=st.sampled_from([1, 7, 32, 33, 64, 576, 1100]),
    outputs=st.sampled_from([1, 16, 17, 48, 100]),
    group=st.sampled_from([32, 64, 128, 4096]),
    zeros=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_a_product_with_codes(
    team_of: Callable[[int], Team],
    kind: CodeType,
    rows: int,
    inputs: int,
    outputs: int,
    group: int,
    zeros: bool,
    threads: int,
    seed: int,
) -> None:
    weight = random_codes(kind, outputs, inputs, min(group, inputs), zeros=zeros and kind is CodeType.INT4, seed=seed)
    x, bias = normal(rows, inputs, seed=seed), normal(outputs)
    found = PackedLinear.pack(team_of(threads), Arena(), weight, bias)(x)
    expected = reference.linear(weight.dequantize(), bias)(x)
    # With weights of 4 bits, inputs are rounded to 8 bits; `test_a_product_of_4_bits_rounds_spans_of_inputs` is exact.
    rounded = 2 * ROUNDED if kind.bits == 4 else ROUNDED
    torch.testing.assert_close(found, expected, atol=rounded * math.sqrt(inputs), rtol=rounded)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([64, 200, 500])),
    inputs=st.sampled_from([1, 7, 32, 33, 64, 576, 1100]),
    outputs=st.sampled_from([1, 16, 17, 48, 100]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_a_product_with_rounded_inputs(
    team_of: Callable[[int], Team], rows: int, inputs: int, outputs: int, threads: int, seed: int
) -> None:
    """The sums are exact: the only error is an input near the middle of two integers that is rounded to the other
    one."""
    weight = replace(random_codes(CodeType.INT8, outputs, inputs, inputs, zeros=False, seed=seed), round_inputs=True)
    x, bias = normal(rows, inputs, seed=seed), normal(outputs)
    found = PackedLinear.pack(team_of(threads), Arena(), weight, bias)(x)
    integers, scales = codes.round_rows(x)
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
    integers, scales = codes.round_rows(padded.view(-1, span))
    return (integers.float() * scales).view(padded.shape)[:, : x.shape[1]], scales.max().item()


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([CodeType.INT4, CodeType.FP4]),
    rows=st.integers(1, 6),
    inputs=st.sampled_from([1, 7, 32, 33, 64, 576, 1100]),
    outputs=st.sampled_from([1, 16, 17, 48, 100]),
    group=st.sampled_from([32, 64, 96, 128, 4096]),
    exponent=st.integers(-40, 30),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_a_product_of_4_bits_rounds_spans_of_inputs(
    team_of: Callable[[int], Team],
    kind: CodeType,
    rows: int,
    inputs: int,
    outputs: int,
    group: int,
    exponent: int,
    threads: int,
    seed: int,
) -> None:
    """The rounding loses nothing else, whatever the magnitudes of a span. (With AMX, more rows are multiplied as
    bfloat16.)"""
    group = min(group, inputs)
    weight = random_codes(kind, outputs, inputs, group, zeros=kind is CodeType.INT4, seed=seed)
    x = normal(rows, inputs, seed=seed)
    x[:, : inputs // 2] *= 10.0**exponent
    found = PackedLinear.pack(team_of(threads), Arena(), weight, None)(x)
    rounded, scale = rounded_spans(x, 64 if group == inputs or group % 64 == 0 else 32)
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


def whole(kind: CodeType, *, round_inputs: bool = False) -> CodedWeight:
    return replace(random_codes(kind, 100, 200, 200, zeros=False), round_inputs=round_inputs)


@pytest.mark.parametrize(
    "weight",
    [
        whole(CodeType.INT8),
        whole(CodeType.INT8, round_inputs=True),
        whole(CodeType.FP8),
        random_codes(CodeType.INT4, 100, 200, 64, zeros=True),
        random_codes(CodeType.FP4, 100, 200, 32, zeros=False),
    ],
    ids=["int8", "w8a8", "fp8", "int4", "fp4"],
)
def test_a_row_does_not_depend_on_its_company(team_of: Callable[[int], Team], weight: CodedWeight) -> None:
    """Results are equal to the last bit for every batch and number of threads. (Not with 8 bits in groups.)"""
    if weight.type in (CodeType.INT4, CodeType.FP4) and team_of(1).library.kvrelay_tiles_used():
        pytest.skip("AMX multiplies many rows with weights of 4 bits as bfloat16")
    x = normal(300, 200)
    alone = torch.cat([PackedLinear.pack(team_of(1), Arena(), weight, None)(row[None]) for row in x])
    for threads in (1, 2, 3):
        linear = PackedLinear.pack(team_of(threads), Arena(), weight, None)
        for rows in (2, 13, 40, 300):
            assert torch.equal(linear(x[:rows]), alone[:rows])


@pytest.mark.parametrize("kind", CodeType)
@pytest.mark.parametrize("width", [1, 33, 70])
def test_looking_up_is_exact(team_of: Callable[[int], Team], kind: CodeType, width: int) -> None:
    table = random_codes(kind, 50, width, min(32, width), zeros=kind is CodeType.INT4)
    args = PackedLinear.pack(team_of(2), Arena(), table, None)
    parts = args.args(Epilogue.STORE)
    tokens = torch.tensor([0, 49, 7, 7, 31, 16, 15])
    rows, pointer = ctypes.c_int64(len(tokens)), ctypes.c_void_p(tokens.data_ptr())
    out = torch.full((len(tokens), width + 2), torch.nan)
    embed = EmbedArgs(
        rows=ctypes.addressof(rows),
        tokens=ctypes.addressof(pointer),
        weight=parts.weight,
        scales=parts.scales,
        zeros=parts.zeros,
        group=parts.group,
        out=out.data_ptr(),
        out_stride=out.stride(0),
        width=width,
        type=parts.type,
        packed=True,
    )
    team = team_of(2)
    team.run(Program(team.library, (EMBED, embed)))
    assert torch.equal(out[:, :width], table.dequantize()[tokens])
    assert out[:, width:].isnan().all()
