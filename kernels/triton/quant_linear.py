"""Linear layers with quantized weights on GPU: `quant_gemv` for the few rows of a decode step, else `quant_matmul`."""

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
    return lambda x: few(x) if x.shape[0] <= MAX_ROWS else many(x)


def quantized(weight: CodedWeight, dtype: torch.dtype) -> QuantizedWeight | None:
    """The weight as the kernels read it; None if they can't."""
    inputs = weight.codes.shape[1]
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
