"""Weights of 4 and 8 bits: what quantization loses, and the numbers that codes stand for."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvrelay.kernels import codes
from kvrelay.kernels.codes import NUMBERS, CodedWeight, CodeType


@pytest.mark.parametrize(
    ("quantize", "lost"),
    [(codes.int8, 0.01), (codes.fp8, 0.03), (codes.int4, 0.11), (lambda w: codes.int4(w, 32), 0.1)],
)
@pytest.mark.parametrize("inputs", [1, 40, 576])
def test_what_quantization_loses_of_normal_weights(
    quantize: Callable[[Tensor], CodedWeight], lost: float, inputs: int
) -> None:
    weight = torch.randn(200, inputs, generator=torch.Generator().manual_seed(inputs))
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
