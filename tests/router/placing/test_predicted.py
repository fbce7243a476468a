"""Placement by predicted cost: the rules hold whatever the costs say, and what costs less is chosen."""

import math
import random
from array import array
from collections import Counter
from dataclasses import replace
from itertools import product
from operator import itemgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.costs.handoff import KvBytes, LinkCost
from kvrelay.costs.predict import Pace, WorkerLoad, exposed_seconds
from kvrelay.costs.step import StepCost, StepWork
from kvrelay.costs.worker import WorkerCosts
from kvrelay.router.config import PlacementName
from kvrelay.router.placing import groups
from kvrelay.router.placing.placement import DecodeCapacity, Demand, NoPlace, Placement, WorkerView, complete
from kvrelay.router.placing.policies import LeastWork
from kvrelay.router.placing.predicted import (
    CANDIDATES,
    DECODE_WEIGHT,
    MOST_STEPS,
    PREFILL_WEIGHT,
    PredictedCost,
    policy_of,
)
from kvrelay.router.placing.prefixes import UNIT, PrefixIndex, extended
from kvrelay.rpc.identity import WorkerId, WorkerRole

STEP = StepCost(6e-3, 2e-5, 2e-9, 0.0, 7e-3, 5e-5, 4e-10)
"""About an 8B model on a large GPU: a step reads the weights in 6 ms."""
COSTS = WorkerCosts(STEP, chunk=2048, kv=KvBytes(131072.0), links={"prefill-0": LinkCost(2e-3, 2e-10)})
NAMES: list[PlacementName] = ["predicted", "least_work", "round_robin", "random"]


def scaled(costs: WorkerCosts, factor: float) -> WorkerCosts:
    """Costs of a worker that takes `factor` times as long for its steps."""
    step = costs.step
    names = ("fixed", "sequence", "context", "guess", "prompt_fixed", "token", "pair")
    return replace(costs, step=StepCost(*[factor * getattr(step, name) for name in names]))


def worker(
    name: str, role: WorkerRole, costs: WorkerCosts | None = COSTS, running: int = 0, free: int = 4096
) -> WorkerView:
    capacity = None if role == "prefill" else DecodeCapacity(16, 4096, free, 256)
    pending = 300 * running if role == "prefill" else 0
    return WorkerView(
        WorkerId(name, "i"),
        role,
        True,
        running=running,
        pending_tokens=pending,
        kv_tokens=65536,
        capacity=capacity,
        costs=costs,
    )


seconds = st.floats(0, 1e-2)
all_costs = st.builds(
    WorkerCosts,
    st.builds(StepCost, *[seconds] * 7),
    chunk=st.integers(1, 4096),
    step_seconds=st.sampled_from([0.0, 1e-3, 0.05]),
    kv=st.builds(KvBytes, st.floats(0, 1e6)),
    links=st.dictionaries(st.sampled_from(["w0", "w1", "w2"]), st.builds(LinkCost, seconds, st.floats(0, 1e-8))),
)


@st.composite
def fleets(draw: st.DrawFn, *, known: bool) -> list[WorkerView]:
    found, names = [], [WorkerId(f"w{index}", "i") for index in range(8)]
    for name in names[: draw(st.integers(1, 8))]:
        role: WorkerRole = draw(st.sampled_from(["prefill", "decode", "colocated"]))
        room = st.builds(DecodeCapacity, st.just(4), st.just(64), st.integers(0, 64), st.integers(0, 2))
        found.append(
            WorkerView(
                name,
                role,
                draw(st.sampled_from([True, True, False])),
                outstanding_tokens=draw(st.integers(0, 500)),
                pending_tokens=draw(st.integers(0, 500)),
                running=draw(st.integers(0, 20)),
                kv_tokens=256,
                capacity=None if role == "prefill" else draw(st.none() | room),
                compatibility=draw(st.sampled_from(["a", "a", "b"])),
                avoided=draw(st.booleans()),
                bad_peers=draw(st.frozensets(st.sampled_from(names))) if role == "prefill" else frozenset(),
                requests=draw(st.integers(0, 1)),
                suspects=draw(st.integers(0, 1)),
                costs=draw(all_costs) if known else None,
            )
        )
    return found


