"""What a step costs, by its rows: measured at start, and followed while the engine works.

    seconds = speed * (factor[rows] * table[rows] + slope * context + choosing) [* drafted]

`table` is measured with short greedy sequences. `slope` is the time that one row adds for each token of its context;
`context` is that of all rows together, where that of a draft counts `shared` times, since it is read with that of the
rows before it. `choosing` is what tokens cost that are not just the most likely ones: a first row of a kind costs
`firsts[kind]`, and each row `prices[kind]`. `factor` follows the steps that run; `speed`, that of the whole machine,
those without drafts; `drafted` those with some, which find less in the caches. Between the measured sizes, lines.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.runner.base import Runner

Clock = Callable[[], float]

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256, 384, 512)
CONTEXT = 256
"""Tokens before a row in the measurement of `slope`."""
WIDE = 8
"""Rows of the measurements of `slope` and of `prices`."""
REPEATS = 5
"""Steps of each shape. The fastest but one counts: others use the machine, and a clock of CPU time may miss a step."""
MOST_SECONDS = 3.0
"""Of a measurement, unless one step of each shape takes longer."""
FOLLOW = 0.05
"""Weight of one step in the factor of its size."""
FOLLOW_KIND = {True: 0.2, False: 0.05}
"""Weight of one step in `speed` or `drafted`, by whether it was faster: what disturbs a step only makes it slower."""
FOLLOW_SHAPED = 0.1
"""Weight of one step in the price of shaped rows, once there were a few."""
REFRESH = 16
"""Steps after which `factor` is applied to what `seconds` reads."""
BOUND = 2.0
"""A step that takes so many times longer than expected says more about the machine than about its rows."""


class Choosing(enum.IntEnum):
    """How a row's token is chosen."""

    GREEDY = 0
    DRAWN = 1
    FILTERED = 2
    """Drawn behind top_k, top_p or min_p."""
    SHAPED = 3
    """Logits change before: penalties, biases, bad words, constraints."""

    @classmethod
    def of(cls, params: SamplingParams) -> "Choosing":
        if params.shaped:
            return cls.SHAPED
        if params.greedy:
            return cls.GREEDY
        return cls.FILTERED if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 else cls.DRAWN


def choosing_of(sampling: Sequence[SamplingParams]) -> list[Choosing]:
    """Of each row; those of one sequence have the same parameters."""
    kinds: list[Choosing] = []
    for row, params in enumerate(sampling):
        kinds.append(kinds[-1] if row and params is sampling[row - 1] else Choosing.of(params))
    return kinds


MEASURED = {
    Choosing.GREEDY: SamplingParams(temperature=0.0),
    Choosing.DRAWN: SamplingParams(temperature=1.0),
    Choosing.FILTERED: SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
}


class Shape(NamedTuple):
    """A step's."""

    rows: int
    context: int = 0
    """Tokens before each row."""
    chain: bool = False
    """Whether the rows are of one sequence, one behind the other."""
    choosing: Choosing = Choosing.GREEDY


