"""All that crosses between scheduler and runner, as frozen values.

One flat token layout serves whole prompts, chunks and decode. Row `r` of a plan computes `lengths[r]` tokens of one
sequence, at positions `starts[r] .. starts[r] + lengths[r] - 1`. In `tokens`, the rows follow one another:

    tokens          | row 0: chunk of 5    | row 1: decode | row 2: chunk of 3 |
    positions         32  33  34  35  36     107             0   1   2
    sample            True for a row that reaches its sequence's last token: the logits there yield the next token

A draft, a guess of a sequence's token, is a row of its own behind the row of the token before it. To a runner it is a
decode row like any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrelay.costs.step import StepWork, pairs
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.shaping import Shaping

if TYPE_CHECKING:
    from torch import Tensor


NOT_READY = ""
"""Reason of a refused row whose mask isn't there yet: its token is chosen in a later step."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities of a token and of the likeliest ones, natural logarithms of the model's own distribution:
    before penalties, temperature and filters.
    """

    logprob: float
    """Log-probability of the token itself."""
    rank: int
    """Rank of the token among all, from 1."""
    top_ids: tuple[int, ...]
    """The likeliest tokens, likeliest first, as many as were asked for."""
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PromptPart:
    """Tokens of a prompt whose log-probabilities a step yields."""

    row: int
    begin: int
    """The row's first token whose logits are needed, counted within the step."""
    targets: NDArray[np.int32]
    """[N] the prompt's tokens after that one and the N - 1 that follow it."""
    top: int
    """Number of likeliest tokens that are wanted beside each target."""
    first: int
    """Index of targets[0] in the prompt."""


class SlotCopy(NamedTuple):
    """A copy between two slots of a layer group that keeps states."""

    group: int
    """Index of the group in `CacheLayout.groups`."""
    source: int
    target: int
    before: bool
    """Whether the copy is made before the step's computation, to begin with a snapshot, or behind it, to make one."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step's work: R rows, T tokens. The arrays are the plan's own copies, and read-only."""

    step: int
    """Number of the plan; it increases by one with every plan."""
    handles: tuple[int, ...]
    """[R] the scheduler's number for each row's sequence. Only rows of drafts repeat the one before them."""
    tokens: NDArray[np.int32]
    """[T] flat token ids."""
    starts: NDArray[np.int32]
    """[R] position of the row's first token: the tokens before it are in the KV pool, or in rows before this one."""
    lengths: NDArray[np.int32]
    """[R] tokens that this step computes; all at least 1, sum T."""
    block_tables: NDArray[np.int32]
    """[R, W] pool block of each logical block; entries after a row's last used block are never read."""
    sample: NDArray[np.bool_]
    """[R] whether the row yields a token."""
    sampling: tuple[SamplingParams, ...]
    """[R] each row's sampling parameters."""
    generated: NDArray[np.int32]
    """[R] completion tokens up to the row's last token (min_tokens counts them)."""
    feeds: NDArray[np.int32] | None = None
    """[R] for a row whose only token isn't known yet, the row of the step before that samples it, and 0 in `tokens`; -1
    for a row whose tokens are known. None if all tokens are known."""
    shapings: tuple[Shaping | None, ...] | None = None
    """[R] what changes each row's logits; to be read until the step is committed. None if nothing changes any."""
    drafts: NDArray[np.bool_] | None = None
    """[R] whether the row's only token is a draft. None if none is."""
    prompt_parts: tuple[PromptPart, ...] = ()
    """Prompt parts in order of their rows, at most one for each."""
    side_tables: tuple[NDArray[np.int32], ...] = ()
    """Block tables of the layer groups behind the first, in their order: of a window [R, W], where a logical block has
    the column that it has in `block_tables` and columns before the window repeat its first one; of a state [R, 1], the
    row's slot. A row that starts at 0 finds nothing of use in its slot."""
    copies: tuple["SlotCopy", ...] = ()
    """State slots to copy."""
    keep: tuple[int, ...] = ()
    """Layers whose inputs the step yields (`StepOutput.states`); the model's number of layers stands for the last one's
    output."""

    def is_special(self, row: int) -> bool:
        """Whether the row's token takes more than what its logits, temperature, filters and `min_tokens` say."""
        shaped = self.shapings is not None and self.shapings[row] is not None
        return shaped or self.sampling[row].logprobs is not None

    @property
    def work(self) -> StepWork:
        """Work of the step, as its cost counts it: a row of one token that is no draft is one that decodes."""
        guesses, context = self.num_drafts, int(self.starts.sum())
        if guesses:
            context -= int(self.starts[self.drafts].sum())
        tokens, visited = 0, 0.0
        chunks = np.flatnonzero(self.lengths > 1).tolist()
        for row in chunks:
            start, length = int(self.starts[row]), int(self.lengths[row])
            tokens, visited, context = tokens + length, visited + pairs(start, length), context - start
        sequences = self.num_rows - guesses - len(chunks)
        return StepWork(tokens, visited, sequences, context + sequences, guesses)

    @property
    def kind(self) -> Literal["prefill", "decode", "mixed"]:
        """Kind of the rows: parts of prompts, single tokens, or some of each."""
        if self.num_tokens == self.num_rows:
            return "decode"
        return "mixed" if int(self.lengths.min()) == 1 else "prefill"

    @property
    def num_rows(self) -> int:
        return len(self.handles)

    @property
    def num_drafts(self) -> int:
        return 0 if self.drafts is None else int(self.drafts.sum())

    @property
    def num_sequences(self) -> int:
        return self.num_rows - self.num_drafts

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a step."""

    tokens: tuple[int | None, ...]
    """[R] the sampled token of each row with `sample`, else None."""
    nonfinite: tuple[int, ...] = ()
    """Rows whose logits aren't finite: their tokens are meaningless, and their sequences fail."""
    refused: tuple[tuple[int, str], ...] = ()
    """Rows that have no token because of what their requests ask for, and why: their sequences fail; or NOT_READY."""
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """[R] of each row's token where its request asks for them. None if no row does."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """Log-probabilities of each of the plan's prompt parts."""
    graph: bool = False
    """Whether the step was launched as captured graphs."""
    states: "Tensor | None" = field(default=None, compare=False, repr=False)
    """[T, layers, hidden] of each token: what the plan's `keep` names, in the model's dtype. None if that is empty."""

    def misfit(self, plan: StepPlan) -> str:
        """The reason why this can't be the output of `plan`; empty if it can."""
        rows = plan.num_rows
        if len(self.tokens) == rows and all(0 <= row < rows for row in self.nonfinite):
            return ""
        return f"step {plan.step} has {rows} rows; its output has {len(self.tokens)} and names rows {self.nonfinite}"

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None or bool(self.prompt_logprobs)


