"""Hidden states that the steps of a GPU keep.

    launched kernel by kernel    into a tensor of the step's own
    captured                     into one tensor, which the next step overwrites:  graph N | copy | graph N + 1 | copy

What graphs keep is fixed when they are captured: what this worker's own proposer needs. A step that keeps anything
else, as one whose prompts go to a worker with a proposer, runs without graphs.
"""

import torch
from torch import Tensor

from kvrelay.engine.models.fast.decoder import NO_TAPS, Taps, taps_into
from kvrelay.engine.plan import StepPlan


class KeptStates:
    """Hidden states that one runner's steps keep."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype` of the model."""
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._keep: tuple[int, ...] = ()
        self._captured: Tensor | None = None
        """Hidden states that graphs write, [T, layers, hidden]."""

    def capture(self, keep: tuple[int, ...], tokens: int) -> None:
        """Makes the tensor for graphs, which keep these layers from now on, of so many tokens at most."""
        self._keep, self._captured = keep, self.make(tokens, keep)

    def suits(self, keep: tuple[int, ...]) -> bool:
        """Whether the graphs can be used for a plan that keeps these layers."""
        return not keep or keep == self._keep

    def taps(self, tokens: int) -> Taps:
        """Taps of a graph of so many tokens."""
        return NO_TAPS if self._captured is None else taps_into(self._captured[:tokens], self._keep)

    def make(self, tokens: int, keep: tuple[int, ...]) -> Tensor | None:
        """A tensor [tokens, layers, hidden] for a step without graphs; None if it keeps nothing."""
        shape = tokens, len(keep), self._hidden_size
        return torch.empty(shape, dtype=self._dtype, device=self._device) if keep else None

    def copy(self, plan: StepPlan) -> Tensor | None:
        """Queues a copy of what the replayed step keeps; None if that is nothing."""
        return self._captured[: plan.num_tokens].clone() if plan.keep and self._captured is not None else None
