"""Quantization of weights while they are loaded, one tensor at a time: only the codes of all of them are in memory."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from kvrelay.engine.config import Quantization
from kvrelay.kernels import codes
from kvrelay.kernels.codes import CodedWeight

LinearT = TypeVar("LinearT")
Quantize = Callable[[Tensor], CodedWeight]

LAYERS: Mapping[Quantization, Quantize] = {"int8": codes.int8, "int4": codes.int4, "fp8": codes.fp8}
HEAD: Mapping[Quantization, Quantize] = {**LAYERS, "int4": codes.int8}
"""For the head, and with it a tied embedding: with 4 bits it would lose more than all layers together."""


def quantizing(
    quantize: Quantize | None, linear: Callable[[Tensor | CodedWeight, Tensor | None], LinearT]
) -> Callable[[Tensor, Tensor | None], LinearT]:
    """`linear` for weights that are quantized first; as it is without `quantize`."""
    if quantize is None:
        return linear
    return lambda weight, bias: linear(quantize(weight), bias)
