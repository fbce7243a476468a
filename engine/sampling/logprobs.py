"""Log-probabilities of chosen and given tokens, by the model's own distribution."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.plan import PromptPart, StepPlan, TokenLogprobs

ROWS_AT_ONCE = 64
"""Number of a prompt's tokens whose logits are there at the same time: those of a whole prompt would not fit into
memory."""


class ReadScores:
    """Log-probabilities of N tokens, perhaps on their way from a device; `read` them when the step has ended."""

    def __init__(self, own: Tensor, ranks: Tensor, values: Tensor, ids: Tensor, tops: Sequence[int]) -> None:
        """
        Args:
            own, ranks: [N] of the tokens.
            values, ids: [N, most] of the likeliest tokens, likeliest first.
            tops: [N] how many of the likeliest tokens are wanted beside each.
        """
        self._tops = tops
        self._parts = [part.to("cpu", non_blocking=True) for part in (own, ranks, values, ids)]

    def read(self) -> list[TokenLogprobs]:
        """[N]; on a device, only after the work that was launched before has ended."""
        own, ranks, values, ids = (part.tolist() for part in self._parts)
        return [
            TokenLogprobs(own[row], ranks[row], tuple(ids[row][:top]), tuple(values[row][:top]))
            for row, top in enumerate(self._tops)
        ]


MakeScores = Callable[[Tensor, Tensor, Sequence[int]], ReadScores]
"""As `Scores`' constructor."""


class Scores(ReadScores):
    """Log-probabilities of N tokens, from the logits of all tokens."""

    def __init__(self, logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> None:
        """
        Args:
            logits: float32 [N, V]; overwritten.
            tokens: int64 [N]; their values mean nothing where the logits aren't finite.
            tops: see `ReadScores`.
        """
        logits -= logits.logsumexp(-1, keepdim=True)
        own = logits.gather(-1, tokens.clamp(min=0)[:, None])
        ranks = (logits > own).sum(-1) + 1
        values, ids = logits.topk(min(max(tops), logits.shape[1]), -1)
        super().__init__(own.squeeze(-1), ranks, values, ids, tops)


PromptScores = list[list[ReadScores]]
"""Scores of each of a plan's prompt parts, a few tokens at a time."""


def score_prompts(
    plan: StepPlan, hidden: Tensor, logits: Callable[[Tensor], Tensor], scores: MakeScores = Scores
) -> PromptScores:
    """The scores of a plan's prompt parts.

    Args:
        hidden: [T, hidden] of the plan's tokens.
        logits: from rows of `hidden` to float32 logits; what it returns may be overwritten.
        scores: makes scores of logits.
    """
    ends = plan.lengths.cumsum()
    return [
        _score(hidden, int(ends[part.row] - plan.lengths[part.row]), part, logits, scores) for part in plan.prompt_parts
    ]


def wanted(plan: StepPlan) -> NDArray[np.int64]:
    """[N] the plan's tokens, ascending, whose logits yield something: a token, or scores of a prompt part."""
    ends = plan.lengths.cumsum()
    parts = [ends[plan.sample] - 1]
    for part in plan.prompt_parts:
        first = ends[part.row] - plan.lengths[part.row] + part.begin
        parts.append(np.arange(first, first + len(part.targets)))
    return np.unique(np.concatenate(parts)).astype(np.int64)


def read_prompts(prompts: PromptScores) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """`StepOutput.prompt_logprobs`, when the step has ended."""
    return tuple([tuple([score for scores in part for score in scores.read()]) for part in prompts])


def _score(
    hidden: Tensor, first: int, part: PromptPart, logits: Callable[[Tensor], Tensor], scores: MakeScores
) -> list[ReadScores]:
    """`first` is the step's first token of the part's row."""
    found = list[ReadScores]()
    for at in range(0, len(part.targets), ROWS_AT_ONCE):
        targets = torch.from_numpy(part.targets[at : at + ROWS_AT_ONCE].astype("int64")).to(hidden.device)
        begin = first + part.begin + at
        found.append(scores(logits(hidden[begin : begin + len(targets)]), targets, [part.top] * len(targets)))
    return found
