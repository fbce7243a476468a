"""Replays a trace of conversations against the router's placement: how much of the prompts is found in workers' caches.

    python benchmarks/placement.py TRACE [--workers 1 4 16] [--cache 100000000 2000000] [--busy 0.8] [--routers 1 2]
        [--out FILE]
    python benchmarks/placement.py --decisions [--out FILE]

The policy, the prefix index and its corrections are the router's own; prompts wait in their routers while the worker
that they would go to has `ahead` tokens to compute. The workers are simulated: prefill workers
compute their prompts in order, `rate` tokens a second, and each keeps the blocks of `cache` tokens, the least recently
used is evicted first. Two bounds of the hit share, both of one cache as large as all workers' together that has every
prompt as soon as it arrives: the best possible, which knows the future and evicts what is used latest again, and one
that evicts as workers do.
Time is the trace's, slowed or hastened so that the workers would be busy for `busy` of it if nothing were cached.

The trace is Mooncake's (`conversation_trace.jsonl`): arrival, lengths, and the ids of the prompt's 512-token blocks,
equal for equal prefixes.

With `--decisions`: CPU time of one decision, between which the loads of two workers change, at 32+32 and 500+500
workers that have 10,000 prompts with a common beginning in their caches.
"""

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from turns import own_setting, save

from kvrelay.costs.handoff import KvBytes, LinkCost
from kvrelay.costs.step import StepCost
from kvrelay.costs.worker import WorkerCosts
from kvrelay.router.config import RouterOptions
from kvrelay.router.placing.placement import DecodeCapacity, Demand, Placement, WorkerView
from kvrelay.router.placing.policies import LeastWork
from kvrelay.router.placing.predicted import PredictedCost
from kvrelay.router.placing.prefixes import UNIT, Expectation, PrefixIndex
from kvrelay.router.placing.queue import LOOK_AHEAD
from kvrelay.rpc.identity import WorkerId, WorkerRole

BLOCK = 512
INDEX_TOKENS = 2**31


