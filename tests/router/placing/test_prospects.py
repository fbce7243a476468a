"""Prospects: when a request that comes now would be served, and after which delay an equal one would be in time."""

import asyncio
import math
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvrelay.costs.predict import Predicted
from kvrelay.router.config import Service
from kvrelay.router.placing.placement import Demand, NoPlace, WorkerView
from kvrelay.router.placing.prospects import LEAST_DELAY_SECONDS, MOST_FACTOR, Prospect, Prospects
from kvrelay.router.placing.queue import Claim, PlacementQueue
from kvrelay.router.placing.usual import CompletionRate
from kvrelay.rpc.identity import WorkerId, WorkerRole

TOKEN_SECONDS = 0.001
SECONDS = st.floats(0, 100)


class Scripted:
    """A policy that knows how long a token takes, and what workers have to do."""

    def __init__(self) -> None:
        self.known = True
        self.tpot = 0.01
        self.lacks_room = False

    def predict(self, demand: Demand, workers: Sequence[WorkerView]) -> Predicted | None:
        tokens = min(worker.pending_tokens for worker in workers if worker.role == "prefill") + demand.prompt_tokens
        return Predicted(TOKEN_SECONDS * tokens, self.tpot) if self.known else None

    def waits_for(self, demand: Demand, workers: Sequence[WorkerView]) -> WorkerRole:
        return "decode" if self.lacks_room else "prefill"


class World:
    """Workers, a queue whose requests get no place, and a clock."""

    def __init__(self, prefills: int = 2) -> None:
        self.now = 0.0
        self.policy = Scripted()
        self.pending = self.running = 0
        self.rate = CompletionRate(lambda: self.now)
        self.queue = PlacementQueue(lambda demand: NoPlace.NO_CAPACITY, 100)
        self.prospects = Prospects(self.queue, self.policy, self._workers, self.rate, lambda: self.now)
        self._prefills = prefills

    def _workers(self) -> list[WorkerView]:
        prefills = [
            WorkerView(WorkerId(f"prefill-{at}", "i"), "prefill", ready=True, pending_tokens=self.pending)
            for at in range(self._prefills)
        ]
        decode = WorkerView(WorkerId("decode-0", "i"), "decode", True, running=self.running, requests=self.running)
        return [*prefills, decode]

    def wait(self, tokens: int, claim: Claim) -> "asyncio.Task[object]":
        """A request that waits in the queue."""
        loop = asyncio.get_running_loop()
        return loop.create_task(self.queue.place(Demand(tokens, 10), math.inf, lambda place: None, claim))

    def of(self, tokens: int, claim: Claim) -> Prospect:
        prospect = self.prospects.of(Demand(tokens, 10), claim)
        assert prospect is not None
        return prospect


async def test_what_waits_before_a_request_counts_and_what_waits_behind_it_does_not() -> None:
    world = World()
    mine, other, batch = Claim("a"), Claim("b"), Claim("a", service=Service("batch", rank=1))
    assert world.of(1000, mine).alone
    waiting = [world.wait(1001, mine) for _ in range(4)] + [world.wait(5000, batch) for _ in range(3)]
    await asyncio.sleep(0)
    world.pending = 500
    found = world.of(1001, mine)
    assert found.queue == pytest.approx(4 * 1.0 / 2), "two workers compute them"
    assert (found.wait, found.compute) == (pytest.approx(0.501), pytest.approx(1.0))
    assert not found.alone
    assert world.of(1001, other).queue <= 0.5 + 1e-9, "another tenant has its own turn"
    # Of other sizes, they are predicted by their mean.
    assert world.of(1001, batch).queue == pytest.approx((4 * 1001 + 3 * 5000) / 2 * TOKEN_SECONDS, rel=0.01)
    assert world.prospects.room_seconds() == pytest.approx((4 * 1001 + 3 * 5000) / 2 * TOKEN_SECONDS, rel=0.01)
    world.policy.known = False
    assert world.prospects.of(Demand(1000, 10), mine) is None
    assert world.prospects.room_seconds() is None
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert world.prospects.room_seconds() is None, "nobody waits"
    assert len(world.queue) == 0


