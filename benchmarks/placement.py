"""Replays a trace of conversations against the router's placement: how much of the prompts is found in workers' caches.

    python benchmarks/placement.py TRACE [--workers 1 4 16] [--cache 100000000 2000000] [--busy 0.8] [--routers 1]

The policy, the prefix index and its corrections are the router's own. The workers are simulated: prefill workers
compute their prompts in order, `rate` tokens a second, and each keeps the blocks of `cache` tokens, the least recently
used is evicted first. The best possible is one cache without a limit that knows every prompt as soon as it has arrived.
Time is the trace's, slowed or hastened so that the workers would be busy for `busy` of it if nothing were cached.

The trace is Mooncake's (`conversation_trace.jsonl`): arrival, lengths, and the ids of the prompt's 512-token blocks,
equal for equal prefixes.
"""

import argparse
import heapq
import itertools
import json
import statistics
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.router.placement import Demand, LeastWork, Placement, WorkerView
from kvrelay.router.prefixes import UNIT, Expectation, PrefixIndex
from kvrelay.rpc.identity import WorkerId

BLOCK = 512
SHARE_ASKED = 0.9


@dataclass(frozen=True, slots=True)
class Prompt:
    arrival: float
    tokens: int
    blocks: tuple[int, ...]

    @property
    def chain(self) -> "array[int]":
        """Digests of its whole units; those of a block follow from the block's id."""
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
    queue: "deque[tuple[float, int]]" = field(default_factory=deque)
    """(end, tokens computed) of the prompts that are here."""

    def view(self, now: float) -> WorkerView:
        while self.queue and self.queue[0][0] <= now:
            self.queue.popleft()
        pending = sum(tokens for _, tokens in self.queue)
        kv_tokens = self.max_blocks * BLOCK
        running = len(self.queue)
        return WorkerView(self.id, "prefill", True, pending_tokens=pending, running=running, kv_tokens=kv_tokens)

    def take(self, prompt: Prompt, now: float) -> tuple[float, int]:
        """Returns when the prompt is computed, and how many of its tokens were there. It is looked up when the prompts
        before it are done; nobody else comes between, so that can be now."""
        whole = prompt.blocks[: (prompt.tokens - 1) // BLOCK]
        found = len(list(itertools.takewhile(self.cache.__contains__, whole)))
        for block in reversed(prompt.blocks[: prompt.tokens // BLOCK]):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.max_blocks:
            self.cache.popitem(last=False)
        new = prompt.tokens - found * BLOCK
        self.free_at = max(now, self.free_at) + new / self.rate
        self.queue.append((self.free_at, new))
        return self.free_at, found * BLOCK


@dataclass(frozen=True, slots=True)
class Result:
    hit_share: float
    wait_p50: float
    wait_p99: float


def read(trace: Path) -> list[Prompt]:
    rows = map(json.loads, trace.read_text().splitlines())
    return [Prompt(row["timestamp"] / 1e3, row["input_length"], tuple(row["hash_ids"])) for row in rows]


def best(prompts: Sequence[Prompt]) -> float:
    """Share of all prompts' tokens in one cache without a limit."""
    seen: set[int] = set()
    hits = 0
    for prompt in prompts:
        whole = prompt.blocks[: (prompt.tokens - 1) // BLOCK]
        hits += BLOCK * len(list(itertools.takewhile(seen.__contains__, whole)))
        seen.update(prompt.blocks[: prompt.tokens // BLOCK])
    return hits / sum(prompt.tokens for prompt in prompts)


def replay(
    prompts: Sequence[Prompt], workers: Sequence[Worker], indexes: Sequence[PrefixIndex], speed: float
) -> Result:
    """
    Args:
        indexes: one for each router; they take the prompts in turn.
        speed: by which arrivals are hastened.
    """
    policies = [LeastWork(index) for index in indexes]
    by_id = {worker.id: worker for worker in workers}
    reports: list[tuple[float, int, Expectation, int]] = []
    hits, waits = 0, []
    for number, prompt in enumerate(prompts):
        now, chain = prompt.arrival / speed, prompt.chain
        while reports and reports[0][0] <= now:
            _, _, expected, cached = heapq.heappop(reports)
            expected.reported(cached, BLOCK)
        router = number % len(indexes)
        demand = Demand(prompt.tokens, 0, chain=chain, key=chain[-1] if chain else 0)
        place = policies[router].place(demand, [worker.view(now) for worker in workers])
        if not isinstance(place, Placement):
            raise RuntimeError(f"prompt {number} has {place}")
        (expected,) = policies[router].take(place, chain)
        end, cached = by_id[place.prefill].take(prompt, now)
        heapq.heappush(reports, (end, number, expected, cached))
        hits += cached
        waits.append(end - now)
    waits.sort()
    share = hits / sum(prompt.tokens for prompt in prompts)
    return Result(share, statistics.median(waits), waits[int(0.99 * len(waits))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--cache", type=int, nargs="+", default=[100_000_000, 2_000_000], help="tokens in one worker's cache"
    )
    parser.add_argument("--rate", type=float, default=20_000.0, help="tokens a second that a worker computes")
    parser.add_argument("--busy", type=float, default=0.8, help="load without a cache")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--index", type=int, default=2**31, help="router.prefix_index_tokens")
    args = parser.parse_args()
    prompts = read(args.trace)
    seconds = prompts[-1].arrival - prompts[0].arrival
    tokens = sum(prompt.tokens for prompt in prompts)
    limit = best(prompts)
    for count, cache in itertools.product(args.workers, args.cache):
        speed = args.busy * count * args.rate * seconds / tokens
        ids = [WorkerId(f"prefill-{index}", "i") for index in range(count)]
        found = {}
        for name, index in (("near its cache", args.index), ("by load only", 0)):
            workers = [Worker(id_, cache // BLOCK, args.rate) for id_ in ids]
            indexes = [PrefixIndex(index) for _ in range(args.routers)]
            found[name] = replay(prompts, workers, indexes, speed)
        for name, result in found.items():
            line = {
                "workers": count,
                "cache_tokens": cache,
                "placement": name,
                "hit_share": round(result.hit_share, 4),
                "of_best_possible": round(result.hit_share / limit, 3),
                "asked": SHARE_ASKED,
                "first_token_seconds_p50": round(result.wait_p50, 3),
                "first_token_seconds_p99": round(result.wait_p99, 3),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
