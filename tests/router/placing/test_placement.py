"""Placement: which workers take a request."""

from collections import Counter
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.internal.v1.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, RouterHello, Sampling, Submit
from kvrelay.router.placing.placement import (
    AHEAD_PROMPTS,
    DecodeCapacity,
    Demand,
    NoPlace,
    Placement,
    WorkerRole,
    WorkerView,
    complete,
)
from kvrelay.router.placing.policies import TRANSFER_SHARE, WORK_WEIGHT, LeastWork
from kvrelay.router.placing.prefixes import PrefixIndex
from kvrelay.router.placing.worker_stream import WorkerStream
from kvrelay.rpc.identity import WorkerId
from support.router_fakes import entries
from support.secrets import credentials

SOMEBODY = 1
"""Id of a holder of cached prompts."""
ROLES: list[WorkerRole] = ["prefill", "decode", "colocated"]


@st.composite
def views(draw: st.DrawFn) -> list[WorkerView]:
    return [
        WorkerView(
            WorkerId(f"w{index}", "i"),
            draw(st.sampled_from(ROLES)),
            ready=draw(st.booleans()),
            outstanding_tokens=draw(st.integers(0, 5)),
            pending_tokens=draw(st.integers(0, 5)),
            running=draw(st.integers(0, 1)),
        )
        for index in range(draw(st.integers(0, 8)))
    ]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[WorkerView], Demand]:
    workers = draw(views())
    keys = [worker.id for worker in workers]
    avoid = frozenset(draw(st.lists(st.sampled_from(keys)))) if keys else frozenset()
    return workers, Demand(draw(st.integers(1, 99)), draw(st.integers(0, 9)), avoid)


@settings(max_examples=150)
@given(cases())
def test_only_ready_workers_of_the_right_role_and_the_least_loaded_of_them(
    case: tuple[list[WorkerView], Demand],
) -> None:
    workers, demand = case
    by_key = {worker.id: worker for worker in workers}
    placement = LeastWork(PrefixIndex(0)).place(demand, workers)
    ready = [worker for worker in workers if worker.ready]
    of = {role: [worker for worker in ready if worker.role == role] for role in ROLES}
    options = [[worker] for worker in of["colocated"]]
    if demand.decode_tokens:
        options += [[first, second] for first in of["prefill"] for second in of["decode"]]
    else:
        options += [[worker] for worker in of["prefill"]]
    if not options and not of["prefill"]:
        options = [[worker] for worker in of["decode"]]
    if isinstance(placement, NoPlace):
        assert placement is NoPlace.NO_WORKERS
        assert not options
        return
    chosen = [by_key[key] for key in placement.workers]
    assert sorted(worker.id for worker in chosen) in [sorted(worker.id for worker in option) for option in options]
    assert placement.decode is not None or not demand.decode_tokens

    def cost(option: list[WorkerView]) -> tuple[int, int]:
        sent = demand.prompt_tokens // TRANSFER_SHARE if len(option) == 2 else 0
        avoided = sum(worker.id in demand.avoid for worker in option)
        return avoided, sum(worker.work for worker in option) + WORK_WEIGHT * sent

    assert cost(chosen) == min(map(cost, options))
    assert complete(workers) or not demand.decode_tokens


@pytest.mark.parametrize(("avoided", "expected"), [((), "far"), (("far",), "near"), (("far", "near"), "far")])
def test_the_streams_own_degree_goes_before_load_and_behind_what_is_to_be_avoided(
    avoided: tuple[str, ...], expected: str
) -> None:
    prefill = WorkerView(WorkerId("p", "i"), "prefill", ready=True, degree=(4, 1))
    near = WorkerView(WorkerId("near", "i"), "decode", ready=True)
    far = WorkerView(WorkerId("far", "i"), "decode", ready=True, running=9, degree=(2, 1))
    avoid = frozenset(WorkerId(name, "i") for name in avoided)
    demand = Demand(9, 5, avoid, degrees={"prefill": (1, 1), "decode": (2, 1)})
    placement = LeastWork(PrefixIndex(0)).place(demand, [prefill, near, far])
    assert placement == Placement(prefill.id, WorkerId(expected, "i"))


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3), st.integers(1, 5))
def test_equal_workers_are_taken_in_turn(prefills: int, decodes: int, colocated: int, rounds: int) -> None:
    workers = [
        WorkerView(WorkerId(f"{role}-{index}", "i"), role, ready=True)
        for role, count in zip(ROLES, (prefills, decodes, colocated), strict=True)
        for index in range(count)
    ]
    policy = LeastWork(PrefixIndex(0))
    taken: Counter[str] = Counter()
    for _ in range(rounds * prefills * decodes * (colocated + 1) * 2):
        placement = policy.place(Demand(10, 5), workers)
        assert isinstance(placement, Placement)
        policy.take(placement, ())
        taken.update(key.name for key in placement.workers)
    for role in ROLES:
        counts = [taken[worker.id.name] for worker in workers if worker.role == role]
        assert not counts or max(counts) - min(counts) <= 1


def test_the_turn_of_a_worker_is_forgotten_with_it() -> None:
    policy = LeastWork(PrefixIndex(0))
    for life in range(50):
        worker = WorkerView(WorkerId("colocated-0", str(life)), "colocated", ready=True)
        placement = policy.place(Demand(1, 1), [worker])
        assert isinstance(placement, Placement)
        policy.take(placement, ())
    assert entries(policy) <= 2, "of the worker that is left"


@st.composite
def capacities(draw: st.DrawFn) -> DecodeCapacity:
    total = draw(st.integers(1, 80))
    growth = draw(st.integers(0, 20))
    return DecodeCapacity(
        block_size=4,
        total=total,
        free=draw(st.integers(0, total)),
        free_slots=draw(st.integers(0, 4)),
        promised_requests=draw(st.integers(0, 4)),
        promised_blocks=draw(st.integers(0, 20)),
        growth_blocks=growth,
        ending_requests=draw(st.integers(0, 2)),
        ending_blocks=draw(st.integers(0, 20)),
        yielding_requests=draw(st.integers(0, 2)),
        yielding_blocks=draw(st.integers(0, 20)),
        yielding_growth_blocks=draw(st.integers(0, growth)),
        holdings=draw(st.dictionaries(st.sampled_from((SOMEBODY, 2, 3)), st.integers(0, 40))),
    )


@settings(max_examples=150)
@given(
    st.lists(capacities(), min_size=1, max_size=4),
    st.builds(
        Demand,
        st.integers(1, 80),
        st.just(80),
        expected_tokens=st.integers(1, 80),
        holder=st.sampled_from((0, SOMEBODY)),
        begun=st.booleans(),
        yields=st.booleans(),
    ),
    st.floats(0, 1),
    st.integers(0, 80),
)
def test_a_request_goes_only_where_its_growth_fits_or_soon_will_and_prefill_can_keep_its_prompt(
    capacities: list[DecodeCapacity], demand: Demand, share: float, prefill_blocks: int
) -> None:
    prefill = WorkerView(WorkerId("p", "i"), "prefill", ready=True, kv_tokens=4 * prefill_blocks)
    decodes = [
        WorkerView(WorkerId(f"d{index}", "i"), "decode", ready=True, capacity=capacity)
        for index, capacity in enumerate(capacities)
    ]
    prompt = -(-(demand.prompt_tokens + 1) // 4)
    whole = prompt if demand.begun else -(-(demand.prompt_tokens + demand.expected_tokens) // 4)

    def fits(capacity: DecodeCapacity, ending: int, blocks: int) -> bool:
        total, reserve, growth = capacity.total, capacity.total // 8, capacity.growth_blocks
        if not demand.yields:
            # Those that yield are preempted for it; those that end soon may be the same.
            ending, blocks = max(ending, capacity.yielding_requests), max(blocks, capacity.yielding_blocks)
            growth -= capacity.yielding_growth_blocks
        free = capacity.free - capacity.promised_blocks + blocks
        need, own, kept = min(whole, total), capacity.holdings.get(demand.holder, 0), 0
        little = sum(held for held in capacity.holdings.values() if held <= reserve)
        few = demand.holder and own + need <= reserve and little + need <= reserve
        if not demand.begun and not (few and not demand.yields):
            # Only who takes a part of the reserve has what others will grow into.
            free -= growth
        if demand.holder and not demand.begun and own + need > reserve:
            # Who takes much leaves the reserve to those who take little.
            need, kept = min(need, total - reserve), max(0, reserve - little)
        if demand.yields and not demand.begun:
            # As much again for more urgent requests.
            kept += reserve
            need = min(need, total - kept)
        return need + kept <= free and capacity.promised_requests < capacity.free_slots + ending

    def may(capacity: DecodeCapacity) -> bool:
        idle = capacity.free == capacity.total and capacity.promised_requests == 0
        kept = share * (4 * prefill_blocks / len(capacities))
        ahead = 4 * (capacity.promised_blocks + min(prompt, capacity.total)) <= kept
        soon = fits(capacity, capacity.ending_requests, capacity.ending_blocks)
        return idle or fits(capacity, 0, 0) or (soon and ahead)

    placed = LeastWork(PrefixIndex(0), share).place(demand, [prefill, *decodes])
    if isinstance(placed, NoPlace):
        assert placed is NoPlace.NO_CAPACITY
        assert not any(may(capacity) for capacity in capacities)
    else:
        assert placed.decode is not None
        assert may(capacities[int(placed.decode.name[1:])])


def test_a_single_token_needs_no_capacity_on_decode() -> None:
    full = DecodeCapacity(block_size=4, total=8, free=0, free_slots=0, promised_requests=3, promised_blocks=9)
    workers = [
        WorkerView(WorkerId("p", "i"), "prefill", ready=True, kv_tokens=32),
        WorkerView(WorkerId("d", "i"), "decode", ready=True, capacity=full),
    ]
    assert isinstance(LeastWork(PrefixIndex(0)).place(Demand(5, 0), workers), Placement)
    assert LeastWork(PrefixIndex(0)).place(Demand(5, 1), workers) is NoPlace.NO_CAPACITY
    assert LeastWork(PrefixIndex(0)).place(Demand(5, 1), workers[:1]) is NoPlace.NO_WORKERS
    assert LeastWork(PrefixIndex(0)).place(Demand(5, 0), workers[1:]) is NoPlace.NO_CAPACITY, "decode computes it"


def test_a_prefill_worker_gets_few_prompts_ahead_however_short_they_are() -> None:
    def placed(running: int, role: WorkerRole = "prefill") -> Placement | NoPlace:
        workers = [
            WorkerView(WorkerId("w", "i"), role, ready=True, running=running),
            WorkerView(WorkerId("d", "i"), "decode", ready=True, running=100),
        ]
        return LeastWork(PrefixIndex(0), ahead_tokens=8192).place(Demand(1, 5), workers)

    assert isinstance(placed(AHEAD_PROMPTS - 1), Placement)
    assert placed(AHEAD_PROMPTS) is NoPlace.NO_CAPACITY
    assert isinstance(placed(100, "colocated"), Placement), "most of these decode"


def test_one_that_yields_gets_half_of_the_prompts_ahead() -> None:
    def placed(pending: int, running: int, yields: bool) -> bool:
        workers = [
            WorkerView(WorkerId("p", "i"), "prefill", ready=True, pending_tokens=pending, running=running),
            WorkerView(WorkerId("d", "i"), "decode", ready=True),
        ]
        demand = Demand(1, 5, yields=yields)
        return isinstance(LeastWork(PrefixIndex(0), ahead_tokens=8192).place(demand, workers), Placement)

    assert placed(4095, AHEAD_PROMPTS // 2 - 1, yields=True)
    assert not placed(4096, 1, yields=True)
    assert not placed(1, AHEAD_PROMPTS // 2, yields=True)
    assert placed(8191, AHEAD_PROMPTS - 1, yields=False)


def test_what_another_router_has_placed_counts_as_if_this_one_had() -> None:
    workers = [WorkerView(WorkerId(f"p{number}", "i"), "prefill", ready=True, kv_tokens=10**6) for number in range(3)]
    chain = list(range(1, 21))
    policy = LeastWork(PrefixIndex(10**6))
    for worker in workers:
        policy.learn(worker.id, chain, 0, 16, lambda: workers)
        chosen = policy.place(Demand(700, 0, chain=chain), workers)
        assert isinstance(chosen, Placement)
        assert chosen.prefill == worker.id
        chain = [unit + 100 for unit in chain]


def test_load_is_what_runs_and_what_is_to_compute_not_what_may_be_generated() -> None:
    def load(*submits: Submit) -> int:
        stream = WorkerStream(WorkerId("w", "i"), "", credentials("router"), RouterHello(), lambda: None)
        for submit in submits:
            stream.submit(submit, mock.Mock(), cached_tokens=30)
        view = WorkerView(
            stream.worker,
            "decode",
            True,
            outstanding_tokens=stream.outstanding_tokens,
            pending_tokens=stream.pending_tokens,
            running=stream.running,
        )
        return view.work

    def decode(number: int, max_tokens: int) -> Submit:
        sampling = Sampling(max_tokens=max_tokens)
        return Submit(request_id=str(number), phase=PHASE_DECODE, token_ids=[1] * 50, sampling=sampling)

    assert load(decode(1, 10)) == load(decode(1, 100_000)) < load(decode(1, 2), decode(2, 2))
    prefill = Submit(request_id="p", phase=PHASE_PREFILL, token_ids=[1] * 50)
    assert load(prefill) == load(decode(1, 1)) + 20, "of the prompt, what is not in the worker's cache"
