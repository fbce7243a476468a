"""Weights that are quantized in parts are those that are quantized at once."""

import pytest
import torch

from kvrelay.engine.config import Quantization
from kvrelay.engine.quant.schemes import LAYERS, PART, quantizing
from kvrelay.kernels.codes import CodedWeight


@pytest.mark.parametrize("quantization", LAYERS)
@pytest.mark.parametrize("shape", [(3, 96), (PART // 64 + 5, 64), (2, PART + 32)])
def test_parts_make_the_whole(quantization: Quantization, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found: list[torch.Tensor | CodedWeight] = []
    quantizing(LAYERS[quantization], lambda each, _: found.append(each))(weight, None)
    assert isinstance(found[0], CodedWeight)
    whole = LAYERS[quantization](weight)
    assert torch.equal(found[0].dequantize(), whole.dequantize())
    assert found[0].round_inputs == whole.round_inputs


def test_codes_stay_as_they_are() -> None:
    weight = LAYERS["int8"](torch.ones(2, 32))
    assert quantizing(LAYERS["int4"], lambda each, _: each)(weight, None) is weight
