"""Parts that layers beside a model, such as a proposer's, are made with, on the model's device."""

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
    """Parts of one runner, whose own model is made with them too."""

    linear: MakeLinear
    """Lays out a layer's weight and bias; quantizes them if the model's layers are quantized at load."""
    head: MakeLinear
    """Lays out a projection to the vocabulary, as `linear` does a layer."""
    ops: Ops
    attention: MakeAttention
    guess: Guess
    dtype: torch.dtype
    """Dtype of weights."""
    activations: torch.dtype
    """Dtype of a linear layer's inputs and outputs."""
    device: torch.device
    """Device of weights, and of the hidden states that steps keep."""
    running: Callable[[], AbstractContextManager[object]]
    """Makes the context in which these layers run: on a GPU, behind all that the runner has launched."""