@st.composite
def demands(draw: st.DrawFn, workers: list[WorkerView]) -> Demand:
    return Demand(
        draw(st.integers(1, 200)),
        draw(st.integers(0, 50)),
        frozenset(draw(st.lists(st.sampled_from([each.id for each in workers]), max_size=3))),
        on_trial=draw(st.booleans()),
        chain=array("Q", draw(st.lists(st.integers(1, 5), max_size=4, unique=True))),
        key=draw(st.integers(0, 3)),
        expected_tokens=draw(st.integers(0, 60)),
        begun=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn, *, known: bool = True) -> tuple[list[WorkerView], Demand]:
    workers = draw(fleets(known=known))
    return workers, draw(demands(workers))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=200)
@given(case=cases())
@pytest.mark.some(2)
def test_a_wrong_cost_costs_time_and_breaks_no_rule(name: PlacementName, case: tuple[list[WorkerView], Demand]) -> None:
    workers, demand = case
    by_id = {each.id: each for each in workers}
    index = PrefixIndex(10**4)
    policy = policy_of(name, index, 0.25, 600)
    # Twice, as what was seen before must not matter.
    policy.place(demand, [replace(each, suspects=0, avoided=False) for each in workers])
    placed = policy.place(demand, workers)
    ready = [each for each in workers if each.ready]
    options = [(a, b) for a, b in product(ready, ready) if (a.role, b.role) == ("prefill", "decode")]
    options = [(a, b) for a, b in options if a.compatibility == b.compatibility]
    options += [(each, each) for each in ready if each.role == "colocated"]
    # A decode worker computes prompts itself if nobody else can.
    options = options or [(each, each) for each in ready if each.role == "decode"]
    assert complete(workers) == bool(options)

    def harmless(pair: tuple[WorkerView, WorkerView]) -> bool:
        a, b = pair
        trouble = a.avoided or b.avoided or b.id in a.bad_peers
        return not trouble and not (demand.on_trial and (a.suspects or b.suspects))

    room = [(a, b) for a, b in options if b.capacity is None or b.capacity.fits(demand)]
    good = [pair for pair in room if harmless(pair)]
    if isinstance(placed, NoPlace):
        decoding = any(each.role != "prefill" for each in ready)
        assert placed is NoPlace.NO_CAPACITY or not decoding or demand.decode_tokens == 0
        assert not good or any(each.busy(600) for each in workers)
        return
    chosen = [by_id[each] for each in placed.each]
    roles = [each.role for each in chosen]
    first, last = chosen[0], chosen[-1]
    assert all(each.ready for each in chosen)
    assert len({each.compatibility for each in chosen}) == 1
    assert roles in (["prefill", "decode"], ["decode"], ["colocated"]) or (
        roles == ["prefill"] and placed.decode is None
    )
    assert (placed.decode is None) == (roles == ["prefill"])
    assert not first.busy(600)
    if demand.decode_tokens and last.capacity is not None:
        soon = roles == ["prefill", "decode"]
        assert last.capacity.fits(demand) or (soon and last.capacity.fits(demand, soon=True))
    if demand.on_trial:
        assert not any(each.suspects for each in chosen)
    if not demand.decode_tokens:
        return
    assert harmless((first, last)) or not good
    good = [pair for pair in good if pair[0].compatibility == first.compatibility]
    if any(not {a.id, b.id} & demand.avoid for a, b in good):
        assert not set(placed.each) & demand.avoid


@settings(max_examples=100)
@given(cases(known=False))
def test_without_costs_the_least_work_decides(case: tuple[list[WorkerView], Demand]) -> None:
    workers, demand = case
    placed = PredictedCost(PrefixIndex(0), 0.25, 600).place(demand, workers)
    assert placed == LeastWork(PrefixIndex(0), 0.25, 600).place(demand, workers)


