"""Requests that wait in the router: each tenant gets its share, none starves or outlives its client."""

import asyncio
import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.config import Service
from kvrelay.router.placing.placement import Demand, NoPlace, Placement
from kvrelay.router.placing.queue import LEAST_TOKENS, LOOK_AHEAD, NO_CLAIM, OVERTAKEN, Claim, PlacementQueue, QueueFull
from kvrelay.rpc.identity import WorkerId

PLACE = Placement(WorkerId("p", "i"), WorkerId("d", "i"))
SOON = 20.0


class Line:
    """A queue whose policy is a number: a request is placed while that many tokens are free."""

    def __init__(self, free: int, max_waiting: int = 100) -> None:
        self.left = free
        self.queue = PlacementQueue(self._decide, max_waiting)
        self.placed: list[str] = []
        """Requests that were placed, in order."""
        self.decisions = 0

    def _decide(self, demand: Demand) -> Placement | NoPlace:
        self.decisions += 1
        return PLACE if demand.prompt_tokens <= self.left else NoPlace.NO_CAPACITY

    def ask(
        self, name: str, tokens: int, first: bool = False, claim: Claim = NO_CLAIM
    ) -> "asyncio.Task[str | NoPlace]":
        def start(placement: Placement) -> str:
            self.left -= tokens
            assert self.left >= 0, "the same capacity was given twice"
            self.placed.append(name)
            return name

        until = time.monotonic() + SOON
        return asyncio.create_task(self.queue.place(Demand(tokens, 1), until, start, claim, first=first))

    def free(self, tokens: int) -> None:
        self.left += tokens
        self.queue.wake()


async def settle(turns: int = 10) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_a_large_request_is_passed_by_small_ones_for_a_while_only() -> None:
    """The small ones use what the large one can't; then what becomes free is kept for it, and it isn't starved."""

    line = Line(free=10)
    large = line.ask("large", 12)
    await settle()
    tasks = [line.ask(f"small {number}", 2) for number in range(100)]
    for _ in range(200):
        await settle()
        if large.done():
            break
        line.free(2)
    assert large.done()
    assert OVERTAKEN * 12 <= 2 * line.placed.index("large") <= OVERTAKEN * 12 + 2
    line.free(1000)
    await asyncio.gather(*tasks)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(0, 2**32 - 1))
