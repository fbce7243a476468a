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
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvrelay.costs.predict import Decision, Pace, Predicted, Prefill, Way, exposed_seconds
from kvrelay.router.config import PlacementName
from kvrelay.router.placing.groups import (
    BACKLOG,
    COLOCATED,
    CONTEXT,
    DECODES,
    DELAY_FLOOR,
    FLOOR,
    PAIR,
    PREFILLS,
    ROOM,
    SIDES,
    URGENT_BACKLOG,
    URGENT_WAIT,
    WAIT,
    Fleet,
    Group,
    Rows,
    stall,
)
from kvrelay.router.placing.placement import Demand, Placement, WorkerView
from kvrelay.router.placing.policies import Choice, LeastWork, PlacementPolicy, Random, RoundRobin
from kvrelay.router.placing.prefixes import FEW, Cached, Expectation, PrefixIndex

CANDIDATES = 3
"""Workers of each side that are predicted in detail."""
PREFILL_WEIGHT = 4.0
"""Weight of the seconds in which a worker computes a prompt: requests that come later wait for them too."""
QUEUE_WEIGHT = 1.0
"""Further weight of these seconds for each request that waits in the router, which waits for them too: divided by the
number of workers of that role, and multiplied by the share of these that have enough to do, or no room for the request.
So if many requests wait for prefill workers, decode workers compute prompts as well; and if many wait for room on
decode workers, fewer prompts there delay the sequences that will make room."""
DECODE_WEIGHT = 0.1
"""Weight of the seconds after a first token, of the newcomer and of those that it delays, against those before: by its
usual targets, an interactive completion of 200 tokens may take ten times as long as its first token."""
MOST_STEPS = 256
"""Most tokens of a newcomer that count: those that decode beside it end meanwhile."""
TIE_SECONDS = 1e-7
"""Difference of costs by which equal workers take turns."""
CAUTION = 1e9
"""Seconds that stand for what comes before any cost in seconds (`PlacementPolicy._caution`)."""
ORDERS, ORDERS_AT_ONCE = 1024, 16
"""Different orders of equal workers, and how many are made at once."""
TURNS = 2**20
"""Turns after which they are counted from 0 again."""
ALL_SIDES = range(len(SIDES))
FACTORS_SHAPE = 1 + len(SIDES), CONTEXT + 1
FACTORS = Struct(f"{math.prod(FACTORS_SHAPE)}d")
"""Factors of a worker's numbers: for the tokens after the first one, then for each of `Group.sides`."""
SORTED = 128
"""Number of workers up to which all are sorted, where a few are looked for."""
PLAIN_WEIGHTS = (PREFILL_WEIGHT,) * len(SIDES)
"""Weights as long as no request waits."""

Vector = NDArray[np.float64]