def kept_rows(plan: StepPlan, sampled: Sequence[int | None]) -> list[bool]:
    """[R] whether each row computed a token that its sequence has. Rows that aren't drafts always did.

    A chain is a sequence's next token and k drafts of the tokens behind it, as k + 1 rows of one plan:

        row          r        r + 1    ...  r + k
        token        t0       d1            dk        t0 is known; each d is a draft
        sampled      s0       s1            sk        what the model chooses behind the row's token

    d1 is kept if s0 == d1, d2 if also s1 == d2, and so on. A row is what a decode row for the same token is: the same
    kernels see the same KV, and its noise depends on (seed, position) alone. So the tokens s0 ... sa, up to the first
    draft that isn't kept, are those that decoding one by one yields, to the last bit of their log-probabilities.

    Args:
        sampled: [R] what each row yielded.
    """
    if plan.drafts is None:
        return [True] * plan.num_rows
    kept: list[bool] = []
    # A draft is its row's only token.
    last = plan.tokens if plan.kind == "decode" else plan.tokens[plan.lengths.cumsum() - 1]
    tokens = last.tolist()
    for row, draft in enumerate(plan.drafts.tolist()):
        kept.append(not draft or (kept[row - 1] and sampled[row - 1] == tokens[row]))
    return kept


def kept_of(plan: StepPlan, out: StepOutput) -> list[bool]:
    """[R] which rows of a step count: as `kept_rows`, but not those whose masks weren't there."""
    late = {row for row, why in out.refused if why == NOT_READY}
    kept = kept_rows(plan, [None if row in late else token for row, token in enumerate(out.tokens)])
    return [has and row not in late for row, has in enumerate(kept)]
