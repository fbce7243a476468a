"""What the layers that run beside a model, on its device, are made with."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from kvrelay.engine.attention.base import Attention
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.models.fast.loader import MakeLinear
from kvrelay.engine.sampling.sampler import Guess
from kvrelay.kernels.ops import Ops

MakeAttention = Callable[[KVPool, int, int], Attention]
"""Attention of one layer over a pool, with so many query heads, and for so many plans (`TritonAttention`)."""


class Parts(NamedTuple):
    """A runner's; its own model is made with them too."""

    linear: MakeLinear
    """Lays out a layer's weight and bias; quantizes them if the model's layers are quantized at load."""
    head: MakeLinear
    """The same for a projection to the vocabulary."""
    ops: Ops
    attention: MakeAttention
    guess: Guess
    dtype: torch.dtype
    """Of weights."""
    activations: torch.dtype
    """Of what a linear layer takes and gives."""
    device: torch.device
    """Of weights, and of the hidden states that steps keep."""
    running: Callable[[], AbstractContextManager[object]]
    """Makes the context in which they run: on a GPU, behind all that the runner has launched."""
