"""The router's view of workers' caches: its own placements, in bounded memory, corrected by the workers' reports."""

import asyncio
import itertools
import random
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.placing.placement import Demand, Placement, WorkerView
from kvrelay.router.placing.policies import LeastWork
from kvrelay.router.placing.prefixes import UNIT, PrefixIndex, chain_of
from kvrelay.rpc.identity import WorkerId

ONE, TWO = WorkerId("prefill-0", "i"), WorkerId("prefill-1", "i")
POOL = 64 * UNIT


def chain(tokens: Sequence[int], namespace: str = "") -> Sequence[int]:
    return asyncio.run(chain_of(array("I", tokens), namespace))


@given(st.lists(st.integers(0, 2), max_size=300), st.lists(st.integers(0, 2), max_size=300))
def test_chains_have_the_common_prefix_of_their_prompts_in_whole_units(first: list[int], second: list[int]) -> None:
    same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))
    ours, theirs = chain(first), chain(second)
    assert len(ours) == len(first) // UNIT
    common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))))
    assert common == min(same // UNIT, len(ours), len(theirs))


def test_tenants_and_salts_share_nothing() -> None:
    prompt = list(range(200))
    chains = [chain(prompt, namespace) for namespace in ("", "a", "b", "a\0salt")]
    assert len({unit for each in chains for unit in each}) == sum(map(len, chains))


class WorkerCache:
    """A worker's cache of units: the least recently used goes first, the end of a prompt before its beginning."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.units: OrderedDict[int, None] = OrderedDict()

    def compute(self, chain: Sequence[int]) -> int:
        """Returns the tokens that were there."""
        found = len(list(itertools.takewhile(self.units.__contains__, chain)))
        for unit in reversed(chain):
            self.units[unit] = None
            self.units.move_to_end(unit)
        while len(self.units) > self.size:
            self.units.popitem(last=False)
        return found * UNIT


def prompts(rng: random.Random, count: int) -> list[Sequence[int]]:
    """Chains of conversations, each prompt a former one with some units more."""
    fresh = itertools.count(1)
    known: list[list[int]] = [[]]
    for _ in range(count):
        former = rng.choice(known)
        known.append([*former[: rng.randrange(len(former) + 1)], *itertools.islice(fresh, rng.randrange(1, 9))])
    return known[1:]


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_one_router_knows_exactly_what_its_worker_has(seed: int) -> None:
    rng = random.Random(seed)
    index, cache = PrefixIndex(10**6), WorkerCache(64)
    index.keep([(ONE, POOL)])
    for prompt in prompts(rng, 60):
        expected = index.expect(ONE, prompt)
        assert expected.tokens == min(cache.compute(prompt), len(prompt) * UNIT)
        expected.reported(expected.tokens, UNIT)
        expected.end()
    assert len(index) <= 64


def test_what_another_router_has_displaced_is_forgotten_with_all_that_is_older() -> None:
    index, cache = PrefixIndex(10**6), WorkerCache(64)
    index.keep([(ONE, POOL)])

    def place(prompt: Sequence[int]) -> None:
        expected = index.expect(ONE, prompt)
        expected.reported(cache.compute(prompt), UNIT)
        expected.end()

    old, middle, new = ([at * 100 + unit for unit in range(10)] for at in (1, 2, 3))
    for prompt in (old, middle, new):
        place(prompt)
    cache.compute(list(range(1000, 1040)))
    assert [index.find(ONE, prompt) // UNIT for prompt in (old, middle, new)] == [10, 10, 10]
    place([*middle[:5], 7])
    assert [index.find(ONE, prompt) // UNIT for prompt in (old, middle, new)] == [10, 10, 10], "it was there"
    cache.compute(list(range(2000, 2040)))
    place(middle)
    assert [index.find(ONE, prompt) // UNIT for prompt in (old, middle, new)] == [0, 10, 10], "new is younger"


def test_a_prompt_that_is_being_computed_is_no_evidence_of_eviction() -> None:
    index = PrefixIndex(10**6)
    index.keep([(ONE, POOL)])
    old, new = list(range(1, 5)), list(range(10, 20))
    first = index.expect(ONE, old)
    first.reported(0, UNIT)
    running, beside = index.expect(ONE, new), index.expect(ONE, new)
    assert beside.tokens == len(new) * UNIT
    beside.reported(0, UNIT)
    assert index.find(ONE, old) == len(old) * UNIT, "both were computed at the same time; nothing was evicted"
    running.reported(0, UNIT)
    later = index.expect(ONE, new)
    later.reported(0, UNIT)
    assert index.find(ONE, old) == 0, "what was used before is gone, too"


def test_what_was_not_computed_is_not_expected() -> None:
    index = PrefixIndex(10**6)
    index.keep([(ONE, POOL)])
    index.expect(ONE, [1, 2]).reported(0, UNIT)
    lost = index.expect(ONE, [1, 2, 3, 4])
    lost.end()
    assert index.find(ONE, [1, 2, 3, 4]) == 2 * UNIT


def test_an_incarnation_takes_what_is_known_of_it_along() -> None:
    index = PrefixIndex(10**6)
    index.keep([(ONE, POOL), (TWO, POOL)])
    running = index.expect(ONE, [1, 2, 3])
    index.keep([(WorkerId(ONE.name, "new"), POOL), (TWO, POOL)])
    running.reported(0, UNIT)
    running.end()
    assert len(index) == index.find(ONE, [1]) == index.find(WorkerId(ONE.name, "new"), [1]) == 0


@given(st.integers(0, 100), st.lists(st.integers(1, 60), max_size=20))
def test_memory_is_bounded(units: int, lengths: list[int]) -> None:
    index = PrefixIndex(units * UNIT)
    workers = [WorkerId(f"w{at}", "i") for at in range(3)]
    fresh = itertools.count(1)
    for at, length in enumerate(lengths):
        index.keep([(worker, POOL) for worker in workers])
        index.expect(workers[at % 3], list(itertools.islice(fresh, length))).reported(0, UNIT)
        assert len(index) <= units


def view(worker: WorkerId, load: int = 0) -> WorkerView:
    return WorkerView(worker, "prefill", ready=True, kv_tokens=10**6, pending_tokens=load)


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("routers", [1, 3])
def test_a_repeated_prompt_goes_where_it_was_computed(count: int, routers: int) -> None:
    """Whichever router it comes to: idle workers are equal to all of them, and a prompt has one order of workers."""
    rng = random.Random(count)
    workers = [view(WorkerId(f"prefill-{at}", "i")) for at in range(count)]
    indexes = [PrefixIndex(10**6) for _ in range(routers)]
    policies = [LeastWork(index) for index in indexes]
    taken = set()
    for _ in range(20):
        prompt = chain([rng.randrange(4096) for _ in range(1500)])
        places = set()
        for router in itertools.islice(itertools.cycle(range(routers)), 4):
            place = policies[router].place(Demand(1500, 0, chain=prompt, key=prompt[-1]), workers)
            assert isinstance(place, Placement)
            indexes[router].expect(place.prefill, prompt).reported(0, UNIT)
            places.add(place.prefill)
        assert len(places) == 1
        taken |= places
    assert len(taken) >= min(count, 4), "different prompts are spread"


def test_a_worker_with_the_prompt_is_left_when_its_queue_costs_more() -> None:
    index = PrefixIndex(10**6)
    policy = LeastWork(index)
    prompt = chain(list(range(1500)))
    demand = Demand(1500, 0, chain=prompt, key=prompt[-1])
    idle = [view(ONE), view(TWO)]
    first = policy.place(demand, idle)
    assert isinstance(first, Placement)
    index.expect(first.prefill, prompt).reported(0, UNIT)
    for load, same in ((1000, True), (100_000, False)):
        place = policy.place(demand, [view(worker.id, load * (worker.id == first.prefill)) for worker in idle])
        assert isinstance(place, Placement)
        assert (place.prefill == first.prefill) == same


def test_a_session_prefers_one_of_equal_workers_and_survives_the_loss_of_another() -> None:
    workers = [view(WorkerId(f"prefill-{at}", "i")) for at in range(5)]
    for key in range(1, 40):
        place = LeastWork(PrefixIndex(0)).place(Demand(9, 0, key=key), workers)
        assert isinstance(place, Placement)
        for lost in workers:
            left = [worker for worker in workers if worker is not lost]
            again = LeastWork(PrefixIndex(0)).place(Demand(9, 0, key=key), left)
            assert (again == place) == (lost.id != place.prefill)
