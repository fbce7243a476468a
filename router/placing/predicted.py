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
from operator import attrgetter, mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvrelay.costs.predict import Decision, Pace, Predicted, Prefill, Way, exposed_seconds
from kvrelay.router.config import PlacementName
from kvrelay.router.placing.groups import BACKLOG, CONTEXT, URGENT_BACKLOG, Fleet, Group, stall
from kvrelay.router.placing.placement import Demand, Placement, WorkerView
from kvrelay.router.placing.policies import Choice, LeastWork, PlacementPolicy, Random, RoundRobin
from kvrelay.router.placing.prefixes import FEW, Cached, Expectation, PrefixIndex
from kvrelay.rpc.identity import WorkerRole

CANDIDATES = 3
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
ORDERS = 1024
"""Different orders of equal workers."""
TURNS = 2**20
"""Turns after which they are counted from 0 again."""
PREFILLS, DECODES, COLOCATED = range(3)
"""Indices in `Group.sides`."""
SIDES: dict[WorkerRole, int] = {"prefill": PREFILLS, "decode": DECODES, "colocated": COLOCATED}
PLAIN_WEIGHTS = (PREFILL_WEIGHT,) * len(SIDES)
"""Weights as long as no request waits."""

Vector = NDArray[np.float64]
Fits = Callable[[WorkerView], bool]


class _Prompt(NamedTuple):
    """A request's prompt on a worker that would compute it."""

    seconds: float
    """Cost of the request up to the first token."""
    row: int
    worker: WorkerView
    prefill: Prefill