async def test_tenants_get_their_shares_however_much_each_asks_for(weights: list[int], seed: int) -> None:
    rng = random.Random(seed)
    line = Line(free=0, max_waiting=10**6)
    got = dict.fromkeys(range(len(weights)), 0)
    tasks = []
    total, most = 240 * LEAST_TOKENS, 0
    for tenant, weight in enumerate(weights):
        size = LEAST_TOKENS * rng.choice([1, 3, 8])
        most = max(most, size)
        for number in range(total // size):
            claim = Claim(str(tenant), weight)
            tasks.append(line.ask(f"{tenant} {size} {number}", size, claim=claim))
    await settle()
    line.free(total)
    await settle(500)
    for name in line.placed:
        tenant, size, _ = map(int, name.split())
        got[tenant] += size
    for tenant, weight in enumerate(weights):
        due = total * weight / sum(weights)
        assert abs(got[tenant] - due) <= most * (1 + weight), (got, weights)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_many_tiny_prompts_of_a_tenant_let_another_ones_pass() -> None:
    line = Line(free=0)
    tasks = [line.ask(f"tiny {number}", 2, claim=Claim("a")) for number in range(40)]
    tasks += [line.ask(f"usual {number}", 30, claim=Claim("b")) for number in range(3)]
    await settle()
    line.free(1000)
    await asyncio.gather(*tasks)
    assert line.placed.index("usual 2") <= 6


async def test_what_a_tenant_has_not_used_is_not_saved_up_and_what_it_generates_counts() -> None:
    line = Line(free=0)
    a, b = Claim("a"), Claim("b")
    first = line.ask("a", 100, claim=a)
    line.free(100)
    await first
    line.free(0)
    tasks = [line.ask(f"{claim.tenant}{number}", 10, claim=claim) for number in range(4) for claim in (a, b)]
    await settle()
    line.free(40)
    await settle()
    assert line.placed == ["a", "b0", "b1", "b2", "b3"], "after 100 tokens of a, it is b's turn"
    line.queue.used(b, 1000)
    line.free(1000)
    await asyncio.gather(*tasks)
    line.left = 0
    again = [line.ask(f"{claim.tenant} again", 10, claim=claim) for claim in (b, a)]
    await settle()
    line.free(10)
    await settle()
    assert line.placed[-1] == "a again", "b has generated a thousand tokens"
    line.free(10)
    await asyncio.gather(*again)


async def test_classes_share_what_their_tenant_gets_and_priority_decides_within_a_class() -> None:
    line = Line(free=0)
    chat, mail = (Claim("a", 1, Service(name, weight=weight)) for name, weight in (("chat", 3), ("mail", 1)))
    tasks = [line.ask(claim.service.name, 10, claim=claim) for claim in (mail, chat) for _ in range(8)]
    await settle()
    for _ in range(8):
        line.free(10)
        await settle()
    assert abs(line.placed.count("chat") - 6) <= 1
    line.free(1000)
    await asyncio.gather(*tasks)
    line.left = 0
    tasks = [line.ask(f"at {priority}", 1, claim=Claim(priority=priority)) for priority in (0, 5, -3, 0)]
    await settle()
    line.free(4)
    await asyncio.gather(*tasks)
    assert line.placed[-4:] == ["at -3", "at 0", "at 0", "at 5"]


BATCH = Service("batch", rank=1)
ANY_CLAIM = st.builds(
    Claim,
    service=st.sampled_from([Service(), Service("urgent", rank=-1), BATCH]),
    priority=st.integers(-2, 2),
    due=st.sampled_from([1.0, 2.0, math.inf]),
)


@settings(max_examples=60)
@given(st.lists(ANY_CLAIM, min_size=1, max_size=20))
async def test_a_tenants_requests_go_by_rank_then_priority_then_target_then_age(claims: list[Claim]) -> None:
    line = Line(free=0)
    tasks = [line.ask(str(number), 1, claim=claim) for number, claim in enumerate(claims)]
    await settle()
    for _ in claims:
        line.free(1)
        await settle()
    await asyncio.gather(*tasks)
    order = sorted(
        range(len(claims)), key=lambda at: (claims[at].service.rank, claims[at].priority, claims[at].due, at)
    )
    assert line.placed == list(map(str, order))


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(2, 4), st.integers(0, 2**32 - 1))
async def test_batch_gets_what_interactive_leaves_and_tenants_share_that_too(
    weight: int, tenants: int, seed: int
) -> None:
    """However many requests of a less urgent rank wait, and whatever tenant has them."""

    rng = random.Random(seed)
    line = Line(free=0, max_waiting=10**6)
    ranks = [Service(), BATCH]
    each = 12 * weight
    asked = [(tenant, rank) for tenant in range(tenants) for rank in (0, 1) for _ in range(each)]
    rng.shuffle(asked)
    tasks = [
        line.ask(f"{tenant} {rank}", LEAST_TOKENS, claim=Claim(str(tenant), 1 + tenant, ranks[rank]))
        for tenant, rank in asked
    ]
    await settle()
    for _ in range(each * tenants):
        line.free(LEAST_TOKENS)
        await settle(3)
    assert {name.split()[1] for name in line.placed} == {"0"}, "nothing of batch while others wait"
    placed = each * tenants // 2
    for _ in range(placed):
        line.free(LEAST_TOKENS)
        await settle(3)
    batch = line.placed[each * tenants :]
    assert len(batch) == placed
    # Of half of all, no tenant gets less than its share, unless it has all that it asked for.
    for tenant in range(tenants):
        due = min(each, placed * (1 + tenant) / sum(range(1, tenants + 1)))
        assert batch.count(f"{tenant} 1") >= math.floor(due) - 1 - tenant
    late = line.ask("late", LEAST_TOKENS, claim=Claim("another"))
    await settle()
    line.free(LEAST_TOKENS)
    assert await late == "late", "it goes before what waited for long"
    line.free(10**6)
    await asyncio.gather(*tasks)


async def test_batch_has_a_place_that_a_large_interactive_prompt_can_not_use() -> None:
    line = Line(free=3)
    large = line.ask("large", 10)
    small = line.ask("batch", 3, claim=Claim(service=BATCH))
    assert await small == "batch"
    line.free(10)
    assert await large == "large"


