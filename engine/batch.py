"""One step's tokens, as tensors that every layer shares."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """A StepPlan for the model: R rows, T tokens."""

    tokens: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T] of each token in its sequence."""
    row_of: NDArray[np.int64]
    """[T] the row of each token."""
    starts: NDArray[np.int64]
    """[R] tokens of each row's sequence that were computed before."""
    lengths: NDArray[np.int64]
    """[R] tokens of each row in this step."""
    block_tables: NDArray[np.int64]
    """[R, W]."""

    @classmethod
    def from_plan(cls, plan: StepPlan) -> "ForwardBatch":
        starts, lengths = plan.starts.astype(np.int64), plan.lengths.astype(np.int64)
        row_of = np.repeat(np.arange(len(lengths)), lengths)
        before = np.cumsum(lengths) - lengths
        positions = np.arange(len(row_of)) + (starts - before)[row_of]
        return cls(
            tokens=torch.from_numpy(plan.tokens.astype(np.int64)),
            positions=torch.from_numpy(positions),
            row_of=row_of,
            starts=starts,
            lengths=lengths,
            block_tables=plan.block_tables.astype(np.int64),
        )

    @property
    def last(self) -> NDArray[np.int64]:
        """[R] index of each row's last token."""
        last: NDArray[np.int64] = np.cumsum(self.lengths) - 1
        return last
