"""Linear layers with quantized weights on GPU, by the number of rows: `quant_gemv` for the few of a decode step,
`quant_matmul` for more, which decodes a weight again for each 64 rows, and a dense product by PyTorch of a weight that
`quant_decode` has decoded once for many.
"""

import logging
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from kvrelay.kernels.codes import CodedWeight, CodeType
from kvrelay.kernels.ops import Linear
from kvrelay.kernels.triton.launch import processors_of
from kvrelay.kernels.triton.quant_decode import QuantDecode
from kvrelay.kernels.triton.quant_gemv import GROUPS, MAX_ROWS, QuantGemv, QuantizedWeight, pack_int4
from kvrelay.kernels.triton.quant_matmul import QuantMatmul

logger = logging.getLogger(__name__)
DECODED_ROWS = {CodeType.INT8: 96, CodeType.INT4: 17, CodeType.FP8: 17}
"""Smallest number of rows for which a weight is decoded at once, by its type; see benchmarks/NOTES.md."""


def quant_linear(weight: CodedWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Linear:
    """`x [T, in] -> x @ weight.T + bias [T, out]` for x of `dtype`. Weights without a kernel become dense
    ones of `dtype`, with a warning. Inputs aren't rounded, whatever `weight.round_inputs` says.
    """
    found = quantized(weight, dtype)
    if found is None:
        logger.warning("%s in groups of %d has no kernel on GPUs: held as %s", weight.type.name, weight.group, dtype)
        dense = weight.dequantize().to(device, dtype)
        return lambda x: functional.linear(x, dense, bias)
    zero, minimum = (None if part is None else part.to(device) for part in (found.zero, found.minimum))
    placed = replace(found, q=found.q.to(device), scale=found.scale.to(device), zero=zero, minimum=minimum)
    decode, many = QuantDecode(placed), QuantMatmul(placed, bias)
    few: Linear = many
    if placed.type is not CodeType.FP8:
        few = QuantGemv(placed, bias, processors_of(device))
    decoded_rows = DECODED_ROWS[placed.type]

    def product(x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows < decoded_rows:
            return few(x) if rows <= MAX_ROWS else many(x)
        return functional.linear(x, decode(x.dtype), bias)

    return product


def quantized(weight: CodedWeight, dtype: torch.dtype) -> QuantizedWeight | None:
    """The weight as the kernels read it; None if they can't."""
    inputs, minima = weight.codes.shape[1], weight.minima
    fits_int4 = weight.type is CodeType.INT4 and weight.group in GROUPS and not inputs % weight.group
    if fits_int4 and minima is not None:
        # Scales and minima of Q4_1 are numbers of float16, those of Q4_K are not.
        exact = all(torch.equal(part.half().float(), part) for part in (weight.scales, minima))
        held = torch.float16 if exact else torch.float32
        packed = pack_int4(weight.codes, weight.group)
        return QuantizedWeight(packed, weight.scales.to(held), minimum=minima.to(held))
    if minima is not None:
        return None
    if weight.type is CodeType.FP8 and weight.zeros is None:
        return QuantizedWeight(
            weight.codes.contiguous(), weight.scales.contiguous(), fp8_group=min(weight.group, inputs)
        )
    if weight.type is CodeType.INT8 and weight.group >= inputs and weight.zeros is None:
        return QuantizedWeight(weight.codes.view(torch.int8), weight.scales[:, 0].contiguous())
    if fits_int4 and weight.zeros is not None:
        packed = pack_int4(weight.codes, weight.group)
        return QuantizedWeight(packed, weight.scales.to(dtype), weight.zeros.to(dtype))
    return None