async def test_without_room_on_decode_workers_the_queue_moves_as_requests_end() -> None:
    world = World()
    world.policy.lacks_room, world.running = True, 3
    assert world.of(100, Claim()).queue == 0, "no request has ended yet"
    for _ in range(20):
        world.now += 0.5
        world.rate.ended()
    waiting = [world.wait(10, Claim()) for _ in range(5)]
    await asyncio.sleep(0)
    assert world.of(100, Claim()).queue == pytest.approx(6 * 0.5, rel=0.1)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@given(SECONDS, SECONDS, SECONDS, st.floats(0.001, 100), SECONDS)
def test_after_its_delay_an_equal_request_is_in_time_or_has_nothing_before_it(
    queue: float, wait: float, compute: float, target: float, elapsed: float
) -> None:
    service = Service(ttft_seconds=target)
    now = Prospect(queue, wait, compute, 1.0)
    assume(now.late(service, elapsed))
    delay = now.delay(service)
    assert LEAST_DELAY_SECONDS <= delay <= max(LEAST_DELAY_SECONDS, queue + wait)
    # What is before it has shrunk by as much.
    later = Prospect(max(0.0, queue + wait - delay), 0.0, compute, 1.0)
    assert later.queue == 0 or not later.late(Service(ttft_seconds=target + 1e-6), 0.0)


@given(st.floats(0.001, 10), st.floats(0.001, 10), st.integers(0, 100), st.floats(0.01, 10))
def test_a_tpot_above_its_target_waits_for_a_part_of_those_that_decode(
    tpot: float, target: float, decoding: int, end: float
) -> None:
    service = Service(tpot_seconds=target)
    prospect = Prospect(0.0, 0.0, 0.0, tpot, decoding, end)
    assert prospect.late(service, 0.0) == (tpot > target)
    assert LEAST_DELAY_SECONDS <= prospect.delay(service) <= max(LEAST_DELAY_SECONDS, decoding * end)
    if tpot >= 2 * target:
        assert prospect.delay(service) >= 0.499 * decoding * end
    assert not Prospect(0.0, 0.0, 0.0, tpot, alone=True).late(service, 0.0), "later would be no better"
    assert not prospect.late(Service(), 0.0), "there is no target"


async def test_while_as_much_comes_as_is_served_a_refusal_names_the_time_since_the_latest_success() -> None:
    """And the time in which what is before the request is done, once that shrinks; other classes have their own."""
    world = World()
    claim, batch = Claim(service=Service(ttft_seconds=1.0)), Claim(service=Service("batch", rank=1, ttft_seconds=1.0))

    def told(pending: int, claim: Claim = claim) -> float:
        world.now, world.pending, world.running = world.now + 0.5, pending, 1
        prospect = world.of(400, claim)
        assert prospect.late(claim.service, 0.0) == (pending > 600)
        return prospect.delay(claim.service)

    told(100)
    assert told(1500) == pytest.approx(0.9), "what is before it takes longer than the congestion has lasted"
    for number in range(2, 40):
        assert told(1500) == pytest.approx(max(0.9, 0.5 * number))
    assert told(1500, batch) == pytest.approx(0.9)
    assert told(1100) == pytest.approx(0.5), "it shrinks"
    for _ in range(40):
        told(1100)
    assert told(1100) == pytest.approx(0.5 * 82), "and then it doesn't any more"
    for _ in range(40):
        assert told(600) == LEAST_DELAY_SECONDS
    assert told(700) == pytest.approx(0.5), "a moment ago one was in time"
    for _ in range(300):
        longest = told(2000)
    assert longest == pytest.approx(120.0), "no delay is longer"


async def test_the_queue_is_predicted_as_long_as_the_latest_waits_were() -> None:
    world = World(prefills=1)
    waiting = [world.wait(1001, Claim()) for _ in range(4)]
    await asyncio.sleep(0)
    for real in (0.5, 3.0, 100.0):
        for _ in range(40):
            found = world.of(10, Claim())
            world.prospects.learn(found, real * found.unscaled)
        assert world.of(10, Claim()).queue == pytest.approx(4.0 * min(real, MOST_FACTOR), rel=0.05)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
