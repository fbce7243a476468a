"""Rotary positions: the angle by which each pair of a head's numbers turns per position."""

import math

import torch
from torch import Tensor

from kvrelay.engine.models.reading.positions import RopeConfig


def rotary(rope: RopeConfig, head_dim: int, scale: float = 1.0) -> Tensor:
    """float32 [2, head_dim / 2]: of each pair of a head's numbers, radians per position and the factor of both.

    Args:
        scale: of all products of a query with a key. Its root is a part of each factor, so that attention needn't know.
    """
    table = torch.zeros(2, head_dim // 2)
    table[1] = math.sqrt(scale)
    if rope.kind != "none":
        found = _frequencies(rope, rope.width(head_dim))
        table[0, : len(found)] = found
        table[1, : len(found)] *= rope.attention_factor
    return table


def _frequencies(rope: RopeConfig, width: int) -> Tensor:
    """float32 [width / 2], radians per position."""
    powers = rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if rope.factors:
        return 1.0 / (torch.tensor(rope.factors) * powers)
    plain = 1.0 / powers
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return _yarn(rope, plain, width) if rope.kind == "yarn" else plain / rope.factor


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1's scaling: stretches long waves by `factor`, keeps short ones, and blends between the two.

    A wave is long if it turns at most `low_freq_factor` times within the original context, and short if it turns at
    least `high_freq_factor` times.
    """
    turns = rope.original_max_positions * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeConfig, plain: Tensor, width: int) -> Tensor:
    """As `_llama3`, but the blend is even from one index of a frequency to another.

    Source: Peng et al.: YaRN, arXiv:2309.00071.
    """

    def index(turns: float) -> float:
        return width * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index(rope.fast_turns), index(rope.slow_turns)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    # The paper's code also avoids a division by 0 in this way.
    high += 0.001 if low == high else 0
    stretched = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * stretched + plain * (1 - stretched)
