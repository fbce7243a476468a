"""The operations of layers that keep a state, over ragged rows of tokens; formulas are in `reference.py`.

    firsts   0       3   4           8           tokens of row r are firsts[r] to firsts[r + 1]
    tokens   a a a | b | c c c c                 the row's state is in slot slots[r] of `state`
    starts   0     | 9 | 16                      a row that starts at 0 has no state yet: its slot isn't read

A call overwrites the slots of its rows, no two of which are the same. On CPU, a row may begin with the state of another
slot, its origin, which may be the slot of a row before.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class StateRows(NamedTuple):
    """Rows of a step, on the device of the state."""

    firsts: Tensor
    """int64 [R + 1] first token of each row, and the number of tokens."""
    starts: Tensor
    """int64 [R] tokens of each row's sequence before these."""
    slots: Tensor
    """int64 [R] slot of each row's state."""
    origins: Tensor
    """int64 [R] slot of the state that each row begins with; on GPU its own."""
    longest: int
    """Tokens of the longest row."""

    @classmethod
    def of(
        cls,
        lengths: NDArray[np.int64],
        starts: NDArray[np.int64],
        slots: NDArray[np.int64],
        device: torch.device,
        origins: NDArray[np.int64] | None = None,
    ) -> "StateRows":
        """Rows of `lengths` tokens."""
        firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
        on_device = [
            torch.from_numpy(np.ascontiguousarray(each, np.int64)).to(device) for each in (firsts, starts, slots)
        ]
        own = on_device[2] if origins is None else torch.from_numpy(np.ascontiguousarray(origins, np.int64)).to(device)
        return cls(on_device[0], on_device[1], on_device[2], own, int(lengths.max(initial=0)))


def token_rows(x: Tensor) -> Tensor:
    """The same numbers [T, ...], contiguous within each token."""
    return x if x[0].is_contiguous() else x.contiguous()


class TimeStep(NamedTuple):
    """Parameters of Mamba-2's time steps."""

    bias: Tensor | None
    """[H] numbers that are added first; None for none."""
    softplus: bool
    least: float
    """Bounds of the time steps, applied last."""
    most: float


class StateOps(Protocol):
    """Kernels that compute these operations. The last dimension of each tensor of a step is contiguous."""

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, *, silu: bool
    ) -> Tensor:
        """See `reference.short_conv`.

        Args:
            x: [T, C].
            weight: [C, K], as torch's convolutions hold it.
            state: of x's dtype [S, K, C].
        """
        ...

    def ssd(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        time_step: TimeStep,
        state: Tensor,
        rows: StateRows,
    ) -> Tensor:
        """See `reference.ssd`.

        Args:
            state: float32 [S, H, N, P].
        """
        ...

    def delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        rows: StateRows,
        *,
        normalized: bool,
    ) -> Tensor:
        """See `reference.gated_delta`.

        Args:
            g: [T, H], or a decay for each channel of the key, [T, H, K].
            state: float32 [S, H, K, D].
        """
        ...

    def wkv(self, k: Tensor, v: Tensor, decay: Tensor, first: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        """See `reference.wkv`.

        Args:
            state: float32 [S, 3, C].
        """
        ...
