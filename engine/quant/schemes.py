"""Quantization of weights while they are loaded, one tensor at a time: only the codes of all of them are in memory."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from kvrelay.engine.config import Quantization
from kvrelay.kernels import codes
from kvrelay.kernels.codes import CodedWeight, QuantizeColumns, allocate

LinearT = TypeVar("LinearT")
Quantize = Callable[[Tensor], CodedWeight]
PART = 2**16
"""Number of weights that are quantized at once."""
LayOut = Callable[[Tensor | CodedWeight, Tensor | None], LinearT]

LAYERS: Mapping[Quantization, Quantize] = {"int8": codes.int8, "int4": codes.int4, "fp8": codes.fp8, "w8a8": codes.w8a8}
HEAD: Mapping[Quantization, Quantize] = {**LAYERS, "int4": codes.int8, "w8a8": codes.int8}
"""Ways to quantize the head, and with it a tied embedding: with 4 bits it would lose more than all layers together, and
as few rows pass it, rounding its inputs would gain nothing."""

_BY_ROW: Mapping[Quantization, Callable[[Tensor, Tensor], CodedWeight]] = {
    "int8": codes.int8,
    "fp8": codes.fp8,
    "w8a8": codes.w8a8,
}
"""Ways whose scales are those of whole rows, and with them how some of the columns are quantized."""


def quantizing_columns(quantization: Quantization) -> QuantizeColumns | None:
    """`Making.columns` for these layers."""
    quantize = _BY_ROW.get(quantization)
    return None if quantize is None else lambda weight, largest: _in_parts(quantize, weight, largest)


def quantizing(quantize: Quantize | None, linear: LayOut[LinearT]) -> LayOut[LinearT]:
    """`linear` for weights that are quantized first, unless they are codes already; as it is without `quantize`."""
    if quantize is None:
        return linear

    def quantized(weight: Tensor | CodedWeight, bias: Tensor | None) -> LinearT:
        return linear(weight if isinstance(weight, CodedWeight) else _in_parts(quantize, weight), bias)

    return quantized


def dequantizing(dtype: torch.dtype, linear: Callable[[Tensor, Tensor | None], LinearT]) -> LayOut[LinearT]:
    """`linear` for weights that are converted to `dtype` first if they are codes."""

    def dequantized(weight: Tensor | CodedWeight, bias: Tensor | None) -> LinearT:
        return linear(weight.dequantize().to(dtype) if isinstance(weight, CodedWeight) else weight, bias)

    return dequantized


def _in_parts(quantize: Callable[..., CodedWeight], weight: Tensor, *each: Tensor) -> CodedWeight:
    """`quantize(weight, *each)`, a few outputs at a time: its intermediate tensors are many times as large as its
    result. `each` are tensors by output."""
    rows = max(1, PART // weight.shape[1])
    first = quantize(*[part[:rows] for part in (weight, *each)])

    def pages(part: Tensor) -> Tensor:
        return allocate((len(weight), part.shape[1]), part.dtype).to(part.device)

    numbers, scales = pages(first.codes), pages(first.scales)
    zeros = None if first.zeros is None else pages(first.zeros)
    for begin in range(0, len(weight), rows):
        part = quantize(*[part[begin : begin + rows] for part in (weight, *each)])
        numbers[begin : begin + rows], scales[begin : begin + rows] = part.codes, part.scales
        if zeros is not None and part.zeros is not None:
            zeros[begin : begin + rows] = part.zeros
    return replace(first, codes=numbers, scales=scales, zeros=zeros)