class _Prompt(NamedTuple):
    """A request's prompt on a worker that would compute it."""

    seconds: float
    """Cost of the request up to the first token."""
    row: int
    worker: WorkerView
    prefill: Prefill


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
    """Costs of a request: estimated for all workers, in detail for those that are asked for.

    Caution (`PlacementPolicy._caution`) is part of each cost, once for each worker.
    """

    def __init__(self, demand: Demand, fleet: Fleet, cached: Cached, extra: Vector, weights: Sequence[float]) -> None:
        """
        Args:
            cached: tokens of the prompt, and the workers that have so many (`PrefixIndex.cached`).
            extra: [workers] seconds that stand for caution, and what decides between equals.
            weights: weight of the seconds in which a worker computes the prompt, for each of `Group.sides`.
        """
        self._prompt, self._yields, self._extra, self._weights = demand.prompt_tokens, demand.yields, extra, weights
        self.steps = steps = min(MOST_STEPS, max(1, demand.expected_tokens - 1)) if demand.decode_tokens else 0
        self._workers, self._figures = fleet.workers, fleet.figures
        self._context = demand.prompt_tokens + steps / 2
        self._usual = cached[0][0]
        self._tokens: dict[int, int] = {}
        """Tokens of the prompt that workers have, by row, where these are not `_usual`."""
        self._stream = DECODE_WEIGHT * steps
        # One product estimates all: for few workers, each call of numpy takes longer than its work.
        decode = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, self._stream, self._stream * self._context)
        factors = FACTORS.pack(*decode, *[each for side in ALL_SIDES for each in self._factors(side, self._usual)])
        found: Vector = np.dot(np.ndarray(FACTORS_SHAPE, float, factors), fleet.estimates)
        found += extra
        self.streams: Vector = found[0]
        """[workers] of the tokens after the first one."""
        self.costs: Vector = found[1:]
        """[sides, workers] of the prompt up to its first token on a prefill worker, of the whole request on others."""
        for tokens, rows in cached[1:]:
            self._tokens |= dict.fromkeys(rows, tokens)
            if len(rows) > FEW:
                own = np.array([self._factors(side, tokens) for side in ALL_SIDES])
                self.costs[:, rows] = own @ fleet.estimates[:, rows] + extra[rows]
                continue
            new = self._prompt - tokens if tokens < self._prompt else 1
            pairs = new * (self._prompt - new / 2)
            for row in rows:
                side, (wait, urgent, first, token, pair, delay, step, context, *_) = (
                    fleet.sides[row],
                    fleet.figures[row],
                )
                each = weights[side] * (first + new * token + pairs * pair) + (wait if self._yields else urgent)
                if side != PREFILLS:
                    each += DECODE_WEIGHT * new * delay + self._stream * (step + self._context * context)
                self.costs[side, row] = each + extra.item(row)

    def _factors(self, side: int, tokens: int) -> tuple[float, ...]:
        """Factors of the numbers of a worker of one of `Group.sides` that has so many tokens of the prompt."""
        prompt, weight = self._prompt, self._weights[side]
        new = prompt - tokens if tokens < prompt else 1
        first, second = (1.0, 0.0) if self._yields else (0.0, 1.0)
        work = weight * new
        pairs = work * (prompt - new / 2)
        if side == PREFILLS:
            return first, second, weight, work, pairs, 0.0, 0.0, 0.0
        stream = self._stream
        return first, second, weight, work, pairs, DECODE_WEIGHT * new, stream, stream * self._context

    def cached(self, row: int) -> int:
        """Tokens of the prompt that a worker has, without the last one, which is always computed."""
        tokens = self._tokens.get(row, self._usual)
        return tokens if tokens < self._prompt else self._prompt - 1

    def floor(self, row: int, side: int) -> float:
        """A bound that what `prompt` costs on a worker of a side, or the whole request on others, isn't below."""
        prompt, cached, figures = self._prompt, self.cached(row), self._figures[row]
        new = prompt - cached
        work = new * (figures[FLOOR] + (prompt - new / 2) * figures[PAIR])
        found = figures[WAIT if self._yields else URGENT_WAIT] + self._weights[side] * work
        if side == PREFILLS:
            return found + self._extra.item(row)
        return found + DECODE_WEIGHT * new * figures[DELAY_FLOOR] + self.streams.item(row)

    def prompt(self, row: int, side: int) -> _Prompt:
        """The prompt on a worker of a side."""
        worker, cached = self._workers[row], self.cached(row)
        pace = _pace(worker, self._yields)
        prefill = pace.prefill(self._prompt - cached, cached)
        return _Prompt(pace.wait + self._weights[side] * prefill.seconds + self._extra.item(row), row, worker, prefill)

    def add_alone(self, options: list[_Option], rows: Iterable[int], side: int) -> None:
        """Adds the ways to serve the request on one worker of a side that are among the two cheapest options."""
        second = _second(options)
        for row in rows:
            if self.floor(row, side) >= second:
                continue
            prompt = self.prompt(row, side)
            seconds, _, worker, prefill = prompt
            pace = _pace(worker)
            if prefill.delay and pace.load.sequences:
                seconds += DECODE_WEIGHT * pace.load.sequences * stall(prefill.delay, prefill.steps, pace.bounded)
            seconds += self.streams.item(row) - self._extra.item(row)
            options.append(_Option(seconds, "in place" if side == DECODES else "co-located", prompt, worker))
            second = _second(options)

    def add_pairs(self, options: list[_Option], group: Group, prefills: list[int], decodes: Iterable[int]) -> bool:
        """Adds those pairs that are among the two cheapest options.

        Args:
            prefills: rows of the workers that may compute the prompt.
            decodes: rows of the workers that may get its KV.

        Returns:
            Whether any two of the workers may be paired.
        """
        workers = self._workers
        streams = []
        for row in decodes:
            costs, after = _pace(workers[row]).costs, self.streams.item(row)
            streams.append((after + costs.least_exposed, row, after, costs))
        streams.sort()
        any_pair = group.any_pair or not any(workers[row].bad_peers for row in prefills)
        second = _second(options)
        for floor, at in sorted([(self.floor(row, PREFILLS), row) for row in prefills]):
            if not streams or floor + streams[0][0] >= second:
                break
            prompt = self.prompt(at, PREFILLS)
            before, worker = prompt.seconds, prompt.worker
            for least, row, after, costs in streams:
                if before + least >= second:
                    break
                if any_pair or group.allows(worker, workers[row]):
                    link = costs.link(worker.id.name)
                    exposed = exposed_seconds(costs.kv, link, self._prompt, self.cached(row), prompt.prefill)
                    seconds = before + after + exposed
                    if seconds < second:
                        options.append(_Option(seconds, "pair", prompt, workers[row], exposed))
                        second = _second(options)
        return any_pair or any(
            group.allows(workers[first], workers[row]) for first in prefills for _, row, _, _ in streams
        )

    def predicted(self, option: _Option) -> Predicted:
        """Latencies of an option."""
        ttft = _pace(option.prompt.worker, self._yields).wait + option.prompt.prefill.seconds
        if option.decode is None:
            return Predicted(ttft, 0.0)
        return Predicted(ttft, _pace(option.decode).tpot(self._context) + option.exposed / max(1, self.steps))


