"""Places each request where it is predicted to cost least: itself, and those that it delays.

    option       computes the prompt    generates         cost
    pair         prefill worker         decode worker     wait + prefill + exposed hand-off, and decode
    in place     decode worker          the same          wait + prefill, and decode + delay of those that decode there
    co-located   co-located worker      the same          as in place

"Decode" has the newcomer's own steps, and what it adds to each step of the others there (`costs/predict.py`). Seconds
after the first token weigh less than those before. The work of a prompt counts more than once, as requests that come
later wait for it too.

All workers are estimated by a few numbers each (`groups.py`), those that have a part of the prompt by what is left of
it. The cheapest few of each side are predicted in detail, each pair with its own link.
"""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvrelay.costs.predict import Decision, Pace, Predicted, Prefill, Way, exposed_seconds
from kvrelay.router.config import PlacementName
from kvrelay.router.placing.groups import (
    BACKLOG,
    CONTEXT,
    DELAY,
    FIRST,
    PAIR,
    STEP,
    TOKEN,
    URGENT_BACKLOG,
    URGENT_WAIT,
    WAIT,
    Group,
    stall,
)
from kvrelay.router.placing.placement import Demand, Placement, WorkerView
from kvrelay.router.placing.policies import Choice, LeastWork, PlacementPolicy, Random, RoundRobin
from kvrelay.router.placing.prefixes import Expectation, PrefixIndex

CANDIDATES = 4
"""Workers of each side that are predicted in detail."""
PREFILL_WEIGHT = 4.0
"""Weight of the seconds in which a worker computes a prompt: requests that come later wait for them too."""
QUEUE_WEIGHT = 1.0
"""Further weight of these seconds for each request that waits in the router, which waits for them too: divided by the
number of workers of that role, and multiplied by the share of these that have enough to do. So if many requests wait
for prefill workers, decode workers compute prompts as well."""
DECODE_WEIGHT = 0.1
"""Weight of the seconds after a first token, of the newcomer and of those that it delays, against those before: by its
usual targets, an interactive completion of 200 tokens may take ten times as long as its first token."""
MOST_STEPS = 256
"""Most tokens of a newcomer that count: those that decode beside it end meanwhile."""
TIE_SECONDS = 1e-7
"""Difference of costs by which equal workers take turns."""
CAUTION = 1e9
"""Seconds that stand for what comes before any cost in seconds (`PlacementPolicy._caution`)."""
TURNS = 2**20
"""Turns after which they are counted from 0 again."""
PREFILLS, DECODES, COLOCATED = range(3)
"""Indices in `Group.sides`."""

Vector = NDArray[np.float64]
Fits = Callable[[WorkerView], bool]


class _Prompt(NamedTuple):
    """A request's prompt on a worker that would compute it."""

    seconds: float
    """What it costs up to the first token."""
    row: int
    worker: WorkerView
    prefill: Prefill


class _Stream(NamedTuple):
    """A request's tokens after the first one, on a worker that would generate them."""

    seconds: float
    """What they cost."""
    row: int
    worker: WorkerView


class _Option(NamedTuple):
    """A way to serve a request."""

    seconds: float
    way: Way
    prompt: _Prompt
    decode: WorkerView | None
    """The worker that generates the tokens after the first one."""
    exposed: float = 0.0

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        first, last = self.prompt.worker, self.decode
        return (first,) if last is None or last is first else (first, last)


