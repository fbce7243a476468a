"""The general path's form of a step."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.plan import StepPlan


class UnfitError(Exception):
    """The model's code can't be run in this way; the text says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """R rows, T tokens, as in `StepPlan`."""

    tokens: NDArray[np.int64]
    """[T]."""
    starts: NDArray[np.int64]
    """[R]."""
    lengths: NDArray[np.int64]
    """[R]."""
    tables: tuple[NDArray[np.int64], ...]
    """Block table of each layer group, [R, W], or [R, 1] of a state."""
    drafts: NDArray[np.bool_] | None = None
    """[R] rows of guessed tokens, each behind the row before, with whose state it begins; None without any."""

    @classmethod
    def of(cls, plan: StepPlan) -> "Step":
        tables = (plan.block_tables, *plan.side_tables)
        return cls(
            plan.tokens.astype(np.int64),
            plan.starts.astype(np.int64),
            plan.lengths.astype(np.int64),
            tuple([table.astype(np.int64) for table in tables]),
            plan.drafts,
        )

    @property
    def contexts(self) -> NDArray[np.int64]:
        """[R] tokens of each row's sequence, including this step's."""
        return self.starts + self.lengths

    @property
    def firsts(self) -> NDArray[np.int64]:
        """[R] index of each row's first token in the step."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def rows_of_tokens(self) -> NDArray[np.int64]:
        """[T] row of each token."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def positions(self) -> NDArray[np.int64]:
        """[T] position of each token in its sequence."""
        return np.arange(len(self.tokens)) + (self.starts - self.firsts)[self.rows_of_tokens]

    def part(self, rows: NDArray[np.int64]) -> "Step":
        """The step of these rows alone."""
        tokens = np.concatenate([np.arange(self.firsts[row], self.firsts[row] + self.lengths[row]) for row in rows])
        tables = tuple([table[rows] for table in self.tables])
        return Step(self.tokens[tokens], self.starts[rows], self.lengths[rows], tables)


class Way(Protocol):
    """A way of running a model's code on a step."""

    @property
    def name(self) -> str:
        """Name of the way, for messages and for the comparison of two workers."""
        ...

    def run(self, step: Step, wanted: NDArray[np.int64]) -> Tensor:
        """Computes a step, with its KV and states written.

        Args:
            wanted: [N] indices of tokens of the step, in order.

        Returns:
            float32 [N, V], the logits at these tokens.

        Raises:
            UnfitError: the model's code can't be run in this way.
        """
        ...


def host(array: NDArray[np.integer] | NDArray[np.bool_], device: torch.device) -> Tensor:
    """The array on the device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
