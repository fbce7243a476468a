"""What a step costs, by its rows: measured at start, and followed while the engine works.

    seconds(rows, context) = factor[rows] * (table[rows] + slope * context)

`table` is measured with short sequences, and `slope` is the time that one row adds for each token of its context;
`context` is that of all rows together. `factor` follows the steps that run. Between the measured sizes, lines.
"""

import math
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.runner.base import Runner

Clock = Callable[[], float]
Floats = NDArray[np.float64]

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256, 384, 512)
CONTEXT = 256
"""Tokens before a row in the measurement of `slope`."""
REPEATS = 5
"""Steps of each size, the fastest of which counts: others may use the machine."""
MOST_SECONDS = 3.0
"""Of a measurement, unless one step of each size takes longer."""
FOLLOW = 0.05
"""Weight of one step in `factor`."""
BOUND = 2.0
"""A step that takes so many times longer than expected says more about the machine than about its rows."""


class StepCosts:
    """Costs of the decode steps of one engine."""

    def __init__(self, most_rows: int, clock: Clock) -> None:
        """Nothing is known: a step costs the same whatever it has."""
        self._clock = clock
        self._sizes = [*[size for size in SIZES if size < most_rows], most_rows]
        self._table = [1.0] * len(self._sizes)
        self._factors = [1.0] * len(self._sizes)
        self._slope = 0.0
        self._common = 1.0

    def measure(self, runner: Runner) -> None:
        """Runs steps of all sizes. Overwrites KV blocks: call it before there are sequences."""
        capacity = runner.pool.num_blocks * runner.layout.block_size
        context = max(1, min(CONTEXT, capacity - 1, runner.spec.max_context - 1))
        wide = max([size for size in self._sizes if size <= 8])
        shapes = [*[(size, 0) for size in self._sizes], (wide, context)]
        fastest = dict.fromkeys(shapes, math.inf)
        began = self._clock()
        # One of each size, then one of each size again: what else the machine does meets all of them alike.
        for _ in range(REPEATS):
            for shape in shapes:
                if self._clock() - began < MOST_SECONDS or fastest[shape] == math.inf:
                    fastest[shape] = min(fastest[shape], self._seconds(runner, *shape))
        table = np.array([fastest[size, 0] for size in self._sizes])
        # More rows never cost less. A pause only makes a step slower, so the smaller time is the right one.
        self._table = np.minimum.accumulate(table[::-1])[::-1].tolist()
        near = self._table[self._sizes.index(wide)]
        self._slope = max(0.0, fastest[wide, context] - near) / (wide * context)

    def seconds(self, rows: Floats, context: Floats) -> Floats:
        """Of steps with so many rows, and so many tokens before them; all of one shape."""
        table = np.array(self._table) * self._factors
        return np.interp(rows, self._sizes, table) + self._slope * context

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """A decode step took `seconds`."""
        at = bisect_left(self._sizes, rows)
        ratio = seconds / (self._table[at] + self._slope * context)
        # The machine may become slower or faster as a whole, which changes no decision.
        self._common *= 1 + FOLLOW * (_bounded(ratio / self._common) - 1)
        self._factors[at] += FOLLOW * (_bounded(ratio / self._common) - self._factors[at])

    def _seconds(self, runner: Runner, rows: int, context: int) -> float:
        """Of a step of `rows` rows, each behind `context` tokens."""
        blocks = runner.layout.blocks_for(context + 1)
        plan = StepPlan(
            step=0,
            handles=tuple(range(rows)),
            tokens=np.zeros(rows, np.int32),
            starts=np.full(rows, context, np.int32),
            lengths=np.ones(rows, np.int32),
            block_tables=np.tile(np.arange(blocks, dtype=np.int32), (rows, 1)),
            sample=np.ones(rows, np.bool_),
            sampling=(SamplingParams(temperature=0.0),) * rows,
            generated=np.zeros(rows, np.int32),
        )
        began = self._clock()
        runner.launch(plan).result()
        return self._clock() - began


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1 / BOUND), BOUND)
