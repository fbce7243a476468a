"""Chooses guessed tokens on a GPU, by the kernel that chooses a step's."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.attention.base import to_device
from kvrelay.engine.sampling.noise import SEED_MASK, noise_keys
from kvrelay.engine.sampling.sampler import Draw
from kvrelay.kernels.triton.sample import Choices, Sampler, Workspace

FIELDS = 6


class GpuGuesses:
    """Implements `sampler.Guess`. Not thread-safe."""

    def __init__(self, rows: int, workspace: Workspace) -> None:
        """
        Args:
            rows: at most.
            workspace: for as many; may be that of other calls on the same stream.
        """
        self._device = workspace.largest.device
        self._rows = rows
        self._words = torch.zeros(FIELDS * rows, dtype=torch.int32, device=self._device)
        temperature, top_p, min_p = self._words[: 3 * rows].view(torch.float32).view(3, rows)
        top_k, keys = self._words[3 * rows : 4 * rows], self._words[4 * rows :].view(rows, 2)
        banned = torch.empty(rows, 0, dtype=torch.int32, device=self._device)
        self._sampler = Sampler(Choices(temperature, top_k, top_p, min_p, keys, banned), workspace)

    def __call__(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        """See `sampler.Guess`."""
        rows, count = self._rows, len(draws)
        params = [draw.params for draw in draws]
        words = np.zeros(FIELDS * rows, np.int32)
        floats = words[: 3 * rows].view(np.float32).reshape(3, rows)
        floats[0, :count] = [param.temperature for param in params]
        floats[1, :count] = [param.top_p for param in params]
        floats[2, :count] = [param.min_p for param in params]
        words[3 * rows : 3 * rows + count] = [param.top_k for param in params]
        seeds, positions = [param.seed & SEED_MASK for param in params], [draw.position for draw in draws]
        words[4 * rows : 4 * rows + 2 * count] = noise_keys(seeds, positions).reshape(-1)
        self._words.copy_(to_device(words, self._device))
        tokens = torch.empty(count, dtype=torch.int64, device=self._device)
        self._sampler(logits, tokens)
        return tokens
