"""Tables of rotary positions."""

import math

import torch
from torch import Tensor

from kvrelay.engine.models.config import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, 1, head_dim], in the form that `kernels.reference.rope` takes."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), _frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def _frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 [head_dim / 2], radians per position."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return plain / rope.factor


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1's scaling: long waves are stretched by `factor`, short ones kept, those between blended.

    A wave's place is told by how often it turns within the original context: at most `low_freq_factor` times is long,
    at least `high_freq_factor` times is short.
    """
    turns = rope.original_max_positions * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain
