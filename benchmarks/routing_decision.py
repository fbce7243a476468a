"""Time of a decision of placement: from the state of all workers to the chosen ones (`routing.py decision`)."""

import itertools
import json
import random
import statistics
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace

from kvrelay.costs.handoff import KvBytes, LinkCost
from kvrelay.costs.step import StepCost
from kvrelay.costs.worker import WorkerCosts
from kvrelay.router.placing.placement import DecodeCapacity, Demand, WorkerView
from kvrelay.router.placing.policies import LeastWork
from kvrelay.router.placing.predicted import PredictedCost
from kvrelay.router.placing.prefixes import UNIT, PrefixIndex
from kvrelay.rpc.identity import WorkerId, WorkerRole

STEP = StepCost(6e-3, 2e-5, 2e-9, 0.0, 7e-3, 5e-5, 4e-10)
"""About an 8B model on a large GPU."""
INDEX_TOKENS = 2**31


def measure(prefixes: int, decisions: int) -> Iterator[dict[str, object]]:
    """CPU time of decisions at 32+32 and 500+500 workers, between which the loads of two workers change.

    Args:
        prefixes: prompts with a common beginning that a prefill and a decode worker each have in their caches.
        decisions: number of decisions that each policy makes.
    """
    for count, policy in itertools.product((32, 500), (PredictedCost, LeastWork)):
        seconds = sorted(seconds_of(count, policy, prefixes, decisions))
        found = {
            "workers": 2 * count,
            "placement": "predicted" if policy is PredictedCost else "least_work",
            "prefixes": prefixes,
            "decision_us_p50": round(1e6 * statistics.median(seconds), 1),
            "decision_us_p90": round(1e6 * seconds[int(0.9 * len(seconds))], 1),
            "decision_us_p99": round(1e6 * seconds[int(0.99 * len(seconds))], 1),
        }
        print(json.dumps(found), flush=True)
        yield found


def seconds_of(count: int, policy_class: type[LeastWork], prefixes: int, decisions: int) -> list[float]:
    """Seconds of CPU time of each decision at `count` prefill and as many decode workers."""
    rng = random.Random(0)

    def view(role: WorkerRole, at: int) -> WorkerView:
        links = {"prefill-0": LinkCost(2e-3, 1e-10)}
        costs = WorkerCosts(replace(STEP, token=rng.uniform(4e-5, 6e-5)), 2048, kv=KvBytes(131072.0), links=links)
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
    for number in range(prefixes):
        own = range(1000 * number + 1000, 1000 * number + 1000 + rng.randint(8, 60))
        chains.append(array("Q", [*range(1, 17), *own]))
        for side in (0, count):
            index.note(views[side + rng.randrange(count)].id, chains[-1])
    seconds = []
    for _ in range(decisions):
        chain = rng.choice(chains)
        tokens = UNIT * len(chain) + rng.randint(1, 300)
        demand = Demand(tokens, 400, chain=chain, key=chain[-1], expected_tokens=200)
        for at in (rng.randrange(count), count + rng.randrange(count)):
            views[at] = view(roles[at], at)
        began = time.process_time()
        policy.place(demand, views)
        seconds.append(time.process_time() - began)
    return seconds