@settings(max_examples=150)
@given(
    st.integers(0, 2**32), st.sampled_from([["prefill", "decode"], ["colocated"], ["prefill", "decode", "colocated"]])
)
def test_a_strictly_cheaper_twin_is_chosen(seed: int, roles: list[WorkerRole]) -> None:
    rng = random.Random(seed)
    workers = [
        worker(f"{role}-{index}", role, scaled(COSTS, rng.uniform(0.5, 2)), rng.randint(0, 12))
        for role in roles
        for index in range(rng.randint(1, 12))
    ]
    policy, demand = (
        PredictedCost(PrefixIndex(0)),
        Demand(rng.randint(1, 8000), 99, expected_tokens=100, key=rng.getrandbits(64)),
    )
    before = policy.place(demand, workers)
    assert isinstance(before, Placement)
    for each in [view for view in workers if view.id in before.each]:
        assert each.costs is not None
        twin = replace(each, id=WorkerId("twin", "i"), costs=scaled(each.costs, 0.9))
        after = policy.place(demand, [*workers, twin])
        assert isinstance(after, Placement)
        assert twin.id in after.each


def straightforward(
    demand: Demand,
    workers: list[WorkerView],
    have: dict[WorkerId, int],
    order: dict[WorkerId, float],
    free: set[WorkerId],
) -> list[tuple[float, str, float, WorkerView]]:
    """The options among the candidates, the cheapest first: as `PredictedCost` is meant to choose, one worker after the
    other and without shortcuts.

    Args:
        free: workers that may compute the prompt.

    Returns:
        The cost of each option, the option in words, its cost up to the first token, and the worker that computes the
        prompt.
    """
    steps = min(MOST_STEPS, max(1, demand.expected_tokens - 1))
    context, stream = demand.prompt_tokens + steps / 2, DECODE_WEIGHT * steps
    numbers = {each.id: groups.numbers_of(each) for each in workers}

    def cached(each: WorkerView) -> int:
        return min(have[each.id], demand.prompt_tokens - 1)

    def pace(each: WorkerView) -> Pace:
        found = each.pace if demand.yields else each.urgent_pace
        assert found is not None
        return found

    def decode(each: WorkerView) -> float:
        figures = numbers[each.id]
        return stream * figures[groups.STEP] + stream * context * figures[groups.CONTEXT] + order[each.id]

    def estimate(each: WorkerView) -> float:
        figures, new = numbers[each.id], demand.prompt_tokens - cached(each)
        pairs = new * (demand.prompt_tokens - new / 2)
        work = figures[groups.FIRST] + new * figures[groups.TOKEN] + pairs * figures[groups.PAIR]
        found = figures[groups.WAIT if demand.yields else groups.URGENT_WAIT] + PREFILL_WEIGHT * work
        if each.role == "prefill":
            return found + order[each.id]
        return found + DECODE_WEIGHT * new * figures[groups.DELAY] + decode(each)

    def prompt(each: WorkerView) -> float:
        prefill = pace(each).prefill(demand.prompt_tokens - cached(each), cached(each))
        return pace(each).wait + PREFILL_WEIGHT * prefill.seconds + order[each.id]

    def alone(each: WorkerView) -> float:
        prefill = pace(each).prefill(demand.prompt_tokens - cached(each), cached(each))
        delay = groups.stall(prefill.delay, prefill.steps, pace(each).bounded) * pace(each).load.sequences
        return prompt(each) + decode(each) - order[each.id] + DECODE_WEIGHT * delay

    def pair(first: WorkerView, last: WorkerView) -> float:
        costs = pace(last).costs
        prefill = pace(first).prefill(demand.prompt_tokens - cached(first), cached(first))
        link = costs.link(first.id.name)
        return (
            prompt(first) + decode(last) + exposed_seconds(costs.kv, link, demand.prompt_tokens, cached(last), prefill)
        )

    def fits(each: WorkerView) -> bool:
        return each.capacity is None or each.capacity.fits(demand)

    def idle(each: WorkerView) -> bool:
        return each.id in free

    by_role = {role: [each for each in workers if each.role == role] for role in ("prefill", "decode", "colocated")}
    in_place = sorted(filter(fits, filter(idle, by_role["decode"])), key=estimate)[: CANDIDATES - 1]
    options = [(alone(each), f"in place {each.id.name}", prompt(each), each) for each in in_place]
    colocated = sorted(filter(fits, filter(idle, by_role["colocated"])), key=estimate)[:CANDIDATES]
    options += [(alone(each), f"co-located {each.id.name}", prompt(each), each) for each in colocated]
    lasts = {each.id: each for each in [*sorted(filter(fits, by_role["decode"]), key=decode)[:CANDIDATES], *in_place]}
    firsts = sorted(filter(idle, by_role["prefill"]), key=estimate)[:CANDIDATES]
    options += [(pair(a, b), f"pair {a.id.name} {b.id.name}", prompt(a), a) for a, b in product(firsts, lasts.values())]
    return sorted(options, key=itemgetter(0))


