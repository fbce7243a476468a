"""Steps of ragged rows with scattered slots of state, checked against the plain definitions."""

import math
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kvrelay.kernels import reference
from kvrelay.kernels.states import StateOps, StateRows, TimeStep

STEPS = [
    [(0, 1)],
    [(0, 5), (7, 1), (64, 63), (3, 130)],
    [(9, 1), (0, 1), (40, 1), (0, 64)],
]
"""Rows of (tokens before, tokens of the step)."""
DTYPES = ["float32", "bfloat16"]
SLOTS = 9


class Scene:
    """Random numbers for the rows of a step. Slots that nobody may read are full of NaN."""

    def __init__(self, rows: list[tuple[int, int]], dtype: str, device: str | torch.device = "cpu") -> None:
        self.device, self.dtype = torch.device(device), getattr(torch, dtype)
        self.starts = [start for start, _ in rows]
        self.firsts = [0, *accumulate(length for _, length in rows)]
        self._random = torch.Generator().manual_seed(1)
        self.slots = torch.randperm(SLOTS, generator=self._random)[: len(rows)]
        lengths = np.array([length for _, length in rows])
        self.rows = StateRows.of(lengths, np.array(self.starts), self.slots.numpy(), self.device)
        exact = dtype == "float32"
        self._bounds = {"rtol": 1e-4 if exact else 2e-2, "atol": 2e-5 if exact else 2e-2}

    @property
    def tokens(self) -> int:
        return self.firsts[-1]

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        numbers = torch.randn(shape, generator=self._random)
        return numbers.to(self.device, dtype or self.dtype)

    def columns(self, *shape: int) -> Tensor:
        """Random numbers [T, *shape] that are a part of wider rows."""
        wide = self.normal(self.tokens, math.prod(shape) + 24)
        return wide[:, 8:-16].unflatten(1, shape)

    def states(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """[slots, *shape], as parts of wider slots."""
        wide = torch.full((SLOTS, math.prod(shape) + 16), torch.nan, dtype=dtype, device=self.device)
        states = wide[:, 8:-8].unflatten(1, shape)
        for start, slot in zip(self.starts, self.slots.tolist(), strict=True):
            if start:
                states[slot] = self.normal(*shape, dtype=dtype)
        return states

    def check_conv(self, ops: StateOps, channels: int, width: int) -> None:
        for silu, biased in ((True, True), (False, False)):
            x, weight = self.columns(channels), self.normal(channels, width)
            bias = self.normal(channels) if biased else None
            state = self.states(width, channels, dtype=self.dtype)
            own = state[self.slots].clone()
            expected = reference.short_conv(x, weight.T, bias, own, self.firsts, self.starts, silu)
            found = ops.conv(x, weight, bias, state, self.rows, silu=silu)
            self._same(found, expected)
            self._same(state[self.slots], own)

    def check_ssd(self, ops: StateOps, heads: int, groups: int, dim: int, size: int) -> None:
        x, dt = self.columns(heads, dim), self.columns(heads)
        b, c = self.columns(groups, size) / size**0.25, self.columns(groups, size) / size**0.25
        a, d, bias = -self.normal(heads).abs().float() - 0.1, self.normal(heads), self.normal(heads)
        state = self.states(heads, size, dim, dtype=torch.float32)
        own = state[self.slots].clone()
        step = torch.nn.functional.softplus(dt.float() + bias.float()).clamp(0.1, 2.0)
        expected = reference.ssd(x, step, a, b, c, d, own, self.firsts, self.starts)
        found = ops.ssd(x, dt, a, b, c, d, TimeStep(bias, True, 0.1, 2.0), state, self.rows)
        self._same(found, expected)
        self._same(state[self.slots], own)

    def check_delta(self, ops: StateOps, heads: int, key_heads: int, dim: int, key_dim: int, channels: bool) -> None:
        """
        Args:
            channels: whether each channel decays on its own. Some forget all within a few tokens, some hardly anything.
        """
        for normalized in (True, False):
            q, k, v = self.columns(key_heads, key_dim), self.columns(key_heads, key_dim), self.columns(heads, dim)
            if not normalized:
                q, k = (torch.nn.functional.normalize(each.float(), dim=-1).to(self.dtype) for each in (q, k))
            g = -self.normal(self.tokens, heads, *[key_dim] * channels, dtype=torch.float32).abs()
            if channels:
                g = g * 10 ** self.normal(key_dim, dtype=torch.float32)
            beta = torch.sigmoid(self.columns(heads))
            state = self.states(heads, key_dim, dim, dtype=torch.float32)
            own = state[self.slots].clone()
            expected = reference.gated_delta(q, k, v, g, beta, own, self.firsts, self.starts, normalized)
            found = ops.delta(q, k, v, g, beta, state, self.rows, normalized=normalized)
            self._same(found, expected)
            self._same(state[self.slots], own)

    def check_wkv(self, ops: StateOps, channels: int) -> None:
        k, v = 3 * self.columns(channels), self.columns(channels)
        decay, first = -self.normal(channels, dtype=torch.float32).exp(), self.normal(channels, dtype=torch.float32)
        state = self.states(3, channels, dtype=torch.float32)
        state[:, 1].exp_()
        own = state[self.slots].clone()
        expected = reference.wkv(k, v, decay, first, own, self.firsts, self.starts)
        found = ops.wkv(k, v, decay, first, state, self.rows)
        self._same(found, expected)
        self._same(state[self.slots], own)

    def _same(self, found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found.float(), expected.float(), **self._bounds)
