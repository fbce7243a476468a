"""Products of many rows with quantized weights on GPU, and weights decoded at once: exact up to rounding, within the
limits of GPUs.
"""

import re
from dataclasses import replace

import pytest
import torch
from test_quant_gemv import DEVICE, OTHER, blank, normal, with_minima
from torch import Tensor
from triton_compile import Compiler, each_architecture

from kvrelay.kernels import codes
from kvrelay.kernels.codes import CodedWeight, CodeType
from kvrelay.kernels.triton.quant_decode import QuantDecode
from kvrelay.kernels.triton.quant_gemv import QuantGemv, QuantizedWeight
from kvrelay.kernels.triton.quant_linear import DECODED_ROWS, quant_linear, quantized
from kvrelay.kernels.triton.quant_matmul import QuantMatmul

FORMATS = {
    "int8": codes.int8,
    "w8a8": codes.w8a8,
    "int4": lambda weight: codes.int4(weight, 64),
    "int4 with minima": lambda weight: with_minima(weight, 32),
    "int4 in odd groups": lambda weight: codes.int4(weight, 96),
    "fp8": codes.fp8,
    "fp8 in blocks": lambda weight: in_groups(weight, 128),
}


def in_groups(weight: Tensor, group: int) -> CodedWeight:
    """fp8: so many inputs of each output share a scale."""
    groups = -(-weight.shape[1] // group)
    scales = 0.001 + 0.002 * torch.rand(len(weight), groups, device=weight.device)
    found = (weight * 50).to(torch.float8_e4m3fn).view(torch.uint8)
    return CodedWeight(CodeType.FP8, found, scales, None, group)


def check(found: Tensor, x: Tensor, dense: Tensor, bias: Tensor) -> None:
    expected = x.float() @ dense.T + bias.float()
    torch.testing.assert_close(found.float(), expected, atol=4e-3 * float(expected.abs().max()), rtol=4e-3)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.some(3)
def test_a_layer(name: str) -> None:
    """Few rows, many, and so many that the weight is decoded at once; some launches repeat one before."""
    weight, bias = FORMATS[name](normal(70, 320).cpu()), normal(70, dtype=torch.float16)
    product = quant_linear(weight, bias, torch.float16, torch.device(DEVICE))
    dense = weight.dequantize().to(DEVICE)
    decoded = DECODED_ROWS[weight.type]
    for rows in (1, 20, decoded - 1, decoded, 200, 20, 1):
        x = normal(rows, 320, dtype=torch.float16, seed=rows)
        check(product(x), x, dense, bias)
    if name != "int4 in odd groups":  # which are left to dense weights
        with pytest.raises(ValueError, match=r"x is \[2, 319\]; allowed: \[2, 320\]"):
            product(normal(2, 319, dtype=torch.float16))


@pytest.mark.parametrize("name", ["int8", "int4", "int4 with minima", "fp8", "fp8 in blocks"])
def test_products_of_several_tiles_of_rows(name: str) -> None:
    weight, bias = FORMATS[name](normal(70, 320)), normal(70, dtype=torch.float16)
    x = normal(130, 320, dtype=torch.float16)
    check(QuantMatmul(quantized(weight, torch.float16), bias)(x), x, weight.dequantize(), bias)


@pytest.mark.parametrize("dtype", [torch.float16, OTHER], ids=str)
@pytest.mark.parametrize(
    ("name", "outputs", "inputs", "group"),
    [
        ("int8", 70, 320, 320),
        ("int8 of more than a run", 5, 1500, 1500),
        ("int4", 70, 320, 64),
        ("int4", 33, 256, 128),
        ("int4 of one group", 3, 256, 256),
        ("int4 of one group", 1, 32, 32),
        ("int4 with minima", 33, 256, 32),
        ("fp8", 70, 320, 320),
        ("fp8 in blocks", 70, 320, 128),
        ("fp8 in odd groups", 9, 300, 96),
    ],
)
@pytest.mark.some(6)
def test_decoded_at_once(name: str, outputs: int, inputs: int, group: int, dtype: torch.dtype) -> None:
    """Numbers are the exact ones, rounded once; the second launch repeats the first."""
    plain = normal(outputs, inputs)
    if name == "int4 with minima":
        weight = with_minima(plain, group)
    elif name.startswith("int4"):
        weight = codes.int4(plain, group)
    else:
        weight = codes.int8(plain) if name.startswith("int8") else in_groups(plain, group)
    weight = replace(weight, scales=weight.scales.to(dtype).float())
    decode, expected = QuantDecode(quantized(weight, dtype)), weight.dequantize().to(dtype)
    for _ in range(2):
        assert torch.equal(decode(dtype), expected)


def test_every_number_of_fp8() -> None:
    numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8, device=DEVICE)
    weight = QuantizedWeight(numbers[None], torch.ones(1, 1, device=DEVICE), fp8_group=len(numbers))
    assert torch.equal(QuantDecode(weight)(torch.float32)[0], numbers.view(torch.float8_e4m3fn).float())


def test_what_does_not_fit_is_refused() -> None:
    int4, fp8 = (
        quantized(codes.int4(normal(4, 64), 32), torch.float16),
        quantized(codes.fp8(normal(4, 64)), torch.float16),
    )
    for kernel in (QuantDecode, lambda weight: QuantMatmul(weight, None)):
        with pytest.raises(ValueError, match=r"scale is \[3, 2\]; allowed: \[4, 2\]"):
            kernel(replace(int4, scale=int4.scale[:3]))
        with pytest.raises(ValueError, match=r"group of FP8 is 48; allowed: a multiple of 32, or 64"):
            kernel(replace(fp8, fp8_group=48))
        with pytest.raises(ValueError, match=r"q of INT8 is torch\.uint8"):
            kernel(replace(fp8, fp8_group=None))
    with pytest.raises(ValueError, match="weight is FP8; allowed: INT8, INT4"):
        QuantGemv(fp8, None, processors=8)
    with pytest.raises(ValueError, match=r"dtype is torch\.int8; allowed: torch\.float16"):
        QuantDecode(fp8)(torch.int8)


def multiply(name: str, rows: int) -> None:
    QuantMatmul(blank(name, 4096, 4096), None)(torch.zeros(rows, 4096, dtype=torch.bfloat16))


def decode(name: str) -> None:
    QuantDecode(blank(name, 4096, 4096))(torch.bfloat16)


@pytest.mark.parametrize("rows", [16, pytest.param(2048, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["int4", "minima", "int8", "fp8", "blocks"])
@each_architecture
def test_compiled(compiler: Compiler, architecture: int, name: str, rows: int) -> None:
    (kernel,) = compiler.compile(architecture, multiply, name, rows)
    kernel.check_fits()
    assert kernel.tensor_cores


@pytest.mark.parametrize("name", ["int4", "minima", "int8", "fp8", "blocks"])
@each_architecture
def test_decoding_compiled(compiler: Compiler, architecture: int, name: str) -> None:
    """Codes are read, and numbers written, in vectors of 16 bytes."""
    (kernel,) = compiler.compile(architecture, decode, name)
    kernel.check_fits()
    kernel.check_overlaps()
    stores = set(re.findall(r"st\.global\S*", kernel.ptx))
    assert stores == {"st.global.v4.b32"}
    assert "ld.global.v4.b32" in kernel.ptx
    # Enough programs fit on a multiprocessor to use its share of the memory bandwidth.
    assert kernel.registers <= 96
