"""KV in 8 bits: the keys, or the values, of one head of a token are codes that have one scale.

    scale   = max |x| / LARGEST, rounded up to bfloat16, so that no code is out of range
    code    = x / scale, rounded to the nearest number of the type
    number  = code * scale

A scale below the smallest normal float32 counts as 0, and its codes are 0. If a number isn't finite, neither is the
scale: what is computed with it shows it.
"""

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest code of each type of 8 bits; float8_e4m3fn has no infinities."""
SCALE = torch.bfloat16


def quantize(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of `numbers`.

    Args:
        numbers: [..., D] of a floating-point type.
        dtype: of the codes, one of LARGEST.

    Returns:
        Codes [..., D] and bfloat16 [...].
    """
    x = numbers.float()
    scales = _rounded_up(x.abs().amax(-1) / LARGEST[dtype])
    divisors = torch.where(scales > 0, scales.float(), torch.inf)
    codes = (x / divisors[..., None]).nan_to_num(0.0)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., D], the numbers of codes [..., D] and scales [...]."""
    return codes.float() * scales.float()[..., None]


def _rounded_up(x: Tensor) -> Tensor:
    """bfloat16 numbers that are the next ones not below `x` (float32, at least 0)."""
    # The lower half of a float32 is what bfloat16 lacks.
    up = ((x.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    up = torch.where(x < torch.finfo(torch.float32).tiny, 0.0, up)
    return torch.where(x.isnan(), x, up).to(SCALE)
