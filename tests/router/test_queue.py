"""Requests that wait in the router for decode capacity: in order, bounded, and gone at once when they are cancelled."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.placement import Demand, NoPlace, Placement
from kvrelay.router.queue import PlacementQueue, QueueFull
from kvrelay.rpc.identity import WorkerId

PLACE = Placement(WorkerId("p", "i"), WorkerId("d", "i"))
SOON = 20.0


class Budget:
    """A policy over a number: a request is placed while that many tokens are free."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.workers = True

    def decide(self, demand: Demand) -> Placement | NoPlace:
        if not self.workers:
            return NoPlace.NO_WORKERS
        return PLACE if demand.prompt_tokens <= self.free else NoPlace.NO_CAPACITY


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), SOON))


class Line:
    """A queue over a budget, and the requests that were placed, in order."""

    def __init__(self, free: int, max_waiting: int = 100) -> None:
        self.budget = Budget(free)
        self.queue = PlacementQueue(self.budget.decide, max_waiting)
        self.placed: list[str] = []

    def ask(self, name: str, tokens: int, seconds: float = SOON, first: bool = False) -> "asyncio.Task[str | NoPlace]":
        def start(placement: Placement) -> str:
            self.budget.free -= tokens
            assert self.budget.free >= 0, "the same capacity was given twice"
            self.placed.append(name)
            return name

        until = time.monotonic() + seconds
        return asyncio.create_task(self.queue.place(Demand(tokens, 1), until, start, first=first))

    def free(self, tokens: int) -> None:
        self.budget.free += tokens
        self.queue.wake_first()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_first_come_first_served_without_overtaking() -> None:
    async def test() -> None:
        line = Line(free=10)
        tasks = [line.ask("a", 8), line.ask("big", 9), line.ask("small", 1), line.ask("b", 2)]
        await settle()
        assert line.placed == ["a"]
        assert len(line.queue) == 3, "a small request that would fit stays behind the big one"
        line.free(8)
        await settle()
        assert line.placed == ["a", "big", "small"]
        line.free(8)
        await asyncio.gather(*tasks)
        assert line.placed == ["a", "big", "small", "b"]
        assert len(line.queue) == 0

    run(test)


def test_a_request_placed_again_goes_first() -> None:
    async def test() -> None:
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

    run(test)


def test_a_request_beyond_the_limit_is_refused_at_once() -> None:
    async def test() -> None:
        line = Line(free=0, max_waiting=2)
        tasks = [line.ask("a", 1), line.ask("b", 1)]
        await settle()
        with pytest.raises(QueueFull):
            await line.ask("c", 1)
        line.free(2)
        await asyncio.gather(*tasks)

    run(test)


def test_timeout_cancel_and_lost_workers_end_a_wait_and_wake_the_next() -> None:
    async def test() -> None:
        line = Line(free=0)
        started = time.monotonic()
        assert await line.ask("late", 1, seconds=0.05) is NoPlace.NO_CAPACITY
        assert time.monotonic() - started < 2
        big, small = line.ask("big", 5), line.ask("small", 1)
        await settle()
        line.free(1)
        await settle()
        assert not small.done()
        big.cancel()
        assert await small == "small"
        waiting = [line.ask("a", 1), line.ask("b", 1)]
        await settle()
        line.budget.workers = False
        line.queue.wake_first()
        assert await asyncio.gather(*waiting) == [NoPlace.NO_WORKERS] * 2
        assert len(line.queue) == 0

    run(test)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_order_of_events_gives_capacity_twice_or_leaves_a_request_behind(seed: int) -> None:
    async def test() -> None:
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
        assert line.placed == [name for name in order if name in line.placed]
        assert set(order) - cancelled <= set(line.placed)
        assert len(line.queue) == 0

    run(test)
