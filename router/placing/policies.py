"""Policies that choose the workers of a request. They decide from values and do no I/O: a simulator runs them too.

All keep the same rules, and differ only in how they rank the workers that a request may use (`groups.py`):

* A worker that the request should avoid, one with suspects, and one of another degree than the client's tokens were
  computed at come after all others.
* A decode worker is used if it has capacity for the prompt and for what the request is expected to generate, beside the
  expected growth of all that it has. A limited backlog of prompts may also be computed ahead for capacity that is
  expected soon: their KV waits in prefill memory.
* If the best worker has enough prompts to compute, the request waits.

`least_work` is the default; `predicted` is in `predicted.py`. The policies here need no costs.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvrelay.costs.predict import Decision, Predicted
from kvrelay.router.placing.groups import Fleet, Group
from kvrelay.router.placing.placement import Demand, NoPlace, Placement, WorkerView
from kvrelay.router.placing.prefixes import Expectation, PrefixIndex
from kvrelay.rpc.identity import WorkerId, WorkerRole

WORK_WEIGHT = 4
"""Weight of a request's own work against the load that it finds. Tokens that are computed again delay not only this
request but also later ones."""
TRANSFER_SHARE = 16
"""Number of tokens whose transfer as KV counts as computing one token."""


class Choice(NamedTuple):
    """Workers that serve a request."""

    workers: Sequence[WorkerView]
    """The one that computes the prompt, then the one that gets its KV, if there is one."""
    why: Decision


class PlacementPolicy(ABC):
    """Chooses workers by the rules; subclasses rank them."""

    def __init__(self, index: PrefixIndex, backlog_share: float = 0.0, ahead_tokens: float = math.inf) -> None:
        """
        Args:
            index: tells what workers have in their caches. This class forgets workers that are gone.
            backlog_share: largest share of the prefill workers' KV memory that may hold prompts waiting for decode.
            ahead_tokens: when a worker has this many tokens to compute, it gets no other prompt.
        """
        self._index = index
        self._backlog_share = backlog_share
        self._ahead_tokens = ahead_tokens
        self._fleet = Fleet()
        self._turn = 0
        self._last_turn: dict[WorkerId, int] = {}
        self._waiting = 0
        """`waiting` of the latest placement."""

    def place(self, demand: Demand, workers: Sequence[WorkerView], waiting: int = 0) -> Placement | NoPlace:
        """Decides by the workers' state now. Who follows the decision calls `take`.

        Args:
            waiting: requests that wait in the router for what this one may get.
        """
        self._see(workers)
        self._waiting = waiting
        groups = self._fleet.groups(demand)
        for group in groups:
            chosen = self._choose(demand, group)
            if chosen is not None and not chosen.workers[0].busy(self._ahead_tokens, yields=demand.yields):
                last = chosen.workers[-1]
                decode = last.id if demand.decode_tokens or last.role != "prefill" else None
                passes = decode is not None and last.capacity is not None and last.capacity.passes(demand)
                return Placement(chosen.workers[0].id, decode, passes, chosen.why)
        return NoPlace.NO_CAPACITY if groups else NoPlace.NO_WORKERS

    def predict(self, demand: Demand, workers: Sequence[WorkerView]) -> Predicted | None:
        """Latencies of a request if it were placed now, whether there is room or not; None if they aren't known."""
        return None

    def waits_for(self, demand: Demand, workers: Sequence[WorkerView]) -> WorkerRole:
        """The role whose workers a request waits for that finds no capacity now."""
        self._see(workers)
        groups = self._fleet.groups(demand)
        accepted = any(self._accepts(demand, decode, group) for group in groups for decode in group.decodes)
        decodes = any(group.decodes for group in groups)
        return "decode" if decodes and not accepted else "prefill"

    def take(self, placement: Placement, chain: Sequence[int]) -> list[Expectation]:
        """Notes that a request with this chain is placed.

        Returns:
            What is expected of each of `placement.each`; to be ended when the placement is over.
        """
        self._turn += 1
        self._last_turn |= dict.fromkeys(placement.each, self._turn)
        return [self._index.expect(worker, chain) for worker in placement.each]

    def learn(
        self,
        worker: WorkerId,
        chain: Sequence[int],
        cached_tokens: int | None,
        block_size: int,
        workers: Callable[[], Sequence[WorkerView]],
    ) -> None:
        """Notes that a worker has computed a prompt that another router has placed there.

        Args:
            cached_tokens: how much of it was there before; None if the KV came from elsewhere.
            block_size: of the worker.
            workers: the state of all workers now. It is asked for if this one is new: nothing was placed since it came.
        """
        if worker not in self._index:
            self._see(workers())
        expected = self._index.expect(worker, chain)
        expected.reported(expected.tokens if cached_tokens is None else cached_tokens, block_size)

    def answered(self, worker: WorkerId, chain: Sequence[int]) -> None:
        """Notes that a worker has the KV of a prompt and of its answer.

        Args:
            chain: of the whole units of both.
        """
        self._index.note(worker, chain)

    @abstractmethod
    def _choose(self, demand: Demand, group: Group) -> Choice | None:
        """The best option of a group among those with capacity."""

    def _see(self, workers: Sequence[WorkerView]) -> None:
        if self._fleet.see(workers):
            known = [(worker.id, worker.kv_tokens) for worker in workers]
            self._last_turn = {each: self._last_turn[each] for each, _ in known if each in self._last_turn}
            self._index.keep(known)

    @staticmethod
    def _holds(demand: Demand, worker: WorkerView) -> bool:
        """Whether a worker that computes and decodes has room for the request. One that ends with its first token soon
        makes room."""
        return worker.capacity is None or not demand.decode_tokens or worker.capacity.fits(demand)

    def _accepts(self, demand: Demand, decode: WorkerView, group: Group) -> bool:
        """Whether such a prompt may be computed for `decode` now: there is room, or will be soon, and the KV may wait
        for it in prefill memory until then."""
        capacity = decode.capacity
        if capacity is None or capacity.fits(demand):
            return True
        if not capacity.fits(demand, soon=True):
            return False
        prefill_tokens = sum([worker.kv_tokens for worker in group.prefills]) / len(group.decodes)
        backlog = (capacity.promised_blocks + capacity.blocks_for(demand.prompt_tokens)) * capacity.block_size
        return backlog <= self._backlog_share * prefill_tokens

    @staticmethod
    def _caution(demand: Demand, worker: WorkerView) -> tuple[int, int, int]:
        """Costs before any other: a worker to avoid, other requests that a trial could kill, another degree."""
        return (
            int(worker.id in demand.avoid),
            int((worker.requests if demand.on_trial else worker.suspects) > 0),
            int(worker.degree != demand.degrees.get(worker.role, worker.degree)),
        )


