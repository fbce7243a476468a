"""Steps of engines in one process, timed in turns: other work on the machine then disturbs all of them alike."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from turns import spread

from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import SamplingParams

CONTEXT = 128
"""Tokens of context before a decode step."""
GREEDY = SamplingParams(temperature=0.0)


class Cell(NamedTuple):
    """A kind of steps: `prefill_TOKENS`, `decode_ROWS`, or `decode_ROWS_CONTEXT`."""

    name: str
    rows: int
    length: int
    """Tokens of each row."""
    start: int
    """Tokens of context before each row."""

    @classmethod
    def of(cls, name: str) -> "Cell":
        """The cell of this name."""
        kind, count, *context = name.split("_")
        if kind == "prefill":
            return cls(name, 1, int(count), 0)
        return cls(name, int(count), 1, int(context[0]) if context else CONTEXT)


def plan_of(runner: Any, tokens: NDArray[np.int32], rows: int, start: int) -> StepPlan:
    """A step of rows of equal length with the same context, for a runner with layers of any kind."""
    layout, length = runner.cache_layout, len(tokens) // rows
    blocks = -(-(start + length) // layout.block_size)
    table = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    slots = np.arange(rows, dtype=np.int32)[:, None]
    tables = [slots if group.kind == "state" else table for group in layout.groups]
    return StepPlan(
        step=0,
        handles=tuple(range(rows)),
        tokens=tokens,
        starts=np.full(rows, start, np.int32),
        lengths=np.full(rows, length, np.int32),
        block_tables=tables[0],
        sample=np.ones(rows, np.bool_),
        sampling=(GREEDY,) * rows,
        generated=np.zeros(rows, np.int32),
        side_tables=tuple(tables[1:]),
    )


def in_turns(
    runners: Mapping[str, Any],
    cells: Iterable[Cell],
    repeats: int,
    tries: Callable[[Cell], int],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, list[float]]]:
    """Tokens a second of each turn, by cell and runner.

    Args:
        tries: number of steps of a runner before the next one's turn. The fastest one counts, since other processes can
            only make a step longer.
        clock: gives seconds.
    """
    vocabulary = min(runner.spec.vocab_size for runner in runners.values())
    found: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        tokens = np.random.default_rng(0).integers(2, vocabulary, cell.rows * cell.length).astype(np.int32)
        plans = {name: plan_of(runner, tokens, cell.rows, cell.start) for name, runner in runners.items()}
        rates = found[cell.name] = {name: list[float]() for name in runners}
        for turn in range(repeats + 1):
            for name, runner in runners.items():
                seconds = []
                for _ in range(tries(cell)):
                    start = clock()
                    runner.launch(plans[name]).result()
                    seconds.append(clock() - start)
                if turn:  # the first one warms caches and buffers
                    rates[name].append(cell.rows * cell.length / min(seconds))
    return found


def ratios(rates: Mapping[str, list[float]], one: str, other: str) -> dict[str, float]:
    """The ratio of one runner's rates to another's, turn by turn."""
    return spread([value / base for value, base in zip(rates[one], rates[other], strict=True)])
