"""The frozen values that cross between scheduler and runner, and nothing else does.

One flat token layout serves prefill, chunks and decode alike. Row `r` of a plan computes `lengths[r]` tokens of one
sequence, at positions `starts[r] .. starts[r] + lengths[r] - 1`; its tokens lie in `tokens` after those of the rows
before it:

    tokens          | row 0: chunk of 5    | row 1: decode | row 2: chunk of 3 |
    positions         32  33  34  35  36     107             0   1   2
    sample            True on a row that catches up with its sequence: its last position's logits yield a token
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.request import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step's work: R rows, T tokens. The arrays are the plan's own copies: nobody writes to them."""

    step: int
    """Grows by one with every plan."""
    handles: tuple[int, ...]
    """[R] the scheduler's number for each row's sequence."""
    tokens: NDArray[np.int32]
    """[T] flat token ids."""
    starts: NDArray[np.int32]
    """[R] tokens of the row's sequence that are in the KV pool before this step."""
    lengths: NDArray[np.int32]
    """[R] tokens that this step computes; all at least 1, sum T."""
    block_tables: NDArray[np.int32]
    """[R, W] pool block of each logical block; entries past a row's last used block are 0 and never read."""
    sample: NDArray[np.bool_]
    """[R] whether the row yields a token."""
    sampling: tuple[SamplingParams, ...]
    """[R] each row's sampling parameters."""
    generated: NDArray[np.int32]
    """[R] completion tokens that the sequence has before this step (min_tokens counts them)."""
    feeds: NDArray[np.int32] | None = None
    """[R] the row of the step before whose sampled token is this row's only token, where that isn't known yet (`tokens`
    has 0 in its place); -1 where it is. None if all are known."""

    @property
    def num_rows(self) -> int:
        return len(self.handles)

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step yielded."""

    tokens: tuple[int | None, ...]
    """[R] the sampled token of each row with `sample`, else None."""
    nonfinite: tuple[int, ...] = ()
    """Rows whose logits aren't finite: their tokens mean nothing, and their sequences fail."""
