"""Products of many rows with quantized weights on GPU: exact up to rounding, within the limits of GPUs."""

import pytest
import torch
from test_quant_gemv import DEVICE, normal
from triton_compile import Compiler, each_architecture

from kvrelay.kernels import codes
from kvrelay.kernels.codes import CodedWeight, CodeType
from kvrelay.kernels.triton.quant_gemv import QuantizedWeight
from kvrelay.kernels.triton.quant_linear import VERY_MANY_ROWS, quant_linear
from kvrelay.kernels.triton.quant_matmul import QuantMatmul

FORMATS = {
    "int8": codes.int8,
    "w8a8": codes.w8a8,
    "int4": lambda weight: codes.int4(weight, 64),
    "int4 in odd groups": lambda weight: codes.int4(weight, 96),
    "fp8": codes.fp8,
    "fp8 in blocks": lambda weight: in_blocks(weight),
}


def in_blocks(weight: torch.Tensor) -> CodedWeight:
    """128 inputs of each output share a scale."""
    groups = -(-weight.shape[1] // 128)
    scales = 0.001 + 0.002 * torch.rand(len(weight), groups)
    found = (weight * 50).to(torch.float8_e4m3fn).view(torch.uint8)
    return CodedWeight(CodeType.FP8, found, scales, None, 128)


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer(name: str) -> None:
    """Launches of one layer, of few rows and of many; some repeat one before, and with very many there are none."""
    weight, bias = FORMATS[name](normal(70, 320).cpu()), normal(70, dtype=torch.float16)
    product = quant_linear(weight, bias, torch.float16, torch.device(DEVICE))
    dense = weight.dequantize().to(DEVICE)
    for rows in (1, 20, 130, VERY_MANY_ROWS, 20, 1):
        x = normal(rows, 320, dtype=torch.float16, seed=rows)
        found, expected = product(x).float(), x.float() @ dense.T + bias.float()
        torch.testing.assert_close(found, expected, atol=4e-3 * float(expected.abs().max()), rtol=4e-3)
    if name != "int4 in odd groups":  # which are left to dense weights
        with pytest.raises(ValueError, match=r"x is \[2, 319\]; allowed: \[2, 320\]"):
            product(normal(2, 319, dtype=torch.float16))


def test_other_codes_are_refused() -> None:
    with pytest.raises(ValueError, match="codes of INT8; allowed: FP8"):
        QuantMatmul(codes.int8(normal(4, 64)), None)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def launch(name: str, rows: int) -> None:
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16)
    scale = torch.zeros(4096, 32, dtype=torch.bfloat16)
    weights = {
        "int8": QuantizedWeight(torch.zeros(4096, 4096, dtype=torch.int8), torch.zeros(4096)),
        "int4": QuantizedWeight(zeros(4096, 2048), scale, scale),
        "fp8": CodedWeight(CodeType.FP8, zeros(4096, 4096), torch.zeros(4096, 1), None, 4096),
        "blocks": CodedWeight(CodeType.FP8, zeros(4096, 4096), torch.zeros(4096, 32), None, 128),
    }
    QuantMatmul(weights[name], None)(x)


@pytest.mark.parametrize("rows", [16, 2048])
@pytest.mark.parametrize("name", ["int4", "int8", "fp8", "blocks"])
@each_architecture
def test_compiled(compiler: Compiler, architecture: int, name: str, rows: int) -> None:
    (kernel,) = compiler.compile(architecture, launch, name, rows)
    kernel.check_fits()
    assert kernel.tensor_cores