@dataclass(frozen=True, slots=True)
class Prompt:
    arrival: float
    tokens: int
    blocks: tuple[int, ...]

    @property
    def kept(self) -> tuple[int, ...]:
        """Blocks of the prompt that a worker keeps when it has computed it."""
        return self.blocks[: self.tokens // BLOCK]

    def found(self, cache: Container[int]) -> int:
        """Leading blocks of the prompt that are in a cache. The last token is always computed."""
        return len(list(itertools.takewhile(cache.__contains__, self.blocks[: (self.tokens - 1) // BLOCK])))

    @property
    def chain(self) -> "array[int]":
        """Digests of the prompt's whole units; those of a block follow from the block's id."""
        per_block = BLOCK // UNIT
        units = (block * per_block + unit + 1 for block in self.blocks for unit in range(per_block))
        return array("Q", itertools.islice(units, self.tokens // UNIT))


@dataclass(slots=True)
class Worker:
    """Computes prompts in order, and keeps whole blocks, the least recently used is evicted first."""

    id: WorkerId
    max_blocks: int
    rate: float
    cache: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    free_at: float = 0.0
    queue: "deque[float]" = field(default_factory=deque)
    """Times at which the prompts that are here will have been computed."""

    def view(self, now: float) -> WorkerView:
        while self.queue and self.queue[0] <= now:
            self.queue.popleft()
        pending = math.ceil(max(0.0, self.free_at - now) * self.rate) if self.queue else 0
        kv_tokens = self.max_blocks * BLOCK
        running = len(self.queue)
        return WorkerView(self.id, "prefill", True, pending_tokens=pending, running=running, kv_tokens=kv_tokens)

    def take(self, prompt: Prompt, now: float) -> tuple[float, int]:
        """Returns when the prompt is computed, and how many of its tokens were there. It is looked up when the prompts
        before it are done; nobody else comes between, so that can be now."""
        found = prompt.found(self.cache)
        for block in reversed(prompt.kept):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.max_blocks:
            self.cache.popitem(last=False)
        new = prompt.tokens - found * BLOCK
        self.free_at = max(now, self.free_at) + new / self.rate
        self.queue.append(self.free_at)
        return self.free_at, found * BLOCK


def read(trace: Path) -> list[Prompt]:
    rows = map(json.loads, trace.read_text().splitlines())
    return [Prompt(row["timestamp"] / 1e3, row["input_length"], tuple(row["hash_ids"])) for row in rows]


def best(prompts: Sequence[Prompt], max_blocks: int) -> float:
    """Share of all prompts' tokens in one cache that knows the future: it evicts what is used latest again."""
    never = len(prompts)
    following: dict[int, int] = {}
    again: list[dict[int, int]] = []
    for number in range(never - 1, -1, -1):
        kept = prompts[number].kept
        again.append({block: following.get(block, never) for block in kept})
        following |= dict.fromkeys(kept, number)
    cache: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    hits = 0
    for prompt, nexts in zip(prompts, reversed(again), strict=True):
        hits += prompt.found(cache)
        for block in reversed(prompt.kept):
            cache[block] = nexts[block]
            heapq.heappush(latest, (-nexts[block], block))
        while len(cache) > max_blocks:
            use, block = heapq.heappop(latest)
            if cache.get(block) == -use:
                del cache[block]
    return BLOCK * hits / sum(prompt.tokens for prompt in prompts)


def one_cache(prompts: Sequence[Prompt], max_blocks: int) -> float:
    """Share of all prompts' tokens in one cache that evicts as workers do, and knows each prompt when it arrives."""
    worker = Worker(WorkerId("all", "i"), max_blocks, math.inf)
    return sum(worker.take(prompt, 0.0)[1] for prompt in prompts) / sum(prompt.tokens for prompt in prompts)


class Replay:
    """A trace on its way through routers and workers."""

    def __init__(
        self, prompts: Sequence[Prompt], workers: Sequence[Worker], policies: Sequence[LeastWork], *, told: bool
    ) -> None:
        """
        Args:
            policies: one for each router; they take the prompts in turn.
            told: whether workers tell routers of each other's prompts.
        """
        self._prompts = prompts
        self._workers = {worker.id: worker for worker in workers}
        self._policies = policies
        self._told = told
        self._reports: list[tuple[float, int, WorkerId, Expectation, int]] = []
        self._hits = 0
        self._waits: list[float] = []

    def run(self, speed: float, ahead_seconds: float) -> tuple[float, list[float]]:
        """Returns the share of tokens that were found, and the seconds to each first token, in order.

        Args:
            speed: by which arrivals are hastened.
            ahead_seconds: work that a worker has from which on prompts for it wait in their routers.
        """
        arrivals = deque((prompt.arrival / speed, number) for number, prompt in enumerate(self._prompts))
        waiting: list[tuple[float, int]] = []
        now = -math.inf
        while arrivals or waiting:
            moments = [worker.free_at - ahead_seconds for worker in self._workers.values()] if waiting else []
            now = min([moment for moment in moments if moment > now] + [arrival for arrival, _ in list(arrivals)[:1]])
            self._hear(now)
            while arrivals and arrivals[0][0] <= now:
                waiting.append(arrivals.popleft())
            for arrived in waiting[:]:
                if self._place(*arrived, now):
                    waiting.remove(arrived)
                elif waiting.index(arrived) + 1 >= LOOK_AHEAD:
                    break
        return self._hits / sum(prompt.tokens for prompt in self._prompts), sorted(self._waits)

    def _hear(self, now: float) -> None:
        """Tells the routers what their workers have computed until `now`."""
        while self._reports and self._reports[0][0] <= now:
            _, number, worker, expected, cached = heapq.heappop(self._reports)
            expected.reported(cached, BLOCK)
            for other, policy in enumerate(self._policies):
                if self._told and other != number % len(self._policies):
                    policy.learn(worker, self._prompts[number].chain, cached, BLOCK, lambda: self._views(now))

    def _views(self, now: float) -> list[WorkerView]:
        return [worker.view(now) for worker in self._workers.values()]

    def _place(self, arrival: float, number: int, now: float) -> bool:
        prompt, policy = self._prompts[number], self._policies[number % len(self._policies)]
        chain = prompt.chain
        demand = Demand(prompt.tokens, 0, chain=chain, key=chain[-1] if chain else 0)
        place = policy.place(demand, self._views(now))
        if not isinstance(place, Placement):
            return False
        (expected,) = policy.take(place, chain)
        end, cached = self._workers[place.prefill].take(prompt, now)
        heapq.heappush(self._reports, (end, number, place.prefill, expected, cached))
        self._hits += cached
        self._waits.append(end - arrival)
        return True


def decisions() -> list[dict[str, object]]:
    """CPU time of decisions."""
    found, step = [], StepCost(6e-3, 2e-5, 2e-9, 0.0, 7e-3, 5e-5, 4e-10)
    for count, policy_class in itertools.product((32, 500), (PredictedCost, LeastWork)):
        rng = random.Random(0)

        def view(role: WorkerRole, at: int, rng: random.Random = rng) -> WorkerView:
            links = {"prefill-0": LinkCost(2e-3, 1e-10)}
            costs = WorkerCosts(replace(step, token=rng.uniform(4e-5, 6e-5)), 2048, kv=KvBytes(131072.0), links=links)
            capacity = None if role == "prefill" else DecodeCapacity(16, 32768, rng.randint(0, 32768), 256)
            running = rng.randint(0, 6) if role == "prefill" else rng.randint(4, 60)
            id_ = WorkerId(f"{role}-{at}", "i")
            return WorkerView(id_, role, True, running=running, kv_tokens=2**19, capacity=capacity, costs=costs)

        roles: list[WorkerRole] = ["prefill"] * count + ["decode"] * count
        views = [view(role, at) for at, role in enumerate(roles)]
        index = PrefixIndex(INDEX_TOKENS)
        policy = policy_class(index)
        policy.place(Demand(9, 9), views)
        chains = []
        for number in range(10_000):
            own = range(1000 * number + 1000, 1000 * number + 1000 + rng.randint(8, 60))
            chains.append(array("Q", [*range(1, 17), *own]))
            for side in (0, count):
                index.note(views[side + rng.randrange(count)].id, chains[-1])
        seconds = []
        for _ in range(1000):
            chain = rng.choice(chains)
            tokens = UNIT * len(chain) + rng.randint(1, 300)
            demand = Demand(tokens, 400, chain=chain, key=chain[-1], expected_tokens=200)
            for at in (rng.randrange(count), count + rng.randrange(count)):
                views[at] = view(roles[at], at)
            began = time.process_time()
            policy.place(demand, views)
            seconds.append(time.process_time() - began)
        found.append(
            {
                "workers": 2 * count,
                "placement": policy_class.__name__,
                "decision_us_p50": round(1e6 * statistics.median(seconds), 1),
                "decision_us_p99": round(1e6 * sorted(seconds)[int(0.99 * len(seconds))], 1),
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--decisions", action="store_true", help="CPU time of decisions; no trace")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16])
    caches = [100_000_000, 2_000_000]
    parser.add_argument("--cache", type=int, nargs="+", default=caches, help="tokens in one worker's cache")
    parser.add_argument("--rate", type=float, default=20_000.0, help="tokens a second that a worker computes")
    parser.add_argument("--busy", type=float, default=0.8, help="load without a cache")
    parser.add_argument("--routers", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path)
    ahead = RouterOptions().prefill_ahead_tokens
    parser.add_argument("--ahead", type=int, default=ahead, help="router.prefill_ahead_tokens")
    args = parser.parse_args()
    if args.decisions or args.trace is None:
        rows = decisions()
        if args.out is not None:
            save(args.out, own_setting("xxhash", "numpy") | {"rows": rows})
        return
    prompts = read(args.trace)
    seconds = prompts[-1].arrival - prompts[0].arrival
    tokens = sum(prompt.tokens for prompt in prompts)
    rows: list[dict[str, object]] = []
    for count, cache in itertools.product(args.workers, args.cache):
        speed = args.busy * count * args.rate * seconds / tokens
        ids = [WorkerId(f"prefill-{index}", "i") for index in range(count)]
        limits = [bound(prompts, count * cache // BLOCK) for bound in (best, one_cache)]
        for routers in args.routers:
            # With more routers, also as if each knew its own prompts only.
            named = {"near its cache": (INDEX_TOKENS, True), "by load only": (0, False)}
            if routers > 1:
                named["near its cache, routers apart"] = INDEX_TOKENS, False
            for name, (index, told) in named.items():
                workers = [Worker(id_, cache // BLOCK, args.rate) for id_ in ids]
                policies = [LeastWork(PrefixIndex(index), ahead_tokens=args.ahead) for _ in range(routers)]
                share, waits = Replay(prompts, workers, policies, told=told).run(speed, args.ahead / args.rate)
                line = {
                    "workers": count,
                    "cache_tokens": cache,
                    "routers": routers,
                    "placement": name,
                    "hit_share": round(share, 4),
                    "of_best_possible": round(share / limits[0], 3),
                    "of_one_cache": round(share / limits[1], 3),
                    "first_token_seconds_p50": round(statistics.median(waits), 3),
                    "first_token_seconds_p99": round(waits[int(0.99 * len(waits))], 3),
                }
                rows.append(line)
                print(json.dumps(line), flush=True)
    if args.out is not None:
        save(args.out, own_setting("xxhash") | {"trace": args.trace.name, "busy": args.busy, "rows": rows})


if __name__ == "__main__":
    main()