class _Prices:
    """What a request would cost: estimated for all workers, in detail for those that are asked for.

    Caution (`PlacementPolicy._caution`) is part of each cost, once for each worker.
    """

    def __init__(self, demand: Demand, numbers: Vector, cached: Vector, extra: Vector, weights: Vector) -> None:
        """
        Args:
            numbers: [COLUMNS, workers] `numbers_of` each.
            cached: [workers] tokens of the prompt that are there.
            extra: [workers] seconds that stand for caution, and what decides between equals.
            weights: [workers] weight of the seconds in which a worker computes the prompt.
        """
        self._prompt, self._yields = demand.prompt_tokens, demand.yields
        prompt, wait = demand.prompt_tokens, numbers[WAIT if demand.yields else URGENT_WAIT]
        self.steps = steps = min(MOST_STEPS, max(1, demand.expected_tokens - 1)) if demand.decode_tokens else 0
        self._context = context = prompt + steps / 2
        self._cached, self._extra, self._weights = cached, extra, weights
        new = prompt - cached
        prefill = numbers[TOKEN] * new + numbers[PAIR] * (0.5 * (prompt * prompt - cached * cached))
        self.prompts: Vector = wait + weights * np.maximum(prefill, numbers[FIRST]) + extra
        """[workers] of the prompt, up to its first token."""
        self.streams: Vector = (DECODE_WEIGHT * steps) * (numbers[STEP] + numbers[CONTEXT] * context) + extra
        """[workers] of the tokens after the first one."""
        self.wholes: Vector = self.prompts + self.streams + numbers[DELAY] * (DECODE_WEIGHT * new) - extra
        """[workers] of a request that one worker computes to its end."""

    def prompt(self, row: int, worker: WorkerView) -> _Prompt:
        """The prompt on a worker."""
        pace, cached = _pace(worker, self._yields), float(self._cached[row])
        prefill = pace.prefill(self._prompt - cached, cached)
        seconds = pace.wait + float(self._weights[row]) * prefill.seconds + float(self._extra[row])
        return _Prompt(seconds, row, worker, prefill)

    def stream(self, row: int, worker: WorkerView) -> _Stream:
        """The tokens after the first one on a worker."""
        return _Stream(float(self.streams[row]), row, worker)

    def alone(self, row: int, worker: WorkerView, way: Way) -> _Option:
        """The request on one worker, from beginning to end."""
        prompt, sequences = self.prompt(row, worker), _pace(worker).load.sequences
        delay = stall(prompt.prefill.delay, prompt.prefill.steps) * sequences
        seconds = prompt.seconds + float(self.streams[row] - self._extra[row]) + DECODE_WEIGHT * delay
        return _Option(seconds, way, prompt, worker)

    def pair(self, prompt: _Prompt, stream: _Stream) -> _Option:
        """The request on two workers."""
        costs = _pace(stream.worker).costs
        link = costs.link(prompt.worker.id.name)
        exposed = exposed_seconds(costs.kv, link, self._prompt, float(self._cached[stream.row]), prompt.prefill)
        return _Option(prompt.seconds + stream.seconds + exposed, "pair", prompt, stream.worker, exposed)

    def pairs(self, group: Group, prompts: list[_Prompt], streams: list[_Stream]) -> list[_Option]:
        """The pairs that may be among the two cheapest."""
        prompts.sort(key=_seconds)
        streams.sort(key=_seconds)
        found: list[_Option] = []
        best = second = math.inf
        for prompt in prompts:
            for stream in streams:
                if prompt.seconds + stream.seconds >= second:
                    break  # a hand-off takes some time as well
                if group.allows(prompt.worker, stream.worker):
                    found.append(self.pair(prompt, stream))
                    best, second, _ = sorted((best, second, found[-1].seconds))
        return found

    def predicted(self, option: _Option) -> Predicted:
        """Latencies of an option."""
        ttft = _pace(option.prompt.worker, self._yields).wait + option.prompt.prefill.seconds
        if option.decode is None:
            return Predicted(ttft, 0.0)
        return Predicted(ttft, _pace(option.decode).tpot(self._context) + option.exposed / max(1, self.steps))


def _pace(worker: WorkerView, yields: bool = True) -> Pace:
    """The worker's pace for a request that yields to others, or for one that passes those that do."""
    pace = worker.pace if yields else worker.urgent_pace
    if pace is None:
        raise ValueError(f"the costs of {worker.id} aren't known")
    return pace