def _cheapest(costs: Vector, rows: Rows, fits: Callable[[int], bool], most: int) -> list[int]:
    """At most `most` of these rows: those with the least costs that fit, the cheapest first.

    Args:
        costs: [workers].
    """
    if not len(rows):
        return []
    own = costs[rows]
    if len(own) > SORTED:
        near = own.argpartition(FEW)[:FEW]
        found = _first(rows[near[own[near].argsort()]].tolist(), fits, most)
        if len(found) == most:
            return found
    return _first(rows[own.argsort()].tolist(), fits, most)


def _first(rows: list[int], fits: Callable[[int], bool], most: int) -> list[int]:
    """The first `most` of these rows that fit."""
    found: list[int] = []
    for row in rows:
        if fits(row):
            found.append(row)
            if len(found) == most:
                break
    return found


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
        """[workers] the latest turn of each, from 0 to TIE_SECONDS."""
        self._names: NDArray[np.uint64] = np.zeros(0, np.uint64)
        """[workers] digests of their names."""
        self._orders: dict[int, Vector] = {}
        """[ORDERS_AT_ONCE, workers] by a part of a request's key, from 0 to TIE_SECONDS."""

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
                self._turns[row] = (self._turn + 1) % TURNS * (TIE_SECONDS / TURNS)
        return super().take(placement, chain)

    def _see(self, workers: Sequence[WorkerView]) -> None:
        rows = self._fleet.row
        super()._see(workers)
        if self._fleet.row is not rows:
            turns = [self._last_turn.get(worker.id, 0) % TURNS for worker in workers]
            self._turns = np.array(turns) * (TIE_SECONDS / TURNS)
            self._orders = {}
            names = [xxh3_64_intdigest(worker.id.name.encode()) for worker in workers]
            self._names = np.array(names, np.uint64)

    def _choose(self, demand: Demand, group: Group) -> Choice | None:
        if not self._fleet.known:
            return super()._choose(demand, group)
        if self._waiting and all((self._backlog(demand)[rows] >= self._ahead_tokens).all() for rows in group.rows):
            return None  # all of them have enough to do: the queue asks often while that is so
        options, prices = self._options(demand, group)
        if not options:
            return None
        best = options[0]
        if best.prompt.worker.busy(self._ahead_tokens, yields=demand.yields):
            # It is worth waiting for what its worker has of the prompt, but not for what makes its tokens cheaper.
            options, prices = self._options(demand, group, only_free=True)
            if not options or not _instead(options[0], best):
                return None
            best = options[0]
        second = options[1] if len(options) > 1 else None
        words = "" if second is None else f"{second.way} {' '.join([each.id.name for each in second.workers])}"
        return Choice(best.workers, Decision(best.way, prices.predicted(best), best.exposed, words))

    def _options(
        self, demand: Demand, group: Group, *, room: bool = True, only_free: bool = False
    ) -> tuple[list[_Option], _Prices]:
        """The cheapest ways to serve a request, the best first, and what they cost.

        Args:
            room: whether workers without room are left out.
            only_free: whether workers are left out that have enough to do, where they would compute the prompt.
        """
        fleet, extra, sides = self._fleet, self._order_all(demand.key), group.rows
        if demand.avoid or demand.on_trial or demand.degrees or fleet.suspects:
            extra = extra + self._cautions(demand)
        prices = _Prices(demand, fleet, self._index.cached(demand.chain), extra, self._weights(demand, group))
        workers, tokens = fleet.workers, demand.most_expected if room else -math.inf
        figures, backlog = fleet.figures, BACKLOG if demand.yields else URGENT_BACKLOG
        if demand.on_trial:
            sides = tuple([rows[[not workers[row].suspects for row in rows]] if len(rows) else rows for rows in sides])

        ahead_tokens = self._ahead_tokens

        def free(row: int) -> bool:
            return not only_free or figures[row][backlog] < ahead_tokens

        def holds(row: int) -> bool:
            return free(row) and (tokens <= figures[row][ROOM] or self._holds(demand, workers[row]))

        def accepts(row: int) -> bool:
            return tokens <= figures[row][ROOM] or self._accepts(demand, workers[row], group)

        options: list[_Option] = []
        in_place = _cheapest(prices.costs[DECODES], sides[DECODES], holds, CANDIDATES - 1)
        colocated = _cheapest(prices.costs[COLOCATED], sides[COLOCATED], holds, CANDIDATES)
        if colocated:
            prices.add_alone(options, colocated, COLOCATED)
        if not prices.steps:
            firsts = [
                prices.prompt(row, PREFILLS)
                for row in _cheapest(prices.costs[PREFILLS], sides[PREFILLS], free, CANDIDATES)
            ]
            options += [_Option(prompt.seconds, "first token", prompt, None) for prompt in firsts]
        elif len(sides[PREFILLS]) and len(sides[DECODES]):
            for most in (CANDIDATES, len(workers)):
                # Of those that have a part of the prompt, less is sent.
                lasts = {*_cheapest(prices.streams, sides[DECODES], accepts, most), *in_place}
                prefills = _cheapest(prices.costs[PREFILLS], sides[PREFILLS], free, most)
                if not (lasts and prefills) or prices.add_pairs(options, group, prefills, lasts):
                    break  # else none of them may be paired
        prices.add_alone(options, in_place, DECODES)
        options.sort(key=_seconds)
        return options, prices

    def _weights(self, demand: Demand, group: Group) -> Sequence[float]:
        """Weight of the seconds in which a worker of each side computes a prompt."""
        if not self._waiting:
            return PLAIN_WEIGHTS
        occupied, found = self._backlog(demand) >= self._ahead_tokens, []
        if demand.decode_tokens:
            occupied = occupied | (self._fleet.numbers[:, ROOM] < demand.most_expected)
        for rows in group.rows:
            busy = float(occupied[rows].mean()) / len(rows) if len(rows) else 0.0
            found.append(PREFILL_WEIGHT + QUEUE_WEIGHT * self._waiting * busy)
        return found

    def _backlog(self, demand: Demand) -> Vector:
        """[workers] tokens that each has to compute before those of a request."""
        found: Vector = self._fleet.numbers[:, BACKLOG if demand.yields else URGENT_BACKLOG]
        return found

    def _cautions(self, demand: Demand) -> Vector:
        """[workers] seconds that stand for what comes before any cost."""
        first, second, third = 9 * CAUTION, 3 * CAUTION, CAUTION
        found = [self._caution(demand, worker) for worker in self._fleet.workers]
        return np.array([first * avoid + second * company + third * degree for avoid, company, degree in found])

    def _order_all(self, key: int) -> Vector:
        """[workers] from 0 to TIE_SECONDS; the smallest goes first of equals, by the key as in rendezvous hashing, or
        by turn. Not to be changed."""
        if not key:
            return self._turns
        several, number = divmod(key % ORDERS, ORDERS_AT_ONCE)
        orders = self._orders.get(several)
        if orders is None:
            # Names are digests already, so a product with an odd number gives another order.
            firsts = range(several * ORDERS_AT_ONCE, (several + 1) * ORDERS_AT_ONCE)
            odd = np.array([[xxh3_64_intdigest(each.to_bytes(8, "little")) | 1] for each in firsts], np.uint64)
            orders = self._orders[several] = (self._names * odd).astype(np.float64) * (2.0**-64 * TIE_SECONDS)
        order: Vector = orders[number]
        return order


_seconds = attrgetter("seconds")


def _instead(other: _Option, best: _Option) -> bool:
    """Whether another way is taken, since the worker that would compute the prompt in the best one has enough to do."""
    sooner = other.way == best.way and other.prompt.seconds <= best.prompt.seconds
    return sooner and other.seconds < best.seconds + CAUTION


def _second(options: list[_Option]) -> float:
    """Cost of the second cheapest option; infinite if there is none."""
    return sorted([option[0] for option in options])[1] if len(options) > 1 else math.inf


_POLICIES: dict[PlacementName, type[PlacementPolicy]] = {
    "predicted": PredictedCost,
    "least_work": LeastWork,
    "round_robin": RoundRobin,
    "random": Random,
}


def policy_of(name: PlacementName, index: PrefixIndex, backlog_share: float, ahead_tokens: float) -> PlacementPolicy:
    """The policy of this name (`router.placement`); the other arguments as of `PlacementPolicy`."""
    return _POLICIES[name](index, backlog_share, ahead_tokens)