class ApartPolicy(PlacementPolicy):
    """Ranks each worker apart: the best pair consists of the best of each role. A co-located worker is chosen if it
    costs less than the pair; a decode worker computes prompts only if there is no prefill worker."""

    @abstractmethod
    def _rank(self, demand: Demand, worker: WorkerView, handed: bool) -> tuple[float, float]:
        """The worker's cost, and what decides between equals; the smallest go first, and add up over a pair.

        Args:
            handed: whether a decode worker gets the prompt's KV, and doesn't compute it.
        """

    def _choose(self, demand: Demand, group: Group) -> Choice | None:
        handed = demand.decode_tokens > 0 and not group.alone
        costs = {
            worker.id: (*self._caution(demand, worker), *self._rank(demand, worker, handed))
            for side in group.sides
            for worker in side
        }

        def best_first(workers: Iterable[WorkerView]) -> list[WorkerView]:
            allowed = [worker for worker in workers if not (demand.on_trial and worker.suspects)]
            return sorted(allowed, key=lambda worker: costs[worker.id])

        def cost(choice: Choice) -> tuple[float, ...]:
            return tuple(map(sum, zip(*(costs[worker.id] for worker in choice.workers), strict=True)))

        prefills = best_first(group.prefills)
        colocated = best_first([worker for worker in group.colocated if self._holds(demand, worker)])
        decodes = best_first([worker for worker in group.decodes if self._accepts(demand, worker, group)])
        options = [Choice([worker], Decision("co-located")) for worker in colocated[:1]]
        if group.alone:
            options += [Choice([worker], Decision("in place")) for worker in decodes[:1]]
        elif not demand.decode_tokens:
            options += [Choice([worker], Decision("first token")) for worker in prefills[:1]]
        elif prefills and decodes:
            best = [prefills[0], decodes[0]]
            if not group.allows(*best):
                pairs = [
                    [prefill, decode] for prefill in prefills for decode in decodes if group.allows(prefill, decode)
                ]
                best = min(pairs, key=lambda pair: cost(Choice(pair, Decision("pair"))), default=[])
            options += [Choice(best, Decision("pair"))] if best else []
        return min(options, key=cost, default=None)


class LeastWork(ApartPolicy):
    """Chooses the workers that would be done with the request first: those with the least load and work together.

    The work of a prompt is the tokens that a worker doesn't have in its cache. Its transfer is little work, for the
    tokens that the decode worker doesn't have. Of equally good workers, requests with the same key go to the same one,
    the others take turns.
    """

    def _rank(self, demand: Demand, worker: WorkerView, handed: bool) -> tuple[float, float]:
        new = max(1, demand.prompt_tokens - self._index.find(worker.id, demand.chain))
        own = new // TRANSFER_SHARE if handed and worker.role == "decode" else new
        return worker.work + WORK_WEIGHT * own, self._order(demand.key, worker.id)

    def _order(self, key: int, worker: WorkerId) -> int:
        """The smallest goes first of equals: by rendezvous hashing, which gives each key one order of the workers'
        names that all routers find and that a lost worker doesn't change for the others; or by the latest turn."""
        return xxh3_64_intdigest(worker.name.encode(), key) if key else self._last_turn.get(worker, 0)


class RoundRobin(ApartPolicy):
    """The workers take turns."""

    def _rank(self, demand: Demand, worker: WorkerView, handed: bool) -> tuple[float, float]:
        return 0.0, self._last_turn.get(worker.id, 0)


class Random(ApartPolicy):
    """Any workers."""

    def _rank(self, demand: Demand, worker: WorkerView, handed: bool) -> tuple[float, float]:
        return 0.0, random.random()