class StepCosts:
    """Costs of the decode steps of one engine."""

    def __init__(self, most_rows: int, clock: Clock) -> None:
        """Nothing is known: a step costs the same whatever it has."""
        self._clock = clock
        self._sizes = [*[size for size in SIZES if size < most_rows], most_rows]
        self._factors = [1.0] * len(self._sizes)
        self._place = np.searchsorted(self._sizes, np.arange(most_rows + 1)).tolist()
        """By rows: index of the smallest size that isn't smaller."""
        self._table = self._followed = [1.0] * (most_rows + 1)
        """By rows, as measured and with the factors."""
        self._slope = 0.0
        self.shared = 1.0
        """How much of the time of its context a draft takes."""
        self._firsts = [0.0] * len(Choosing)
        self._prices = [0.0] * len(Choosing)
        self._speed = self._drafted = 1.0
        self._steps = self._shaped_steps = 0

    def measure(self, runner: Runner, keep: tuple[int, ...] = ()) -> None:
        """Runs steps of all shapes. Overwrites KV blocks: call it before there are sequences.

        Args:
            keep: as `StepPlan.keep`.
        """
        capacity = runner.pool.num_blocks * runner.layout.block_size
        context = max(1, min(CONTEXT, capacity - 1, runner.spec.max_context - 1))
        wide = max([size for size in self._sizes if size <= WIDE])
        greedy = [Shape(size) for size in self._sizes]
        chosen = [Shape(rows, choosing=kind) for kind in MEASURED if kind for rows in {1, wide}]
        long = Shape(wide, context), Shape(wide, context, chain=True)
        shapes = [*greedy, *long, *chosen]
        taken: dict[Shape, list[float]] = {shape: [] for shape in shapes}
        began = self._clock()
        # One of each shape, then one of each again: what else the machine does meets all of them alike.
        for _ in range(REPEATS):
            for shape in shapes:
                if self._clock() - began < MOST_SECONDS or not taken[shape]:
                    taken[shape].append(self._seconds(runner, shape, keep))
        fastest = {shape: sorted(seconds)[:2][-1] for shape, seconds in taken.items()}
        # More rows never cost less. A pause only makes a step slower, so the smaller time is the right one.
        sizes = np.minimum.accumulate(np.array([fastest[shape] for shape in greedy])[::-1])[::-1]
        self._table = self._by_rows(sizes)
        self._followed = self._table
        own, shared = (max(0.0, fastest[shape] - self._table[wide]) / (wide * context) for shape in long)
        self._slope = own
        # In a chain, the first row's own share is one of `wide`.
        self.shared = min(1.0, max(0.0, wide * shared / own - 1) / (wide - 1)) if own and wide > 1 else 1.0
        for kind in MEASURED:
            first, all_rows = (fastest[Shape(rows, choosing=kind)] - self._table[rows] for rows in (1, wide))
            self._prices[kind] = max(0.0, all_rows - max(0.0, first)) / max(1, wide - 1)
            self._firsts[kind] = max(0.0, first - self._prices[kind])
        # Until there were some: what they cost depends on their requests.
        self._prices[Choosing.SHAPED] = self._prices[Choosing.FILTERED]
        self._firsts[Choosing.SHAPED] = self._firsts[Choosing.FILTERED]

    def first(self, kinds: Iterable[Choosing]) -> float:
        """What choosing tokens of these kinds costs a step, whatever its rows; for `seconds`."""
        return max([self._firsts[kind] for kind in kinds], default=0.0)

    def price(self, kind: Choosing) -> float:
        """What choosing the token of one such row costs beside that; for `seconds`."""
        return self._prices[kind]

    def seconds(self, rows: int, context: float, choosing: float, *, drafted: bool) -> float:
        """Of a step with so many rows, and so many tokens before them together, those before drafts `shared` times."""
        return self._scale(drafted) * (self._followed[rows] + self._slope * context + choosing)

    def step(self, rows: int, context: float, kinds: Sequence[Choosing], *, drafted: bool) -> float:
        """Seconds of a step whose rows' tokens are chosen so; arguments as for `observe`."""
        return self.seconds(rows, context, self._choosing(kinds), drafted=drafted)

    def observe(self, rows: int, context: float, kinds: Sequence[Choosing], seconds: float, *, drafted: bool) -> None:
        """A decode step took `seconds`.

        Args:
            kinds: [R] of its rows.
            drafted: whether some of the rows are drafts.
        """
        choosing = self._choosing(kinds)
        expected = self._table[rows] + self._slope * context + choosing
        if shaped := kinds.count(Choosing.SHAPED):
            # What is not explained is theirs.
            seconds = min(seconds / self._scale(drafted), BOUND * expected)
            rest = seconds - self._followed[rows] - self._slope * context - choosing
            self._shaped_steps += 1
            weight = max(FOLLOW_SHAPED, 1 / self._shaped_steps)
            self._prices[Choosing.SHAPED] = max(0.0, self._prices[Choosing.SHAPED] + weight * rest / shaped)
            return
        at, ratio = self._place[rows], seconds / expected
        # The machine may become slower or faster as a whole, which changes no decision. Only steps without drafts tell:
        # otherwise what those with drafts cost would seem to be the machine's, if there are no others.
        ratio_now = _bounded(ratio / self._scale(drafted))
        change = 1 + FOLLOW_KIND[ratio_now < 1] * (ratio_now - 1)
        if drafted:
            self._drafted *= change
        else:
            self._speed *= change
        self._factors[at] += FOLLOW * (_bounded(ratio / self._scale(drafted)) - self._factors[at])
        self._steps += 1
        if self._steps % REFRESH == 0:
            factors = self._by_rows(np.array(self._factors))
            self._followed = [factor * known for factor, known in zip(factors, self._table, strict=True)]

    def _scale(self, drafted: bool) -> float:
        return self._speed * self._drafted if drafted else self._speed

    def _choosing(self, kinds: Sequence[Choosing]) -> float:
        return self.first(set(kinds)) + sum([self._prices[kind] for kind in kinds])

    def _by_rows(self, values: NDArray[np.float64]) -> list[float]:
        """Of values at the measured sizes, those of 0, 1, 2 ... rows."""
        found: list[float] = np.interp(np.arange(self._sizes[-1] + 1), self._sizes, values).tolist()
        return found

    def _seconds(self, runner: Runner, shape: Shape, keep: tuple[int, ...]) -> float:
        rows, context, chain, choosing = shape
        starts = np.maximum(0, context - np.arange(rows)[::-1] * chain)
        blocks = runner.layout.blocks_for(context + 1)
        plan = StepPlan(
            step=0,
            handles=tuple(range(rows)),
            tokens=np.zeros(rows, np.int32),
            starts=starts.astype(np.int32),
            lengths=np.ones(rows, np.int32),
            block_tables=np.tile(np.arange(blocks, dtype=np.int32), (rows, 1)),
            sample=np.ones(rows, np.bool_),
            sampling=(MEASURED[choosing],) * rows,
            generated=np.zeros(rows, np.int32),
            keep=keep,
        )
        # The second of two is as one among others of its kind: what it needs is in the caches.
        runner.launch(plan).result()
        began = self._clock()
        runner.launch(plan).result()
        return self._clock() - began


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1 / BOUND), BOUND)
