"""Products with weights of 8 and 4 bits: exact up to rounding, the same bits every time, within the limits of GPUs."""

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton_compile import SECONDS, Compiler, each_architecture

from kvrelay.kernels import codes
from kvrelay.kernels.codes import CodedWeight, CodeType
from kvrelay.kernels.triton.quant_gemv import MAX_ROWS, QuantGemv, QuantizedWeight
from kvrelay.kernels.triton.quant_linear import quantized

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
OTHER = torch.float32 if DEVICE == "cpu" else torch.bfloat16
"""A type beside float16: products of float32 are rounded on a GPU, and the interpreter's bfloat16 isn't reliable."""
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def coded(bits: int, group: int, outputs: int, inputs: int, dtype: torch.dtype) -> CodedWeight:
    """Random weights, with scales that are numbers of `dtype`; those of a negative group have minima."""
    weight = normal(outputs, inputs, dtype=dtype) / inputs**0.5
    if group < 0:
        return with_minima(weight.float(), -group)
    found = codes.int8(weight) if bits == 8 else codes.int4(weight, group)
    return replace(found, scales=found.scales.to(dtype).float())


def with_minima(weight: Tensor, group: int) -> CodedWeight:
    """int4 with minima, such as Q4_1 of GGUF files has: scales and minima are numbers of float16."""
    grouped = weight.unflatten(1, (-1, group))
    minima = grouped.amin(-1).half().float()
    scales = ((grouped.amax(-1) - minima) / 15).half().float()
    found = ((grouped - minima[..., None]) / scales[..., None]).round().clamp(0, 15).to(torch.uint8).flatten(1)
    return CodedWeight(CodeType.INT4, found, scales, None, group, minima=minima)


def test_groups_that_no_kernel_reads_are_left_to_dense_weights() -> None:
    assert quantized(codes.int4(normal(4, 192), 96), torch.float16) is None


SHAPES = [
    (1, 256, False, torch.float16),
    (1, 256, False, OTHER),
    (40, 1024, True, torch.float16),
    pytest.param(130, 1280, True, torch.float16, marks=pytest.mark.more),
    pytest.param(130, 1280, True, OTHER, marks=pytest.mark.more),
]


@pytest.mark.parametrize(
    ("bits", "group"),
    [(8, 0), (4, 64), (4, -32), *(pytest.param(4, group, marks=pytest.mark.slow) for group in (32, 128, 256, -64))],
)
@pytest.mark.parametrize(("outputs", "inputs", "bias", "dtype"), SHAPES, ids=str)
@pytest.mark.some(2)
def test_product(bits: int, group: int, outputs: int, inputs: int, dtype: torch.dtype, bias: bool) -> None:
    weight = coded(bits, group, outputs, inputs, dtype)
    offset = normal(outputs, dtype=dtype) if bias else None
    product = QuantGemv(quantized(weight, dtype), offset, processors=132)
    dense = weight.dequantize().double()
    for rows in (1, MAX_ROWS):
        x = normal(rows, inputs, dtype=dtype)
        found = product(x)
        expected = x.double() @ dense.T + (0 if offset is None else offset.double())
        bound = BOUNDS[dtype]
        torch.testing.assert_close(found.double(), expected, atol=bound * float(expected.abs().max()), rtol=bound)
        # The splits' counters are reset after a launch, and parts are added in a fixed order.
        assert torch.equal(product(x), found)


def test_int8_takes_a_depth_that_is_no_multiple_of_its_step() -> None:
    weight = coded(8, 0, 33, 700, OTHER)
    x = normal(3, 700, dtype=OTHER)
    found = QuantGemv(quantized(weight, OTHER), None, processors=8)(x)
    expected = x.double() @ weight.dequantize().double().T
    torch.testing.assert_close(found.double(), expected, atol=BOUNDS[OTHER], rtol=BOUNDS[OTHER])


@pytest.mark.parametrize(
    ("outputs", "inputs", "splits"), [(4096, 4096, 4), (28672, 4096, 1), (4096, 14336, 4), (64, 256, 1)]
)
def test_small_products_are_split_until_the_device_is_full(outputs: int, inputs: int, splits: int) -> None:
    weight = QuantizedWeight(
        torch.empty(outputs, inputs, dtype=torch.int8, device=DEVICE), torch.empty(outputs, device=DEVICE)
    )
    assert QuantGemv(weight, None, processors=132).splits == splits


def test_what_does_not_fit_is_refused() -> None:
    weight = quantized(coded(8, 0, 8, 256, torch.float16), torch.float16)
    product = QuantGemv(weight, normal(8, dtype=torch.float16), processors=8)
    with pytest.raises(ValueError, match=r"x is \[17, 256\]; allowed: \[1 to 16, 256\]"):
        product(normal(17, 256, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"x is \[2, 128\]; allowed: \[2, 256\]"):
        product(normal(2, 128, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"x is torch\.float32; allowed: torch\.float16"):
        product(normal(2, 256))
    with pytest.raises(ValueError, match=r"scale is \[7\]; allowed: \[8\]"):
        QuantGemv(QuantizedWeight(weight.q, weight.scale[:7]), None, processors=8)
    with pytest.raises(ValueError, match=r"q of INT8 is torch\.float16"):
        QuantGemv(QuantizedWeight(weight.q.half(), weight.scale), None, processors=8)


def blank(name: str, outputs: int, inputs: int) -> QuantizedWeight:
    """A weight of zeros."""
    halves = name in ("int4", "minima")
    held = torch.zeros(outputs, inputs // (1 + halves), dtype=torch.int8 if name == "int8" else torch.uint8)
    scales = torch.zeros(outputs, inputs // 128, dtype=torch.bfloat16)
    of_groups = torch.zeros(outputs, inputs // 32, dtype=torch.float16)
    return {
        "int8": QuantizedWeight(held, torch.zeros(outputs)),
        "int4": QuantizedWeight(held, scales, scales),
        "minima": QuantizedWeight(held, of_groups, minimum=of_groups),
        "fp8": QuantizedWeight(held, torch.zeros(outputs, 1), fp8_group=inputs),
        "blocks": QuantizedWeight(held, torch.zeros(outputs, inputs // 128), fp8_group=128),
    }[name]


def launch(name: str, outputs: int, inputs: int) -> None:
    QuantGemv(blank(name, outputs, inputs), None, processors=132)(torch.zeros(4, inputs, dtype=torch.bfloat16))


@pytest.mark.parametrize("outputs", [4096, 28672])
@each_architecture
def test_compiled(compiler: Compiler, architecture: int, outputs: int) -> None:
    """Weights go through a pipeline of asynchronous copies to the tensor cores."""
    names = "int8", "int4", "minima"
    for name, started in [(name, compiler.start(architecture, launch, name, outputs, 4096)) for name in names]:
        (kernel,) = started.result(SECONDS)
        kernel.check_fits()
        kernel.check_overlaps()
        assert "cp.async" in kernel.ptx
        # Tiles of int8 have 32 rows; these instructions take 64.
        wide = {90: "wgmma", 100: "tcgen05"} if name != "int8" else {}
        assert kernel.tensor_cores == wide.get(architecture, "mma")
        # Enough programs fit on a multiprocessor to use its share of the memory bandwidth.
        assert kernel.registers <= 128
        assert kernel.shared <= 48 * 1024
