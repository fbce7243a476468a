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


def test_a_weight_has_zeros_or_minima() -> None:
    one, point = torch.ones(4, 1), torch.ones(4, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="zeros and minima"):
        CodedWeight(CodeType.INT4, torch.zeros(4, 32, dtype=torch.uint8), one, point, 32, minima=one)


def test_weights_in_several_formats_become_alike_without_loss() -> None:
    draw = torch.Generator().manual_seed(0)

    def weight(kind: CodeType, group: int, shift: str) -> CodedWeight:
        found = torch.randint(0, 2**kind.bits, (4, 64), generator=draw, dtype=torch.uint8)
        scales, numbers = torch.rand(2, 4, 64 // group, generator=draw).unbind()
        zeros = (16 * numbers).to(torch.uint8) if shift == "zeros" else None
        return CodedWeight(kind, found, scales, zeros, group, minima=numbers if shift == "minima" else None)

    weights = [
        weight(CodeType.INT4, 64, "zeros"),
        weight(CodeType.INT4, 32, "minima"),
        weight(CodeType.INT8, 16, ""),
        weight(CodeType.INT8, 32, "minima"),
    ]
    joined = codes.join(codes.alike(weights))
    assert (joined.type, joined.group) == (CodeType.INT8, 16)
    assert torch.equal(joined.dequantize(), torch.cat([each.dequantize() for each in weights]))
    assert codes.alike(weights[:1]) == weights[:1]
