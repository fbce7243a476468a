"""Quantization of weights while they are loaded, one tensor at a time: only the codes of all of them are in memory."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from kvrelay.engine.config import Quantization
from kvrelay.kernels import codes
from kvrelay.kernels.codes import CodedWeight

LinearT = TypeVar("LinearT")
Quantize = Callable[[Tensor], CodedWeight]
LayOut = Callable[[Tensor | CodedWeight, Tensor | None], LinearT]

LAYERS: Mapping[Quantization, Quantize] = {"int8": codes.int8, "int4": codes.int4, "fp8": codes.fp8, "w8a8": codes.w8a8}
HEAD: Mapping[Quantization, Quantize] = {**LAYERS, "int4": codes.int8, "w8a8": codes.int8}
"""For the head, and with it a tied embedding: with 4 bits it would lose more than all layers together, and as few rows
pass it, rounding its inputs would gain nothing."""


def quantizing(quantize: Quantize | None, linear: LayOut[LinearT]) -> LayOut[LinearT]:
    """`linear` for weights that are quantized first, unless they are codes already; as it is without `quantize`."""
    if quantize is None:
        return linear
    return lambda weight, bias: linear(weight if isinstance(weight, CodedWeight) else quantize(weight), bias)
