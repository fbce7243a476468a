"""From logits to tokens.

The drawn token is the one with the largest `p / e`, where p is the filtered distribution (see
`kernels.reference.token_probabilities`) and e is exponential noise. This is an exponential race, which token i wins
with probability p_i. The noise of a row depends on its seed and position alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampling.noise import SEED_MASK, exponential, noise_keys

FindLargest = Callable[[Tensor], tuple[Tensor, Tensor]]

CHUNK_ELEMENTS = 2**17
"""About how many logits are drawn from at once: they stay in the CPU's cache through dozens of passes."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row's token is chosen."""

    params: SamplingParams
    position: int
    """Of the token to choose, in its sequence."""
    generated: int
    """Completion tokens before it."""


def sample(logits: Tensor, draws: Sequence[Draw], find_largest: FindLargest) -> tuple[list[int], list[int]]:
    """Chooses a token for each row.

    Args:
        logits: float32 [R, V]; may be overwritten.
        draws: [R].
        find_largest: finds each row's largest logit and its token id, both [R]. A NaN counts as largest.

    Returns:
        Token ids [R], and the rows whose largest logit isn't finite: their token means nothing.
    """
    for row, draw in enumerate(draws):
        if draw.generated < draw.params.min_tokens:
            logits[row, [token for token in draw.params.stop_token_ids if token < logits.shape[1]]] = -torch.inf
    # A non-finite maximum marks invalid logits.
    largest, tokens = find_largest(logits)
    nonfinite = (~largest.isfinite()).nonzero().flatten().tolist()
    drawn = [row for row, draw in enumerate(draws) if not draw.params.greedy and row not in nonfinite]
    rows_at_once = max(1, CHUNK_ELEMENTS // logits.shape[1])
    for begin in range(0, len(drawn), rows_at_once):
        rows = drawn[begin : begin + rows_at_once]
        index = torch.tensor(rows)
        tokens[index] = _draw(logits[index], [draws[row] for row in rows])
    return tokens.tolist(), nonfinite


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """int64 [R] tokens drawn for rows that are not greedy."""
    temperatures = torch.tensor([draw.params.temperature for draw in draws])
    logits -= logits.max(-1, keepdim=True).values
    logits /= temperatures[:, None]
    _filter(logits, [draw.params for draw in draws])
    seeds = [draw.params.seed & SEED_MASK for draw in draws]
    keys = torch.from_numpy(noise_keys(seeds, [draw.position for draw in draws]))
    tokens = torch.arange(logits.shape[1], dtype=torch.int32)
    return (logits.exp_() / exponential(keys, tokens)).argmax(-1)


def _filter(scaled: Tensor, params: Sequence[SamplingParams]) -> None:
    """Sets to minus infinity what top_k, top_p and min_p remove from `scaled`, [R, V] with maximum 0."""
    lowest = []
    for row, param in enumerate(params):
        limit = math.log(param.min_p) if param.min_p > 0 else -math.inf
        if 0 < param.top_k < scaled.shape[1] or param.top_p < 1.0:
            limit = max(limit, _threshold(scaled[row].numpy(), param.top_k, param.top_p))
        lowest.append(limit)
    if max(lowest) > -math.inf:
        scaled.masked_fill_(scaled < torch.tensor(lowest)[:, None], -torch.inf)


def _threshold(scaled: NDArray[np.float32], top_k: int, top_p: float) -> float:
    """The smallest value of one row [V] that top_k and then top_p keep."""
    if 0 < top_k < len(scaled):
        smallest = np.partition(scaled, -top_k)[-top_k]
        scaled = scaled[scaled >= smallest]
        if top_p >= 1.0:
            return float(smallest)
    ordered = np.sort(scaled)[::-1]
    mass = np.exp(ordered).cumsum(dtype=np.float64)
    return float(ordered[mass.searchsorted(top_p * mass[-1])])
