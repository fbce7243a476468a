"""Guesses that heads make level by level, and that stay on the device until all are made."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrelay.engine.sampling.sampler import Draw
from kvrelay.engine.speculate.base import Want
from kvrelay.engine.speculate.draft import undisturbed
from kvrelay.kernels.ops import NONFINITE


def wanting(wants: Sequence[Want], level: int) -> int:
    """The number of wants, longest first, that are for more than `level` guesses."""
    return sum([want.most > level for want in wants])


def draws_at(wants: Sequence[Want], level: int) -> list[Draw]:
    """How the guess of this level, from 0, is chosen for each."""
    return [Draw(undisturbed(want.request.sampling), len(want.tokens) + level, 0) for want in wants]


def read_chains(levels: Sequence[Tensor]) -> list[list[int]]:
    """Waits for the device, once.

    Args:
        levels: int64 [N] of each level, N never more than of the one before.

    Returns:
        The guesses of each row of the first level, up to one that isn't finite.
    """
    chains: list[list[int]] = [[] for _ in range(len(levels[0]))]
    parts = iter(torch.cat(list(levels)).tolist())
    for level, tokens in enumerate(levels):
        for chain, token in zip(chains[: len(tokens)], parts, strict=False):
            if token != NONFINITE and len(chain) == level:
                chain.append(token)
    return chains