@settings(max_examples=30)
@given(
    st.integers(0, 2**32),
    st.sampled_from([["prefill", "decode"], ["colocated"], ["prefill", "decode", "colocated"]]),
    st.sampled_from([4, 4, 150]),
)
def test_the_choice_is_that_without_shortcuts(seed: int, roles: list[WorkerRole], most: int) -> None:
    """After each change of some loads, whatever prefixes workers have and whoever has room. A request waits for a
    worker that has enough to do only if others would cost it more up to its first token."""
    rng = random.Random(seed)

    def view(name: str, role: WorkerRole) -> WorkerView:
        links = {
            f"prefill-{at}": LinkCost(rng.uniform(0, 1e-2), rng.uniform(0, 1e-9)) for at in range(rng.randint(0, 3))
        }
        costs = replace(
            scaled(COSTS, rng.uniform(0.5, 2)),
            links=links,
            step_seconds=rng.choice([0.0, 0.05]),
            chunk=rng.choice([300, 2048]),
        )
        free, total = rng.choice([(4096, 4096), (rng.randint(0, 4096), 4096)])
        capacity = DecodeCapacity(
            16, total, free, rng.randint(0, 3), rng.randint(0, 2), rng.randint(0, 99), rng.randint(0, 999)
        )
        return WorkerView(
            WorkerId(name, "i"),
            role,
            True,
            pending_tokens=rng.choice([0, rng.randint(0, 9000)]),
            yielding_tokens=rng.choice([0, rng.randint(0, 9000)]),
            running=rng.randint(0, 20 if role == "prefill" else 40),
            kv_tokens=65536,
            capacity=None if role == "prefill" or rng.random() < 0.1 else capacity,
            costs=costs,
        )

    workers = [view(f"{role}-{at}", role) for role in roles for at in range(rng.randint(1, most))]
    index = PrefixIndex(10**7)
    ahead = rng.choice([math.inf, 3000])
    policy = PredictedCost(index, 0.0, ahead)
    policy.place(Demand(1, 1), workers)
    whole = array("Q", range(1, 200))
    for _ in range(3):
        for at in rng.sample(range(len(workers)), rng.randint(0, len(workers))):
            workers[at] = view(workers[at].id.name, workers[at].role)
        for each in rng.sample(workers, rng.randint(0, len(workers))):
            index.note(each.id, whole[: rng.randint(0, len(whole))])
        chain = whole[: rng.randint(0, len(whole))]
        demand = Demand(
            UNIT * len(chain) + rng.randint(1, 3000),
            400,
            chain=chain,
            key=rng.getrandbits(64),
            expected_tokens=rng.randint(1, 400),
            yields=rng.random() < 0.5,
            holder=rng.randint(0, 1),
        )
        placed = policy.place(demand, workers)
        order = dict(zip([each.id for each in workers], policy._order_all(demand.key).tolist(), strict=True))
        have = {each.id: index.find(each.id, chain) for each in workers}
        options = straightforward(demand, workers, have, order, {each.id for each in workers})
        if options and options[0][3].busy(ahead, yields=demand.yields):
            free = {each.id for each in workers if not each.busy(ahead, yields=demand.yields)}
            best, options = options[0], straightforward(demand, workers, have, order, free)
            same = bool(options) and options[0][1].split()[0] == best[1].split()[0]
            options = options if same and options[0][2] <= best[2] else []
        if not options:
            assert isinstance(placed, NoPlace)
            continue
        assert isinstance(placed, Placement)
        assert placed.why is not None
        assert f"{placed.why.way} {' '.join(each.name for each in placed.each)}" == options[0][1]
        assert placed.why.runner_up == (options[1][1] if options[1:] else "")


