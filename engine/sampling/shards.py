"""Chooses tokens from logits that several ranks have, each those of a part of the vocabulary.

All ranks of the stage call the same functions with the same rows and get the same tokens, because they decide by
numbers that all of them have gathered:

    1  the largest logit of each row. It is the token of a greedy row
    2  for rows with top_k or top_p: each rank's largest CANDIDATES, and the mass of all its tokens. They give the
       smallest logit that the filters keep. Where they don't reach that far down, the row's logits are gathered
    3  the winner of each rank's exponential race, and its p / e. The noise of a token depends on seed, position and
       token alone, so the largest of them has won the race over the whole vocabulary

The numbers are those that `sampler.sample` computes of all logits, but that the mass is added up by ranks.

Rank 0 alone knows what shapes a row: bias, penalties, bad words, constraints. It gathers such a row's logits, chooses
the token as one process does, and tells it to the others.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.ranks.collective import Place
from kvrelay.engine.ranks.spans import even_span
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampling.logprobs import ReadScores
from kvrelay.engine.sampling.noise import SEED_MASK, exponential, noise_keys
from kvrelay.engine.sampling.processors import ban
from kvrelay.engine.sampling.sampler import (
    ALL_TOKENS,
    CHUNK_ELEMENTS,
    Draw,
    Sample,
    early_stops,
    needs_threshold,
    smallest_kept,
    threshold,
)

CANDIDATES = 256
"""Number of its largest logits that a rank shows of a row with top_k or top_p."""
CHOSEN_ELSEWHERE = "rank 0 has no token for the row, and knows why"


class Shard:
    """Implements `sampler.Vocabulary`, and `sampler.Sample`, for one rank."""

    def __init__(self, place: Place, vocab_size: int, whole: Sample) -> None:
        """
        Args:
            vocab_size: of all ranks together.
            whole: chooses tokens by the logits of all ranks.
        """
        self._group = place.group
        self._vocab_size = vocab_size
        self._whole = whole
        self._span = even_span(vocab_size, place)
        ranks = [Place(place.degree, rank) for rank in range(place.degree.tensor)]
        self._counts = [even_span(vocab_size, rank).count for rank in ranks]
        """Number of each rank's tokens."""
        self._first = self._span.begin

    def choose(
        self, logits: Tensor, draws: Sequence[Draw], sample: Sample
    ) -> tuple[list[int], list[int], dict[int, str]]:
        """See `Vocabulary.choose`. Ranks other than 0 don't know why rank 0 refuses a row."""
        shaped = [row for row, draw in enumerate(draws) if draw.shaping is not None]
        if not shaped:
            return *sample(logits, draws), {}
        whole = self._gathered(logits[shaped])
        refused: dict[int, str] = {}
        # The token of each row, whether its logits aren't finite, and whether it has no token.
        numbers = torch.zeros(len(shaped), 3, dtype=torch.float64)
        if self._group.place == 0:
            chosen, bad, why = ALL_TOKENS.choose(whole, [draws[row] for row in shaped], self._whole)
            refused = {shaped[index]: text for index, text in why.items()}
            numbers[:, 0] = torch.tensor(chosen)
            numbers[bad, 1] = 1.0
            numbers[list(why), 2] = 1.0
        found = self._group.gather(numbers)[0].long().tolist()
        tokens, nonfinite = [0] * len(draws), list[int]()
        plain = [row for row, draw in enumerate(draws) if draw.shaping is None]
        if plain:
            own, bad = sample(logits[plain], [draws[row] for row in plain])
            nonfinite = [plain[index] for index in bad]
            for row, token in zip(plain, own, strict=True):
                tokens[row] = token
        for row, (token, is_bad, is_refused) in zip(shaped, found, strict=True):
            tokens[row] = token
            if is_bad:
                nonfinite.append(row)
            if is_refused:
                refused.setdefault(row, CHOSEN_ELSEWHERE)
        return tokens, sorted(nonfinite), refused

    def _gathered(self, logits: Tensor) -> Tensor:
        """[R, V] all ranks' logits of rows [R, tokens of this rank]."""
        missing = self._span.size - logits.shape[1]
        parts = self._group.gather(torch.nn.functional.pad(logits, (0, missing)))
        return torch.cat([part[:, :count] for part, count in zip(parts, self._counts, strict=True)], -1)

    def __call__(self, logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[int]]:
        """See `sampler.sample`; `logits` are those of the rank's tokens."""
        ban(logits, early_stops(draws), self._first)
        largest, tokens = self._winners(*logits.max(-1))
        nonfinite = np.flatnonzero(~np.isfinite(largest.numpy())).tolist()
        drawn = [row for row, draw in enumerate(draws) if not draw.params.greedy and row not in nonfinite]
        rows_at_once = max(1, CHUNK_ELEMENTS // self._span.size)
        for begin in range(0, len(drawn), rows_at_once):
            rows = drawn[begin : begin + rows_at_once]
            index = torch.tensor(rows)
            tokens[index] = self._draw(logits[index], largest[index], [draws[row] for row in rows])
        return tokens.tolist(), nonfinite

    def _winners(self, values: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of all ranks' float32 values [R], and its token; the first one among equals.

        Args:
            places: int64 [R] of the ranks' tokens, among their own.
        """
        # float64 has all numbers of both types, up to 2**53.
        found = self._group.gather(torch.stack((values.double(), (places + self._first).double())))
        largest, rank = found[:, 0].max(0)
        # torch doesn't say which of equal values it takes.
        rank = torch.where(largest.isnan(), rank, (found[:, 0] == largest).int().argmax(0))
        return largest.float(), found[:, 1].gather(0, rank[None])[0].long()

    def _draw(self, logits: Tensor, largest: Tensor, draws: Sequence[Draw]) -> Tensor:
        """As `sampler._draw`."""
        params = [draw.params for draw in draws]
        scaled = logits.sub_(largest[:, None]).div_(torch.tensor([param.temperature for param in params])[:, None])
        lowest = torch.tensor(self._lowest(scaled, params))[:, None]
        scaled.masked_fill_(scaled < lowest, -torch.inf)
        keys = noise_keys([param.seed & SEED_MASK for param in params], [draw.position for draw in draws])
        tokens = np.arange(self._span.begin, self._span.end, dtype=np.int32)
        _, found = self._winners(*(scaled.exp_() / exponential(keys, tokens)).max(-1))
        return found

    def _lowest(self, scaled: Tensor, params: Sequence[SamplingParams]) -> list[float]:
        """[R] the smallest of all ranks' numbers that the filters keep."""
        lowest = [smallest_kept(param) for param in params]
        rows = [row for row, param in enumerate(params) if needs_threshold(param, self._vocab_size)]
        if not rows:
            return lowest
        own = scaled[rows]
        shown = own.topk(min(CANDIDATES, own.shape[1]), -1).values
        padded = torch.nn.functional.pad(shown, (0, CANDIDATES - shown.shape[1]), value=-torch.inf)
        mass = torch.from_numpy(np.exp(own.numpy()).sum(-1, keepdims=True, dtype=np.float64))
        hides = torch.full_like(mass, float(own.shape[1] > CANDIDATES))
        found = self._group.gather(torch.cat((padded.double(), mass, hides), -1)).numpy()
        hidden = []
        for index, row in enumerate(rows):
            each = found[:, index]
            # All numbers above this bound are known.
            bound = max((ranks[CANDIDATES - 1] for ranks in each if ranks[-1]), default=-np.inf)
            known = np.sort(each[:, :CANDIDATES].ravel().astype(np.float32))[::-1]
            limit = _threshold_of(known, each[:, CANDIDATES].sum(), bound, params[row], self._vocab_size)
            if limit is None:
                hidden.append(row)
            else:
                lowest[row] = max(lowest[row], limit)
        if hidden:
            missing = self._span.size - scaled.shape[1]
            gathered = self._group.gather(torch.nn.functional.pad(scaled[hidden], (0, missing), value=-torch.inf))
            for index, row in enumerate(hidden):
                everything = gathered[:, index].flatten()
                limit = threshold(everything.numpy(), params[row].top_k, params[row].top_p)
                lowest[row] = max(lowest[row], limit)
        return lowest

    def scores(self, logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> ReadScores:
        """See `Vocabulary.scores`."""
        own = tokens.clamp(min=0) - self._first
        others = (own < 0) | (own >= logits.shape[1])
        chosen = logits.gather(-1, own.masked_fill(others, 0)[:, None])[:, 0].masked_fill(others, -torch.inf)
        found = self._group.gather(torch.stack((logits.logsumexp(-1), chosen)))
        total, own_value = found[:, 0].logsumexp(0), found[:, 1].amax(0)
        logits -= total[:, None]
        own_value = own_value - total
        above = (logits > own_value[:, None]).sum(-1)
        most = min(max(tops), self._vocab_size)
        values, places = logits.topk(min(most, logits.shape[1]), -1)
        missing = most - values.shape[1]
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        ids = torch.nn.functional.pad(places + self._first, (0, missing))
        parts = self._group.gather(torch.cat((above[:, None].double(), values.double(), ids.double()), -1))
        ranks = parts[..., 0].sum(0).long() + 1
        values, ids = (part.transpose(0, 1).flatten(1) for part in (parts[..., 1 : 1 + most], parts[..., 1 + most :]))
        values, order = values.float().sort(stable=True, dim=-1, descending=True)
        ids = ids.gather(-1, order).long()
        return ReadScores(own_value, ranks, values, ids, tops)


def _threshold_of(
    known: NDArray[np.float32], mass: float, bound: float, params: SamplingParams, vocab_size: int
) -> float | None:
    """`sampler.threshold` by the largest numbers of a row; None if these don't tell.

    Args:
        known: numbers of the row, descending: all above `bound`, and perhaps some that equal it.
        mass: sum of the exponentials of all its numbers.
    """
    if 0 < params.top_k < vocab_size:
        smallest = float(known[params.top_k - 1]) if params.top_k <= len(known) else -np.inf
        if params.top_p >= 1.0:
            return smallest if smallest >= bound else None
        if smallest <= bound:
            return None
        known = known[known >= smallest]
        mass = float(np.exp(known).sum(dtype=np.float64))
    place = int(np.exp(known).cumsum(dtype=np.float64).searchsorted(params.top_p * mass))
    return float(known[place]) if place < len(known) and known[place] >= bound else None
