"""Chooses tokens by the native kernel, which is `sampler.sample` in one call."""

import ctypes
from collections.abc import Sequence
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.sampling.noise import SEED_MASK
from kvrelay.engine.sampling.processors import ban
from kvrelay.engine.sampling.sampler import Draw, early_stops
from kvrelay.kernels.cpu.program import Buffer, Program, Team
from kvrelay.kernels.cpu.sample import SAMPLE, SampleArgs, pack_row, workspace_floats


class NativeSampler:
    """Implements `sampler.Sample`. Not thread-safe."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._rows = ctypes.c_int64()
        self._workspace = torch.empty(0)
        self._packed = Buffer(np.uint8)
        self._args = SampleArgs(rows=ctypes.addressof(self._rows))
        self._program = Program(team.library, (SAMPLE, self._args))

    def __call__(self, logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[int]]:
        """See `sampler.sample`. The numbers of a row of `logits` lie side by side."""
        count, width = logits.shape
        ban(logits, early_stops(draws))
        tokens, largest = np.empty(count, np.int64), np.empty(count, np.float32)
        if len(self._workspace) < (size := workspace_floats(self._team.threads, width)):
            self._workspace = torch.empty(size)
        self._rows.value = count
        args = self._args
        args.input, args.input_stride, args.width = logits.data_ptr(), logits.stride(0), width
        args.draws = pack_draws(draws, self._packed)
        args.tokens, args.largest = tokens.ctypes.data, largest.ctypes.data
        args.workspace = self._workspace.data_ptr()
        self._team.run(self._program)
        return tokens.tolist(), nonfinite_rows(largest.tolist())


def pack_draws(draws: Sequence[Draw], into: Buffer[np.uint8]) -> int:
    """Writes the draws as [R] `kernels.cpu.sample.ROW`, and returns their address."""
    packed = b"".join([
        pack_row(params.seed & SEED_MASK, position, params.temperature, params.top_k, params.top_p, params.min_p)
        for params, position, *_ in draws
    ])  # fmt: skip
    into.take(len(packed))[:] = np.frombuffer(packed, np.uint8)
    return into.address


def nonfinite_rows(largest: Sequence[float]) -> list[int]:
    """The rows whose largest logit isn't finite."""
    return [] if isfinite(sum(largest)) else [row for row, logit in enumerate(largest) if not isfinite(logit)]