def placed_by(policy: PredictedCost, demand: Demand, workers: list[WorkerView]) -> Placement:
    placed = policy.place(demand, workers)
    assert isinstance(placed, Placement)
    return placed


def test_equal_workers_take_turns_and_a_key_has_its_own() -> None:
    workers = [worker(f"prefill-{index}", "prefill") for index in range(16)]
    workers += [worker(f"decode-{index}", "decode", running=24) for index in range(16)]
    policy, taken = PredictedCost(PrefixIndex(0)), Counter[WorkerId]()
    for _ in range(32):
        placed = placed_by(policy, Demand(4000, 9, expected_tokens=10), workers)

        policy.take(placed, ())
        taken.update(placed.each)
    assert set(taken.values()) == {2}
    by_key = {policy.place(Demand(4000, 9, expected_tokens=10, key=key), workers) for key in range(1, 200)}
    assert len(by_key) > 100
    again = PredictedCost(PrefixIndex(0))
    for key in range(1, 20):
        demand = Demand(4000, 9, expected_tokens=10, key=key)
        assert policy.place(demand, workers) == again.place(demand, workers), "all routers find the same"


def test_the_next_turn_is_computed_where_the_answer_is_and_a_long_new_prompt_by_a_pair() -> None:
    workers = [worker("prefill-0", "prefill"), *[worker(f"decode-{index}", "decode", running=24) for index in range(4)]]
    policy = PredictedCost(PrefixIndex(10**6))
    first = Demand(4000, 99, chain=array("Q", range(1, 126)), expected_tokens=200)
    placed = placed_by(policy, first, workers)
    assert placed.prefill.name == "prefill-0"
    assert placed.decode is not None
    policy.take(placed, first.chain)
    answered = array("Q", range(1, 132))
    policy.answered(placed.decode, answered)
    turn = Demand(4300, 99, chain=array("Q", range(1, 135)), expected_tokens=200)
    again = placed_by(policy, turn, workers)
    assert again.each == (placed.decode,)
    assert again.why is not None
    assert again.why.way == "in place"
    assert again.why.runner_up.startswith(("pair", "in place"))
    other = placed_by(policy, Demand(4300, 99, chain=array("Q", range(900, 1034)), expected_tokens=200), workers)
    assert other.prefill.name == "prefill-0"


def test_fewer_prompts_are_computed_in_place_while_requests_wait_for_room() -> None:
    def in_place(free: int, waiting: int) -> int:
        """Number of prompts of growing length that decode-0 computes itself, if another one has so many blocks free."""
        workers = [
            replace(worker("prefill-0", "prefill"), pending_tokens=4000),
            worker("decode-0", "decode", running=24),
            worker("decode-1", "decode", running=200, free=free),
        ]
        demands = [Demand(tokens, 99, expected_tokens=200) for tokens in range(100, 6000, 100)]
        found = [PredictedCost(PrefixIndex(0), 0.0, 8192).place(demand, workers, waiting) for demand in demands]
        assert all(isinstance(each, Placement) and each.each[-1].name == "decode-0" for each in found)
        return sum([isinstance(each, Placement) and len(each.each) == 1 for each in found])

    assert 0 < in_place(free=0, waiting=20) < in_place(free=0, waiting=0)
    assert in_place(free=4000, waiting=20) == in_place(free=4000, waiting=0), "both have room"


def test_a_slow_link_and_a_slow_worker_are_left_to_others() -> None:
    slow = replace(COSTS, links={"prefill-0": LinkCost(2e-3, 1e-8), "prefill-1": LinkCost(2e-3, 1e-10)})
    workers = [worker("prefill-0", "prefill"), worker("prefill-1", "prefill"), worker("decode-0", "decode", slow, 20)]
    policy = PredictedCost(PrefixIndex(0))
    demand = Demand(8000, 99, expected_tokens=100)
    for key in range(1, 20):
        placed = placed_by(policy, replace(demand, key=key), workers)
        assert placed.prefill.name == "prefill-1"
    half = [worker("colocated-0", "colocated", scaled(COSTS, 2.0)), worker("colocated-1", "colocated", running=4)]
    placed = placed_by(policy, demand, half)
    assert placed.prefill.name == "colocated-1"


