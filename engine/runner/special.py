"""Rows of a GPU's step that take more than the sampling kernel: they are chosen once more, from shaped logits.

The kernel has chosen a token for each row of the step, in a graph if it is a decode step. For the special rows, torch
then shapes a copy of their logits, the kernel chooses again, and the tokens replace those of the first choice. Steps
without special rows do nothing of this.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.plan import StepPlan, TokenLogprobs
from kvrelay.engine.sampling.logprobs import Scores
from kvrelay.engine.sampling.processors import NO_TOKEN, ban, shape
from kvrelay.engine.sampling.sampler import draws_of, early_stops
from kvrelay.kernels.triton.sample import Choices, Workspace, sample


class SpecialRows:
    """The special rows of one step."""

    def __init__(
        self, plan: StepPlan, rows: NDArray[np.int64], logits: Tensor, choices: Choices, tokens: Tensor
    ) -> None:
        """Launches all work on the current stream.

        Args:
            rows: [S] the plan's rows that sample, in the order of the tensors; at least one is special.
            logits: float32 [S or more, V] of the model, nothing changed.
            choices: [S or more].
            tokens: int64 [S or more] what the kernel has chosen; overwritten where a row is special.
        """
        places = [place for place, row in enumerate(rows.tolist()) if plan.is_special(row)]
        self._rows = rows[places].tolist()
        draws = draws_of(plan, rows[places])
        index = torch.tensor(places).to(logits.device)
        own = logits.index_select(0, index)
        self._scored = [place for place, draw in enumerate(draws) if draw.params.logprobs is not None]
        scored = torch.tensor(self._scored, dtype=torch.int64).to(logits.device)
        raw = own.index_select(0, scored)
        shapings = [(place, draw.shaping) for place, draw in enumerate(draws) if draw.shaping is not None]
        self._failed = shape(own, shapings)
        ban(own, early_stops(draws))
        self._empty = (own.amax(-1) == -torch.inf).to("cpu", non_blocking=True)
        chosen = torch.empty(len(places), dtype=torch.int64, device=logits.device)
        sample(own, choices.select(index), Workspace.empty(len(own), own.shape[1], own.device), chosen)
        tokens.index_copy_(0, index, chosen)
        tops = [draws[place].params.logprobs or 0 for place in self._scored]
        self._scores = Scores(raw, chosen.index_select(0, scored), tops) if tops else None

    def refused(self) -> dict[int, str]:
        """The plan's rows for which their requests leave no token, and why. Once the step has ended."""
        empty = [row for row, none in zip(self._rows, self._empty.tolist(), strict=True) if none]
        return dict.fromkeys(empty, NO_TOKEN) | {self._rows[place]: why for place, why in self._failed.items()}

    def logprobs(self, num_rows: int) -> tuple[TokenLogprobs | None, ...] | None:
        """[R] as in `StepOutput`. Once the step has ended."""
        if self._scores is None:
            return None
        found: list[TokenLogprobs | None] = [None] * num_rows
        for place, scores in zip(self._scored, self._scores.read(), strict=True):
            found[self._rows[place]] = scores
        return tuple(found)
