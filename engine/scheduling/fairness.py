"""Shares of the holders of requests in the time of steps.

A step takes as long for a holder of one sequence as for one of hundreds that are in it. So where sequences of k holders
run, a step has no more tokens than may cost k times the smallest holder's own:

    seconds(tokens) <= k * seconds(smallest)          seconds(tokens) = fixed + each * tokens

Each holder gets as many tokens as it can use, up to the same share for all who can use more (max-min). A holder whose
sequences are the only ones that run, or come soon, has no limit. The two costs are fitted to the steps that the engine
has run; where weights bound a step, as on GPUs, `each` is so small beside `fixed` that nobody is limited.
"""

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeVar

from kvrelay.engine.sequence import Sequence

K = TypeVar("K", bound=Hashable)

KEPT = 9
"""Number of recent steps of one size that are kept; their median counts, so a pause of the process changes nothing."""
FEWEST = 3
"""Number of steps of one size before it counts: the first ones of a kind take longer."""
FORGOTTEN = 4096
"""Number of steps after which a size that no step has had is forgotten, unless only two are known."""
GROWTH = 2
"""Factor by which a limited step may have more tokens than the largest one that was measured."""


class _Size:
    """Recent steps that have about as many tokens: between one power of two and the next."""

    def __init__(self) -> None:
        self.tokens: deque[int] = deque(maxlen=KEPT)
        self.seconds: deque[float] = deque(maxlen=KEPT)
        self.latest = 0
        """Number of the latest one, among all steps."""


class Line(NamedTuple):
    """Cost of a step: `fixed + each * tokens` seconds."""

    fixed: float
    each: float
    largest: float
    """Tokens of the largest steps that the line was fitted to."""


class StepTimes:
    """Costs of one engine's steps, as far as they were observed."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._steps = 0
        self._line: Line | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        """Notes that a step of so many tokens took `seconds`."""
        self._steps += 1
        size = self._sizes.setdefault(tokens.bit_length(), _Size())
        size.tokens.append(tokens)
        size.seconds.append(seconds)
        size.latest = self._steps
        self._line = None

    def most_tokens(self, smallest: int, holders: int, most: int) -> int:
        """Tokens of a step that costs `holders` times one of `smallest` tokens; no more than `most`.

        Until steps were observed, the answer is `most`. A step is never much larger than those that were: what the line
        says of it is a guess.
        """
        line = self.line()
        if line is None:
            return most
        fair = holders * smallest
        if line.each * (most - fair) <= (holders - 1) * line.fixed:
            tokens = most
        else:
            tokens = fair + int((holders - 1) * line.fixed / line.each)
        return min(most, max(fair, min(tokens, int(GROWTH * line.largest))))

    def line(self) -> Line | None:
        """The line with the least squares of relative errors; None before FEWEST steps of a size."""
        if self._line is None:
            self._line = self._fitted()
        return self._line

    def _fitted(self) -> Line | None:
        known = sorted(
            (size for size in self._sizes.values() if len(size.tokens) >= FEWEST), key=lambda size: -size.latest
        )
        points = [
            (median(size.tokens), median(size.seconds))
            for place, size in enumerate(known)
            if place < 2 or self._steps - size.latest <= FORGOTTEN
        ]
        if not points:
            return None
        weights = [1 / max(seconds, 1e-9) ** 2 for _, seconds in points]
        tokens_mean, seconds_mean = (
            sum([weight * point[part] for weight, point in zip(weights, points, strict=True)]) / sum(weights)
            for part in (0, 1)
        )
        weighted = list(zip(weights, points, strict=True))
        squares = sum([weight * (tokens - tokens_mean) ** 2 for weight, (tokens, _) in weighted])
        products = sum(
            [weight * (tokens - tokens_mean) * (seconds - seconds_mean) for weight, (tokens, seconds) in weighted]
        )
        # Steps never cost less for having more tokens, and no tokens never cost less than nothing.
        each = min(max(0.0, products / squares), seconds_mean / tokens_mean) if squares else 0.0
        return Line(seconds_mean - each * tokens_mean, each, max(tokens for tokens, _ in points))


class Most(NamedTuple):
    """Limits of a step."""

    tokens: int
    rows: int
    spare: int
    """Number of sequences that may run beyond these rows: those of holders of few, which need not wait for others to
    end."""


@dataclass(slots=True)
class StepShares:
    """Tokens that a step has for each holder; what the scheduler hands out is taken away."""

    total: int
    """Tokens of the whole step."""
    decodes: Counter[int]
    """Tokens of each holder's sequences that decode."""
    chunks: Counter[int]
    """Tokens of each holder's prompts."""


def shares_of_step(
    times: StepTimes,
    running: Iterable[Sequence],
    decodes: Iterable[Sequence],
    coming: Collection[int],
    most: Most,
    step: int,
) -> StepShares | None:
    """The shares of the holders whose sequences run, or are to come soon; None if there is only one.

    A holder whose sequences can't take part in this step, since they or their masks aren't there yet, counts as one
    with a single token: a long step would keep it waiting.

    Args:
        decodes: those of `running` that can compute the one token that they lack.
        coming: holders whose sequences come soon.
        most: of the step.
        step: its number.
    """
    chunks: Counter[int] = Counter(dict.fromkeys(coming, 0))
    prompts = 0
    for sequence in running:
        lack = sequence.expected - sequence.reach
        chunks[sequence.holder] += lack if lack > 1 else 0
        prompts += lack > 1
    if len(chunks) < 2:
        return None
    rows = Counter([sequence.holder for sequence in decodes])
    rows = Counter(max_min(rows, most.rows - min(prompts, most.spare)))
    wanted = {holder: max(1, rows[holder] + lack) for holder, lack in chunks.items()}
    total = times.most_tokens(min(wanted.values()), len(wanted), most.tokens)
    for holder, share in max_min(wanted, total).items():
        # If it has too little for all, prompts have half, and neither side waits for ever where that is one token.
        half = (share + step % 2) // 2
        chunks[holder] = min(chunks[holder], max(share - rows[holder], half))
        rows[holder] = share - chunks[holder]
    return StepShares(total, rows, chunks)


def max_min(wanted: Mapping[K, int], total: int) -> dict[K, int]:
    """Shares of `total`: each gets what it wants, up to a share that is the same for all who want more."""
    shares: dict[K, int] = {}
    for place, key in enumerate(sorted(wanted, key=wanted.__getitem__)):
        shares[key] = min(wanted[key], total // (len(wanted) - place))
        total -= shares[key]
    return shares