async def test_a_full_queue_refuses_batch_before_all_others() -> None:
    line = Line(free=0, max_waiting=3)
    batch = [line.ask(f"batch {number}", 1, claim=Claim("a", service=BATCH)) for number in range(2)]
    own = [line.ask(f"own {number}", 1, claim=Claim("b")) for number in range(2)]
    await settle()
    assert [task.done() for task in batch] == [False, True]
    with pytest.raises(QueueFull):
        await line.ask("batch of another", 1, claim=Claim("c", service=BATCH))
    own.append(line.ask("own 2", 1, claim=Claim("b")))
    await settle()
    assert [task.done() for task in batch] == [True, True]
    with pytest.raises(QueueFull):
        await line.ask("own 3", 1, claim=Claim("b"))
    line.free(10)
    assert len(await asyncio.gather(*own)) == 3
    await asyncio.gather(*batch, return_exceptions=True)


async def test_a_full_queue_refuses_the_tenant_with_most_requests() -> None:
    line = Line(free=0, max_waiting=4)
    many = [line.ask(f"a{number}", 1, claim=Claim("a")) for number in range(4)]
    await settle()
    with pytest.raises(QueueFull):
        await line.ask("a4", 1, claim=Claim("a"))
    few = [line.ask(f"b{number}", 1, claim=Claim("b")) for number in range(2)]
    await settle()
    assert [task.done() for task in many] == [False, False, True, True], "the latest gave way"
    with pytest.raises(QueueFull):
        await line.ask("b2", 1, claim=Claim("b"))
    line.free(10)
    outcomes = await asyncio.gather(*many, *few, return_exceptions=True)
    assert sum(isinstance(outcome, QueueFull) for outcome in outcomes) == 2
    assert sorted(line.placed) == ["a0", "a1", "b0", "b1"]


async def test_a_request_placed_again_goes_first() -> None:
    line = Line(free=0, max_waiting=1)
    tasks = [line.ask("new", 1)]
    await settle()
    tasks.append(line.ask("again", 1, first=True))
    await settle()
    line.free(1)
    await settle()
    assert line.placed == ["again"]
    line.free(1)
    await asyncio.gather(*tasks)


async def test_the_cancel_of_a_request_that_holds_others_back_wakes_them() -> None:
    line = Line(free=0)
    passed = [line.ask("big", 5), *(line.ask("small", 1) for _ in range(5 * OVERTAKEN))]
    small = line.ask("another", 1)
    await settle()
    for _ in range(5 * OVERTAKEN + 1):
        line.free(1)
        await settle()
    assert not small.done(), "nobody passes it any more"
    passed[0].cancel()
    assert await small == "another"
    assert len(line.queue) == 0


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
async def test_no_order_of_events_gives_capacity_twice_or_leaves_a_request_behind(seed: int) -> None:
    rng = random.Random(seed)
    line = Line(free=rng.randrange(6))
    tasks: dict[str, asyncio.Task[str | NoPlace]] = {}
    order: list[str] = []
    cancelled: set[str] = set()
    for number in range(40):
        match rng.randrange(4):
            case 0 | 1:
                name = str(number)
                tasks[name] = line.ask(name, rng.randrange(1, 5))
                order.append(name)
            case 2:
                line.free(rng.randrange(4))
            case 3 if tasks:
                name = rng.choice(list(tasks))
                if tasks[name].cancel():
                    cancelled.add(name)
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
    line.free(1000)
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert set(order) - cancelled <= set(line.placed)
    assert len(line.queue) == 0


async def test_equal_requests_keep_their_order_and_one_that_comes_or_goes_costs_no_new_look_at_the_others() -> None:
    """Only a change of the workers' state does, and then at a few of them."""
    line = Line(free=1, max_waiting=2000)
    tasks = [line.ask(str(number), 3) for number in range(1000)]
    await settle()
    assert len(line.queue) == 1000
    assert line.decisions == LOOK_AHEAD
    line.free(1)
    assert line.decisions == 2 * LOOK_AHEAD
    for task in tasks[:500]:
        task.cancel()
    await settle()
    assert len(line.queue) == 500
    assert line.decisions <= 2 * LOOK_AHEAD + 500, "each that is new among the first is looked at once"
    line.free(3 * 500)
    await asyncio.gather(*tasks[500:])
    assert line.placed == [str(number) for number in range(500, 1000)]


async def test_one_that_comes_after_a_change_without_a_word_passes_nobody() -> None:
    line = Line(free=0)
    first = line.ask("first", 3)
    await settle()
    line.left = 3
    second = line.ask("second", 3)
    await settle()
    assert line.placed == ["first"]
    line.free(3)
    await asyncio.gather(first, second)
