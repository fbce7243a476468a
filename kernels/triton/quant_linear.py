"""Linear layers with quantized weights on GPU: `quant_gemv` for the few rows of a decode step, `quant_matmul` for more.

`quant_matmul` decodes a weight again for each 64 rows. So with very many rows a weight is decoded once, for a product
by PyTorch; benchmarks/NOTES.md has what that is to save.
"""

import logging
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from kvrelay.kernels.codes import CodedWeight, CodeType
from kvrelay.kernels.ops import Linear
from kvrelay.kernels.triton.quant_gemv import GROUPS, MAX_ROWS, QuantGemv, QuantizedWeight, pack_int4
from kvrelay.kernels.triton.quant_matmul import QuantMatmul

logger = logging.getLogger(__name__)
INTERPRETED_PROCESSORS = 8
VERY_MANY_ROWS = 256
"""Smallest number of rows for which a weight is decoded at once."""


def quant_linear(weight: CodedWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Linear:
    """`x [T, in] -> x @ weight.T + bias [T, out]` for x of `dtype`. Weights without a kernel become dense
    ones of `dtype`, with a warning. Inputs aren't rounded, whatever `weight.round_inputs` says.
    """
    if weight.type is CodeType.FP8:
        return QuantMatmul(replace(weight, codes=weight.codes.to(device), scales=weight.scales.to(device)), bias)
    found = quantized(weight, dtype)
    if found is None:
        logger.warning("%s in groups of %d has no kernel on GPUs: held as %s", weight.type.name, weight.group, dtype)
        dense = weight.dequantize().to(device, dtype)
        return lambda x: functional.linear(x, dense, bias)
    zero = None if found.zero is None else found.zero.to(device)
    placed = QuantizedWeight(found.q.to(device), found.scale.to(device), zero)
    processors = INTERPRETED_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    few, many = QuantGemv(placed, bias, processors), QuantMatmul(placed, bias)

    def product(x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows < VERY_MANY_ROWS:
            return few(x) if rows <= MAX_ROWS else many(x)
        return functional.linear(x, decoded(placed, x.dtype), bias)

    return product


def decoded(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """[N, K] of `dtype`, with no larger tensor on the way."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.q.device)
    if weight.zero is None:
        return torch.mul(weight.q, weight.scale[:, None], out=out)
    groups = (len(out), -1, weight.group // 2)
    packed, halves = weight.q.view(groups), out.view(len(out), -1, 2, weight.group // 2)
    zero, scale = weight.zero[..., None], weight.scale[..., None]
    for half, found in enumerate((packed & 15, packed >> 4)):
        torch.sub(found, zero, out=halves[:, :, half])
        halves[:, :, half].mul_(scale)
    return out


def quantized(weight: CodedWeight, dtype: torch.dtype) -> QuantizedWeight | None:
    """The weight as the kernels read it; None if they can't."""
    inputs = weight.codes.shape[1]
    if weight.minima is not None:
        return None
    if weight.type is CodeType.INT8 and weight.group >= inputs and weight.zeros is None:
        return QuantizedWeight(weight.codes.view(torch.int8), weight.scales[:, 0].contiguous())
    if (
        weight.type is CodeType.INT4
        and weight.zeros is not None
        and weight.group in GROUPS
        and not inputs % weight.group
    ):
        packed = pack_int4(weight.codes, weight.group)
        return QuantizedWeight(packed, weight.scales.to(dtype), weight.zeros.to(dtype))
    return None