class _Stream(NamedTuple):
    """A request's tokens after the first one, on a worker that would generate them."""

    seconds: float
    """Cost of these tokens."""
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
        self._context = demand.prompt_tokens + steps / 2
        self._least = cached[0][0]
        self._tokens: dict[int, int] = {}
        """Tokens of the prompt that workers have, by row, where these are more than `_least`."""
        # One product estimates all: for few workers, each call of numpy takes longer than its work.
        stream, numbers = DECODE_WEIGHT * steps, fleet.numbers
        factors = [(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, stream, stream * self._context), *self._factors(cached[0][0])]
        found: Vector = np.dot(np.array(factors), numbers[: CONTEXT + 1])
        found += extra
        self.streams: Vector = found[0]
        """[workers] of the tokens after the first one."""
        self.costs: Vector = found[1:]
        """[sides, workers] of the prompt up to its first token on a prefill worker, of the whole request on others."""
        for tokens, rows in cached[1:]:
            self._tokens |= dict.fromkeys(rows, tokens)
            own = self._factors(tokens)
            if len(rows) > FEW:
                self.costs[:, rows] = np.array(own) @ numbers[: CONTEXT + 1, rows] + extra[rows]
                continue
            for row in rows:
                side = SIDES[fleet.workers[row].role]
                each = sum(map(mul, own[side], numbers[: CONTEXT + 1, row].tolist()))
                self.costs[side, row] = each + extra.item(row)

    def _factors(self, tokens: int) -> list[tuple[float, ...]]:
        """Factors of the numbers of a worker that has so many tokens of the prompt, for each of `Group.sides`."""
        new = self._prompt - min(tokens, self._prompt - 1)
        pairs, delay, stream = new * (self._prompt - new / 2), DECODE_WEIGHT * new, DECODE_WEIGHT * self.steps
        waits = (1.0, 0.0) if self._yields else (0.0, 1.0)
        prefill, decode, colocated = self._weights
        last = (delay, stream, stream * self._context)
        return [
            (*waits, prefill, prefill * new, prefill * pairs, 0.0, 0.0, 0.0),
            (*waits, decode, decode * new, decode * pairs, *last),
            (*waits, colocated, colocated * new, colocated * pairs, *last),
        ]

    def _cached(self, row: int) -> int:
        """Tokens of the prompt that a worker has, without the last one, which is always computed."""
        return min(self._tokens.get(row, self._least), self._prompt - 1)

    def prompt(self, row: int, worker: WorkerView) -> _Prompt:
        """The prompt on a worker."""
        pace, cached = _pace(worker, self._yields), self._cached(row)
        prefill = pace.prefill(self._prompt - cached, cached)
        seconds = pace.wait + self._weights[SIDES[worker.role]] * prefill.seconds + self._extra.item(row)
        return _Prompt(seconds, row, worker, prefill)

    def stream(self, row: int, worker: WorkerView) -> _Stream:
        """The tokens after the first one on a worker."""
        return _Stream(self.streams.item(row), row, worker)

    def alone(self, row: int, worker: WorkerView, way: Way) -> _Option:
        """The request on one worker, from beginning to end."""
        prompt, sequences = self.prompt(row, worker), _pace(worker).load.sequences
        delay = stall(prompt.prefill.delay, prompt.prefill.steps) * sequences
        seconds = prompt.seconds + self.streams.item(row) - self._extra.item(row) + DECODE_WEIGHT * delay
        return _Option(seconds, way, prompt, worker)

    def pair(self, prompt: _Prompt, stream: _Stream) -> _Option:
        """The request on two workers."""
        costs = _pace(stream.worker).costs
        link = costs.link(prompt.worker.id.name)
        exposed = exposed_seconds(costs.kv, link, self._prompt, self._cached(stream.row), prompt.prefill)
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
                    if (seconds := found[-1].seconds) < best:
                        best, second = seconds, best
                    elif seconds < second:
                        second = seconds
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
        """[workers] the latest turn of each, from 0 to TIE_SECONDS."""
        self._names: NDArray[np.uint64] = np.zeros(0, np.uint64)
        """[workers] digests of their names."""
        self._orders: dict[int, Vector] = {}
        """[workers] by a part of a request's key, from 0 to TIE_SECONDS."""

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
        cached, extra = self._index.cached(demand.chain), self._order_all(demand.key)
        if demand.avoid or demand.on_trial or demand.degrees or self._fleet.suspects:
            extra = extra + self._cautions(demand)
        prices = _Prices(demand, self._fleet, cached, extra, self._weights(demand, group))

        def allowed(worker: WorkerView) -> bool:
            return not (demand.on_trial and worker.suspects)

        def holds(worker: WorkerView) -> bool:
            return allowed(worker) and (not room or self._holds(demand, worker))

        def accepts(worker: WorkerView) -> bool:
            has_room = not room or any(worker is each for _, each in in_place)
            return allowed(worker) and (has_room or self._accepts(demand, worker, group))

        def cheapest(costs: Vector, side: int, fits: Fits, most: int) -> list[tuple[int, WorkerView]]:
            workers, rows = group.sides[side], group.rows[side]
            found: list[tuple[int, WorkerView]] = []
            if not workers:
                return found
            for at in costs[rows].argsort().tolist():
                if fits(workers[at]):
                    found.append((int(rows[at]), workers[at]))
                    if len(found) == most:
                        break
            return found

        in_place = cheapest(prices.costs[DECODES], DECODES, holds, CANDIDATES - 1)
        colocated = cheapest(prices.costs[COLOCATED], COLOCATED, holds, CANDIDATES)
        options = [prices.alone(*each, "in place") for each in in_place]
        options += [prices.alone(*each, "co-located") for each in colocated]

        def pairs(most: int) -> list[_Option]:
            decodes = cheapest(prices.streams, DECODES, accepts, most)
            # Those that have a part of the prompt get less.
            decodes += [each for each in in_place if each not in decodes]
            prompts = cheapest(prices.costs[PREFILLS], PREFILLS, allowed, most) if decodes else []
            lasts = [prices.stream(*each) for each in decodes]
            found = prices.pairs(group, [prices.prompt(*each) for each in prompts], lasts)
            # Perhaps none of them may be paired.
            return found or (pairs(len(self._fleet.workers)) if prompts and most == CANDIDATES else [])

        if not prices.steps:
            firsts = cheapest(prices.costs[PREFILLS], PREFILLS, allowed, CANDIDATES)
            prompts = [prices.prompt(*each) for each in firsts]
            options += [_Option(prompt.seconds, "first token", prompt, None) for prompt in prompts]
        elif group.prefills and group.decodes:
            options += pairs(CANDIDATES)
        options.sort(key=_seconds)
        return options, prices

    def _weights(self, demand: Demand, group: Group) -> Sequence[float]:
        """Weight of the seconds in which a worker of each side computes a prompt."""
        if not self._waiting:
            return PLAIN_WEIGHTS
        backlog, found = self._backlog(demand), []
        for rows in group.rows:
            busy = float((backlog[rows] >= self._ahead_tokens).mean()) / len(rows) if len(rows) else 0.0
            found.append(PREFILL_WEIGHT + QUEUE_WEIGHT * self._waiting * busy)
        return found

    def _backlog(self, demand: Demand) -> Vector:
        """[workers] tokens that each has to compute before those of a request."""
        found: Vector = self._fleet.numbers[BACKLOG if demand.yields else URGENT_BACKLOG]
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
        number = key % ORDERS
        order = self._orders.get(number)
        if order is None:
            # Names are digests already, so a product with an odd number gives another order.
            mixed = self._names * np.uint64(xxh3_64_intdigest(number.to_bytes(8, "little")) | 1)
            order = self._orders[number] = mixed.astype(np.float64) * (2.0**-64 * TIE_SECONDS)
        return order


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
