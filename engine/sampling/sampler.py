"""From logits to tokens.

The drawn token is the one with the largest `p / e`, where p is the filtered distribution (see
`kernels.reference.token_probabilities`) and e is exponential noise. This is an exponential race, which token i wins
with probability p_i. The noise of a row depends on its seed and position alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.plan import StepOutput, StepPlan, TokenLogprobs
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampling.logprobs import ReadScores, Scores
from kvrelay.engine.sampling.noise import SEED_MASK, exponential, noise_keys
from kvrelay.engine.sampling.processors import NO_TOKEN, ban, shape
from kvrelay.engine.shaping import Shaping
from kvrelay.kernels.ops import NONFINITE

T = TypeVar("T")

CHUNK_ELEMENTS = 2**17
"""Number of logits, about, that are drawn from at once: they stay in the CPU's cache through dozens of passes."""


class Draw(NamedTuple):
    """How one row's token is chosen."""

    params: SamplingParams
    position: int
    """Position of the token to choose, in its sequence."""
    generated: int
    """Number of completion tokens before it."""
    shaping: Shaping | None = None
    """Shaping that changes the row's logits first."""


Sample = Callable[[Tensor, Sequence[Draw]], tuple[list[int], list[int]]]
"""`sample` here, or a `NativeSampler`."""
Guess = Callable[[Tensor, Sequence[Draw]], Tensor]
"""Chooses a token for each row of float32 logits [R, V], which may be overwritten: int64 [R] on their device, NONFINITE
where they aren't finite. It doesn't wait for the device, and `min_tokens` and shapings don't count."""


