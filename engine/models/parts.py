"""What the layers that run beside a model, on its threads, are made with."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from kvrelay.engine.attention.base import Attention
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.models.loader import MakeLinear
from kvrelay.engine.sampling.sampler import Sample

MakeAttention = Callable[[KVPool, int], Attention]
"""Attention of one layer over a pool, with so many query heads."""


class Parts(NamedTuple):
    """A runner's; its own model is made with them too."""

    linear: MakeLinear
    """Lays out a layer's weight and bias; quantizes them if the model's layers are quantized at load."""
    head: MakeLinear
    """The same for a projection to the vocabulary."""
    attention: MakeAttention
    dtype: torch.dtype
    """Of weights."""
    activations: torch.dtype
    """Of what a linear layer takes and gives."""
    sample: Sample
