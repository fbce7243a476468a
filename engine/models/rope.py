"""Rotary positions: how far each pair of a head's numbers turns per position."""

import math

import torch
from torch import Tensor

from kvrelay.engine.models.config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 [head_dim / 2], radians per position."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return plain / rope.factor


def rotations(per_position: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin in the form that `kernels.reference.rope` takes, float32 [T, 1, head_dim].

    Args:
        per_position: of `frequencies`.
        positions: int64 [T].
    """
    angles = torch.outer(positions.float(), per_position)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1's scaling: long waves are stretched by `factor`, short ones kept, those between blended.

    A wave's place is told by how often it turns within the original context: at most `low_freq_factor` times is long,
    at least `high_freq_factor` times is short.
    """
    turns = rope.original_max_positions * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain
