"""How many guesses of each sequence to check in a step: as many as pay.

A step of n sequences costs c(n) seconds and yields n tokens. With m more rows for guesses it costs c(n + m), and the
i-th guess of a sequence is kept with probability a**i, if each is kept with probability a behind kept ones. So a step
with these guesses yields n + sum a**i tokens. The guesses with the largest a**i are taken, as many as make tokens per
second the most; none, unless that is MARGIN more than without.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvrelay.engine.speculate.costs import Choosing, StepCosts

MARGIN = 1.03
"""By how much guesses must be expected to raise tokens per second."""
LEAST = 0.02
"""A guess that is less likely than this is not looked at."""


class Candidate(NamedTuple):
    """A sequence that computes its last token, and its guesses."""

    share: float
    """The probability that one is kept, behind kept ones."""
    guesses: int
    """How many it has, perhaps none."""
    context: int
    """Tokens of the sequence."""
    choosing: Choosing
    """How its tokens are chosen."""


class Guessing(NamedTuple):
    """What guesses take before a step, in seconds."""

    start: float
    """However long they are."""
    each: float
    """Each pass: one more guess for all sequences."""

    def seconds(self, passes: int) -> float:
        """Of guesses that are so long at most."""
        return self.start + passes * self.each if passes else 0.0


FREE = Guessing(0.0, 0.0)
"""Of guesses that are there already."""


def counts(candidates: Sequence[Candidate], costs: StepCosts, room: int, guessing: Guessing) -> list[int]:
    """[n] how many guesses of each candidate pay.

    Args:
        room: guesses in all.
        guessing: what it takes to have them.
    """
    # Level by level, so that of equal gains a guess comes after those that it follows.
    ranked = []
    for place, candidate in enumerate(candidates):
        gain = 1.0
        for level in range(1, candidate.guesses + 1):
            gain *= candidate.share
            if gain < LEAST:
                break
            ranked.append((-gain, level, place))
    ranked.sort()
    rows, tokens = len(candidates), float(len(candidates))
    context = float(sum([candidate.context for candidate in candidates]))
    choosing = costs.first({candidate.choosing for candidate in candidates})
    choosing += sum([costs.price(candidate.choosing) for candidate in candidates])
    best = MARGIN * tokens / costs.seconds(rows, context, choosing, drafted=False)
    taken = deepest = 0
    for number, (loss, level, place) in enumerate(ranked[: max(0, room)], 1):
        tokens -= loss
        context += costs.shared * candidates[place].context
        choosing += costs.price(candidates[place].choosing)
        deepest = max(deepest, level)
        seconds = costs.seconds(rows + number, context, choosing, drafted=True)
        rate = tokens / (seconds + guessing.seconds(deepest))
        if rate > best:
            best, taken = rate, number
    found = [0] * rows
    for _, _, place in ranked[:taken]:
        found[place] += 1
    return found
