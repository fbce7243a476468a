"""Rotary positions: the angle by which each pair of a head's numbers turns per position."""

import math

import torch
from torch import Tensor

from kvrelay.engine.models.reading.config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 [head_dim / 2], radians per position."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return plain / rope.factor


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1's scaling: stretches long waves by `factor`, keeps short ones, and blends between the two.

    A wave is long if it turns at most `low_freq_factor` times within the original context, and short if it turns at
    least `high_freq_factor` times.
    """
    turns = rope.original_max_positions * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain
