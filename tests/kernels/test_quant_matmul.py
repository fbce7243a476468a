"""Products of many rows with quantized weights on GPU: exact up to rounding, within the limits of GPUs."""

import pytest
import torch
from test_quant_gemv import DEVICE, normal
from triton_compile import ARCHITECTURES, Compiler

from kvrelay.kernels import codes
from kvrelay.kernels.codes import CodedWeight, CodeType
from kvrelay.kernels.triton.quant_gemv import QuantizedWeight
from kvrelay.kernels.triton.quant_linear import quant_linear
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
@pytest.mark.parametrize("rows", [1, 20, 130])
def test_a_layer(name: str, rows: int) -> None:
    weight = FORMATS[name](normal(70, 320).cpu())
    bias, x = normal(70, dtype=torch.float16), normal(rows, 320, dtype=torch.float16)
    found = quant_linear(weight, bias, torch.float16, torch.device(DEVICE))(x)
    expected = x.float() @ weight.dequantize().to(DEVICE).T + bias.float()
    torch.testing.assert_close(found.float(), expected, atol=4e-3 * float(expected.abs().max()), rtol=4e-3)


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


@pytest.mark.parametrize("rows", [pytest.param(16, marks=pytest.mark.slow), 2048])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled(compiler: Compiler, architecture: int, rows: int) -> None:
    for launched in [compiler.start(architecture, launch, name, rows) for name in ("int8", "int4", "fp8", "blocks")]:
        (kernel,) = launched.result()
        kernel.check_fits()
        assert kernel.tensor_cores