class Vocabulary(Protocol):
    """Tokens that the logits are of: all of them (`ALL_TOKENS`), or a rank's part (`shards.Shard`)."""

    def choose(
        self, logits: Tensor, draws: Sequence["Draw"], sample: "Sample"
    ) -> tuple[list[int], list[int], dict[int, str]]:
        """Shapes the rows of logits [R, V], which may be overwritten, and chooses their tokens.

        Args:
            draws: [R].
            sample: chooses tokens by logits that are shaped.

        Returns:
            As `Choice.tokens`, `Choice.nonfinite` and `Choice.refused`.
        """
        ...

    def scores(self, logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> ReadScores:
        """See `Scores`."""
        ...


class AllTokens:
    """Implements `Vocabulary`."""

    def choose(
        self, logits: Tensor, draws: Sequence[Draw], sample: Sample
    ) -> tuple[list[int], list[int], dict[int, str]]:
        """See `Vocabulary.choose`."""
        shapings = [(row, draw.shaping) for row, draw in enumerate(draws) if draw.shaping is not None]
        refused = shape(logits, shapings) if shapings else {}
        tokens, nonfinite = sample(logits, draws)
        if nonfinite and shapings:
            largest = logits.amax(-1).tolist()
            empty = [row for row, _ in shapings if row in nonfinite and largest[row] == -math.inf]
            refused = dict.fromkeys(empty, NO_TOKEN) | refused
            nonfinite = [row for row in nonfinite if row not in refused]
        return tokens, nonfinite, refused

    def scores(self, logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> Scores:
        return Scores(logits, tokens, tops)


ALL_TOKENS = AllTokens()


@dataclass(frozen=True, slots=True)
class Choice:
    """The tokens of some rows, and what was asked for beside them."""

    tokens: list[int]
    """Tokens [R]."""
    nonfinite: list[int]
    """Rows whose logits aren't finite: their token means nothing."""
    refused: dict[int, str]
    """Rows without a token, as `StepOutput.refused`."""
    logprobs: list[TokenLogprobs | None] | None
    """Log-probabilities [R]; None if no row asked for them."""


def guessing(sample: Sample) -> Guess:
    """Chooses by `sample`."""

    def guess(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        tokens, nonfinite = sample(logits, draws)
        for row in nonfinite:
            tokens[row] = NONFINITE
        return torch.tensor(tokens)

    return guess


def choose(logits: Tensor, draws: Sequence[Draw], sample: Sample, vocabulary: Vocabulary = ALL_TOKENS) -> Choice:
    """Chooses a token for each row as its request asks, on the CPU; `logits` and `draws` as for `sample`.

    Args:
        vocabulary: the tokens that logits and `sample` are of.
    """
    scored = [row for row, draw in enumerate(draws) if draw.params.logprobs is not None]
    # Indexed with a list, it is a copy.
    raw = logits[scored] if scored else None
    tokens, nonfinite, refused = vocabulary.choose(logits, draws, sample)
    if raw is None:
        return Choice(tokens, nonfinite, refused, None)
    chosen = torch.tensor([tokens[row] for row in scored])
    found = vocabulary.scores(raw, chosen, [draws[row].params.logprobs or 0 for row in scored]).read()
    logprobs: list[TokenLogprobs | None] = [None] * len(draws)
    for row, score in zip(scored, found, strict=True):
        logprobs[row] = score
    return Choice(tokens, nonfinite, refused, logprobs)


def draws_of(plan: StepPlan, rows: NDArray[np.int64]) -> list[Draw]:
    """How the tokens of a plan's `rows` are chosen."""
    ends, generated = (plan.starts + plan.lengths).tolist(), plan.generated.tolist()
    shapings = plan.shapings or (None,) * plan.num_rows
    return [Draw(plan.sampling[row], ends[row], generated[row], shapings[row]) for row in rows.tolist()]


def are_plain(draws: Sequence[Draw]) -> bool:
    """Whether there are rows, and each chooses its token by logits, temperature and filters alone."""
    return bool(draws) and not any(
        shaping is not None or params.logprobs is not None or generated < params.min_tokens
        for params, _, generated, shaping in draws
    )


def step_output(
    plan: StepPlan,
    rows: NDArray[np.int64],
    choice: Choice,
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = (),
) -> StepOutput:
    """The output of a step whose `rows` have these tokens."""
    return StepOutput(
        _by_row(plan, rows, choice.tokens),
        tuple([int(rows[index]) for index in choice.nonfinite]),
        tuple([(int(rows[index]), why) for index, why in choice.refused.items()]),
        None if choice.logprobs is None else _by_row(plan, rows, choice.logprobs),
        prompt_logprobs,
    )


def _by_row(plan: StepPlan, rows: NDArray[np.int64], values: Sequence[T]) -> tuple[T | None, ...]:
    """[R] the values of the plan's `rows`; None for each other row."""
    if len(values) == plan.num_rows:
        return tuple(values)
    found: list[T | None] = [None] * plan.num_rows
    for row, value in zip(rows.tolist(), values, strict=True):
        found[row] = value
    return tuple(found)


def early_stops(draws: Sequence[Draw]) -> list[tuple[int, int]]:
    """The rows that have fewer than their min_tokens, each with each token that would stop it."""
    return [
        (row, token)
        for row, draw in enumerate(draws)
        if draw.generated < draw.params.min_tokens
        for token in draw.params.stop_token_ids
    ]


def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[int]]:
    """Chooses a token for each row, in torch: the definition of `NativeSampler`, and the way without native kernels.

    Args:
        logits: float32 [R, V]; may be overwritten.
        draws: [R].

    Returns:
        Token ids [R], and the rows whose largest logit isn't finite: their token means nothing.
    """
    ban(logits, early_stops(draws))
    # A non-finite maximum marks invalid logits.
    largest, tokens = logits.max(-1)
    nonfinite = np.flatnonzero(~np.isfinite(largest.numpy())).tolist()
    drawn = [row for row, draw in enumerate(draws) if not draw.params.greedy and row not in nonfinite]
    rows_at_once = max(1, CHUNK_ELEMENTS // logits.shape[1])
    if drawn and len(drawn) == len(draws) <= rows_at_once:
        # The common case needs no copies of rows.
        return _draw(logits, largest, draws).tolist(), nonfinite
    for begin in range(0, len(drawn), rows_at_once):
        rows = drawn[begin : begin + rows_at_once]
        index = torch.tensor(rows)
        tokens[index] = _draw(logits[index], largest[index], [draws[row] for row in rows])
    return tokens.tolist(), nonfinite


def _draw(logits: Tensor, largest: Tensor, draws: Sequence[Draw]) -> Tensor:
    """int64 [R] tokens drawn for rows that are not greedy.

    Args:
        logits: [R, V], overwritten.
        largest: [R] of each row.
    """
    logits -= largest[:, None]
    logits /= torch.tensor([draw.params.temperature for draw in draws])[:, None]
    _filter(logits, [draw.params for draw in draws])
    seeds = [draw.params.seed & SEED_MASK for draw in draws]
    keys = noise_keys(seeds, [draw.position for draw in draws])
    tokens = np.arange(logits.shape[1], dtype=np.int32)
    return (logits.exp_() / exponential(keys, tokens)).argmax(-1)


def _filter(scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    """Sets to minus infinity what top_k, top_p and min_p remove from `scaled`, [R, V] with maximum 0."""
    lowest = []
    for row, param in enumerate(params):
        limit = smallest_kept(param)
        if needs_threshold(param, scaled.shape[1]):
            limit = max(limit, threshold(scaled[row].numpy(), param.top_k, param.top_p))
        lowest.append(limit)
    if max(lowest) > -math.inf:
        scaled.masked_fill_(scaled < torch.tensor(lowest)[:, None], -torch.inf)


def smallest_kept(params: SamplingParams) -> float:
    """The smallest number that min_p keeps, of numbers with maximum 0."""
    return math.log(params.min_p) if params.min_p > 0 else -math.inf


def needs_threshold(params: SamplingParams, vocab_size: int) -> bool:
    """Whether top_k or top_p may remove tokens."""
    return 0 < params.top_k < vocab_size or params.top_p < 1.0


def threshold(scaled: NDArray[np.float32], top_k: int, top_p: float) -> float:
    """The smallest value of one row [V] that top_k and then top_p keep."""
    if 0 < top_k < len(scaled):
        smallest = np.partition(scaled, -top_k)[-top_k]
        scaled = scaled[scaled >= smallest]
        if top_p >= 1.0:
            return float(smallest)
    ordered = np.sort(scaled)[::-1]
    mass = np.exp(ordered).cumsum(dtype=np.float64)
    return float(ordered[mass.searchsorted(top_p * mass[-1])])