class PredictedCost(LeastWork):
    """Least predicted cost; the least work as long as the costs of a worker aren't known."""

    def __init__(self, index: PrefixIndex, backlog_share: float = 0.0, ahead_tokens: float = math.inf) -> None:
        super().__init__(index, backlog_share, ahead_tokens)
        self._turns: Vector = np.zeros(0)
        """[workers] the latest turn of each, from 0 to 1."""
        self._names: NDArray[np.uint64] = np.zeros(0, np.uint64)
        """[workers] digests of their names."""

    def predict(self, demand: Demand, workers: Sequence[WorkerView]) -> Predicted | None:
        self._see(workers)
        if self._fleet.known:
            for group in self._fleet.groups(demand):
                options, prices = self._options(demand, group, room=False)
                if options:
                    return prices.predicted(options[0])
        return None

    def take(self, placement: Placement, chain: Sequence[int]) -> list[Expectation]:
        for worker in placement.each:
            if (row := self._fleet.row.get(worker)) is not None:
                self._turns[row] = (self._turn + 1) % TURNS / TURNS
        return super().take(placement, chain)

    def _see(self, workers: Sequence[WorkerView]) -> None:
        rows = self._fleet.row
        super()._see(workers)
        if self._fleet.row is not rows:
            self._turns = np.array([self._last_turn.get(worker.id, 0) % TURNS / TURNS for worker in workers])
            names = [xxh3_64_intdigest(worker.id.name.encode()) for worker in workers]
            self._names = np.array(names, np.uint64)

    def _choose(self, demand: Demand, group: Group) -> Choice | None:
        if not self._fleet.known:
            return super()._choose(demand, group)
        backlog = self._backlog(demand)
        if self._waiting and all((backlog[rows] >= self._ahead_tokens).all() for rows in group.rows):
            return None  # all of them have enough to do: the queue asks often while that is so
        options, prices = self._options(demand, group, room=True)
        if not options:
            return None
        best, second = options[0], options[1] if len(options) > 1 else None
        words = "" if second is None else f"{second.way} {' '.join([each.id.name for each in second.workers])}"
        return Choice(best.workers, Decision(best.way, prices.predicted(best), best.exposed, words))

    def _options(self, demand: Demand, group: Group, *, room: bool) -> tuple[list[_Option], _Prices]:
        """The cheapest ways to serve a request, the best first, and what they cost.

        Args:
            room: whether workers without room are left out.
        """
        cached = np.minimum(self._index.cached(demand.chain), demand.prompt_tokens - 1)
        extra = self._cautions(demand) + TIE_SECONDS * self._order_all(demand.key)
        prices = _Prices(demand, self._fleet.numbers, cached, extra, self._weights(demand, group))

        def allowed(worker: WorkerView) -> bool:
            return not (demand.on_trial and worker.suspects)

        def holds(worker: WorkerView) -> bool:
            return allowed(worker) and (not room or self._holds(demand, worker))

        def accepts(worker: WorkerView) -> bool:
            return allowed(worker) and (not room or self._accepts(demand, worker, group))

        def cheapest(costs: Vector, side: int, fits: Fits, most: int) -> list[tuple[int, WorkerView]]:
            workers, rows = group.sides[side], group.rows[side]
            found: list[tuple[int, WorkerView]] = []
            for at in costs[rows].argsort().tolist():
                if fits(workers[at]):
                    found.append((int(rows[at]), workers[at]))
                    if len(found) == most:
                        break
            return found

        in_place = cheapest(prices.wholes, DECODES, holds, CANDIDATES // 2)
        colocated = cheapest(prices.wholes, COLOCATED, holds, CANDIDATES)
        options = [prices.alone(*each, "in place") for each in in_place]
        options += [prices.alone(*each, "co-located") for each in colocated]

        def pairs(most: int) -> list[_Option]:
            decodes = cheapest(prices.streams, DECODES, accepts, most)
            # Those that have a part of the prompt get less.
            decodes += [each for each in in_place if each not in decodes and accepts(each[1])]
            prompts = cheapest(prices.prompts, PREFILLS, allowed, most) if decodes else []
            streams = [prices.stream(*each) for each in decodes]
            found = prices.pairs(group, [prices.prompt(*each) for each in prompts], streams)
            # Perhaps none of them may be paired.
            return found or (pairs(len(self._fleet.workers)) if prompts and most == CANDIDATES else [])

        if not prices.steps:
            prompts = [prices.prompt(*each) for each in cheapest(prices.prompts, PREFILLS, allowed, CANDIDATES)]
            options += [_Option(prompt.seconds, "first token", prompt, None) for prompt in prompts]
        elif group.prefills and group.decodes:
            options += pairs(CANDIDATES)
        options.sort(key=_seconds)
        return options, prices

    def _weights(self, demand: Demand, group: Group) -> Vector:
        """[workers] weight of the seconds in which each computes a prompt."""
        weights, backlog = np.full(len(self._fleet.workers), PREFILL_WEIGHT), self._backlog(demand)
        if not self._waiting:
            return weights
        for rows in group.rows:
            if len(rows):
                busy = float((backlog[rows] >= self._ahead_tokens).mean())
                weights[rows] += QUEUE_WEIGHT * self._waiting * busy / len(rows)
        return weights

    def _backlog(self, demand: Demand) -> Vector:
        """[workers] tokens that each has to compute before those of a request."""
        found: Vector = self._fleet.numbers[BACKLOG if demand.yields else URGENT_BACKLOG]
        return found

    def _cautions(self, demand: Demand) -> Vector:
        """[workers] seconds that stand for what comes before any cost."""
        workers = self._fleet.workers
        if not (demand.avoid or demand.on_trial or demand.degrees or self._fleet.suspects):
            return np.zeros(len(workers))
        first, second, third = 9 * CAUTION, 3 * CAUTION, CAUTION
        found = [self._caution(demand, worker) for worker in workers]
        return np.array([first * avoid + second * company + third * degree for avoid, company, degree in found])

    def _order_all(self, key: int) -> Vector:
        """[workers] from 0 to 1; the smallest goes first of equals, by the key as in rendezvous hashing, or by turn."""
        if not key:
            return self._turns
        mixed = (self._names ^ np.uint64(key % 2**64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


_seconds = attrgetter("seconds")


_POLICIES: dict[PlacementName, type[PlacementPolicy]] = {
    "predicted": PredictedCost,
    "least_work": LeastWork,
    "round_robin": RoundRobin,
    "random": Random,
}


def policy_of(name: PlacementName, index: PrefixIndex, backlog_share: float, ahead_tokens: float) -> PlacementPolicy:
    """The policy of this name (`router.placement`); the other arguments as of `PlacementPolicy`."""
    return _POLICIES[name](index, backlog_share, ahead_tokens)