@settings(max_examples=100)
@given(
    st.builds(StepCost, *[seconds] * 7),
    st.integers(0, 4000),
    st.integers(0, 40),
    st.integers(1, 3000),
    st.sampled_from([0.0, 0.02]),
)
def test_more_to_do_is_never_predicted_to_take_less(
    step: StepCost, pending: int, sequences: int, tokens: int, bound: float
) -> None:
    costs = WorkerCosts(step, chunk=512, step_seconds=bound)
    context = 500 * sequences
    pace = Pace.of(costs, WorkerLoad(pending, 1, sequences, context))
    more = Pace.of(costs, WorkerLoad(pending + 100, 1, sequences, context))
    assert more.wait >= pace.wait * (1 - 1e-9) or not pending
    assert pace.prefill(tokens + 1, 0).seconds >= pace.prefill(tokens, 0).seconds * (1 - 1e-9) or bound
    assert pace.tpot(900) >= pace.tpot(800) >= step.fixed
    alone = Pace.of(costs, WorkerLoad())
    assert alone.prefill(tokens, 0).seconds == pytest.approx(step.prefill(tokens, 0, 512))
    assert alone.tpot(800) == pytest.approx(step.seconds(StepWork(sequences=1, context_tokens=800)))


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_what_all_workers_have_of_a_prompt_is_what_is_found_one_by_one(seed: int) -> None:
    """Whatever workers compute, evict and take back, and whichever of them come and go."""
    rng = random.Random(seed)
    ids = [WorkerId(f"w{at}", str(life)) for life in range(2) for at in range(5)]
    index, present, open_ = PrefixIndex(2000), ids[:3], []
    index.keep([(each, 600) for each in present])

    def chain() -> "array[int]":
        # A unit's digest names all before it.
        units = [rng.randint(1, 2) for _ in range(rng.randint(0, 12))]
        return array("Q", [hash(tuple(units[: end + 1])) % 2**64 for end in range(len(units))])

    for _ in range(60):
        match rng.randint(0, 4):
            case 0:
                present = rng.sample(ids, rng.randint(1, 6))
                index.keep([(each, rng.choice([300, 600])) for each in present])
            case 1:
                index.note(rng.choice(ids), chain())
            case 2:
                open_.append(index.expect(rng.choice(ids), chain()))
            case 3 if open_:
                open_.pop(rng.randrange(len(open_))).end()
            case 4 if open_:
                open_.pop(rng.randrange(len(open_))).reported(rng.randint(0, 100), 16)
        asked = chain()
        (least, _), *others = index.cached(asked)
        cached = dict.fromkeys(range(len(present)), least)
        for tokens, rows in others:
            cached |= dict.fromkeys(rows, tokens)
        assert list(cached.values()) == [index.find(each, asked) for each in present]


def test_a_chain_goes_on_with_the_answer() -> None:
    tokens = array("I", range(5 * UNIT))
    whole = extended((), tokens, "tenant")
    assert len(whole) == 5
    begun = extended((), tokens[: 2 * UNIT], "tenant")
    assert extended(begun, tokens[2 * UNIT :], "tenant") == whole


@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_less_urgent_requests_hold_nobody_up(name: PlacementName) -> None:
    """A worker with a long prompt of a less urgent request takes an urgent one at once, and no further one of these."""
    policy = policy_of(name, PrefixIndex(0), 0.0, 8192)
    full = replace(worker("prefill-0", "prefill"), pending_tokens=100_000, yielding_tokens=100_000, running=1)
    workers = [full, replace(worker("decode-0", "decode"), pending_tokens=100_000)]
    urgent = Demand(4000, 99, expected_tokens=200)
    placed = policy.place(urgent, workers)
    assert isinstance(placed, Placement)
    assert placed.prefill == full.id
    assert policy.place(replace(urgent, yields=True), workers) is NoPlace.NO_CAPACITY
    if placed.why is not None and placed.why.predicted is not None:
        assert placed.why.predicted.ttft < 1.0
    same = replace(full, yielding_tokens=0)
    assert policy.place(urgent, [same, workers[1]]) is NoPlace.NO_CAPACITY
