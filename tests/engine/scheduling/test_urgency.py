"""Urgent requests go first, others fill what they leave, and no token is lost or waits for ever."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_bench import SIZE, Bench, numbers, spans, steps_until

from kvrelay.decode_worker.reservation_queue import ReservationQueue
from kvrelay.engine.request import Request, Urgency
from kvrelay.engine.scheduling.progress import Reservation
from kvrelay.engine.sequence import Sequence, Status
from kvrelay.internal.v1.worker_pb2 import Submit
from kvrelay.internal.v1.worker_pb2 import Urgency as WireUrgency
from kvrelay.transfer.protocol.messages import Key
from kvrelay.worker.relay.requests import request_of

URGENT, BATCH = Urgency(0), Urgency(10, yields=True)


def add(bench: Bench, urgency: Urgency, prompt: int, tokens: int, first: int = 0) -> Sequence:
    return bench.add(bench.request(numbers(prompt, first), tokens, urgency=urgency))


def batch_takes_all(lag: int = 0, step_seconds: float = 0.0) -> tuple[Bench, list[Sequence]]:
    """Four sequences of batch that decode and have all rows, and nearly all blocks."""
    bench = Bench(28, max_batch_tokens=64, max_sequences=4, lag=lag, step_cost=(1.0, 1.0), step_seconds=step_seconds)
    batch = [add(bench, BATCH, 3 * SIZE, 3 * SIZE, 10 * number) for number in range(4)]
    while not all(one.generated for one in batch):
        bench.step()
    return bench, batch


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("prompt", [SIZE, 14 * SIZE])
def test_an_urgent_request_takes_rows_and_blocks_from_batch_which_resumes(lag: int, prompt: int) -> None:
    """`Bench` compares each token with that of the model alone, at its index."""
    bench, batch = batch_takes_all(lag)
    urgent = add(bench, URGENT, prompt, 4, 90)
    for _ in range(3 + lag):
        bench.step()
    assert urgent.generated, "it has its row and its blocks at once, and its prompt takes two steps"
    assert {one.status for one in batch} <= {Status.PREEMPTED, Status.RUNNING}
    assert bench.scheduler.preemptions > 0
    bench.drain()
    assert {one.status for one in (urgent, *batch)} == {Status.FINISHED}


@pytest.mark.parametrize("rows", [4, 8])
def test_nobody_passes_an_urgent_request_for_which_others_give_way(rows: int) -> None:
    """Batch's holders have little, so they may pass others that lack blocks."""
    bench = Bench(64, max_batch_tokens=256, max_sequences=rows)
    elsewhere = bench.scheduler.reserve(bench.request(numbers(40 * SIZE - 1), 1))
    little = [bench.request(numbers(4, 10 * one), 2 * SIZE - 4, holder=one) for one in (1, 2, 3, 4)]
    batch = [bench.add(replace(one, urgency=BATCH)) for one in little]
    while not all(len(one.hold.blocks) == 2 for one in batch):
        bench.step()
    urgent = bench.add(bench.request(numbers(17 * SIZE, 90), 2, holder=9, urgency=URGENT))
    bench.step()
    assert urgent.generated
    assert bench.scheduler.preemptions == 2
    elsewhere.release()
    bench.drain()


@pytest.mark.parametrize("reserves", [False, True])
def test_nobody_gives_up_blocks_that_others_share_and_keep(reserves: bool) -> None:
    bench = Bench(40, max_batch_tokens=256, max_sequences=8)
    sharing = []
    for urgency in (URGENT, BATCH, BATCH):
        sharing.append(add(bench, urgency, 8 * SIZE + 1, 6))
        bench.step()
    assert bench.pool.held == 8 + len(sharing)
    request = bench.request(numbers(31 * SIZE - 1, 90), 1, urgency=URGENT)
    if not reserves:
        bench.add(request)
    while not sharing[0].ended:
        assert not reserves or bench.scheduler.reserve(request) is None
        bench.step()
        assert bench.scheduler.preemptions == 0
    bench.drain()


def test_a_request_of_the_same_class_takes_nothing_from_others() -> None:
    bench, batch = batch_takes_all()
    other = add(bench, BATCH, SIZE, 4, 90)
    while not any(one.ended for one in batch):
        assert not other.generated
        bench.step()
    assert bench.scheduler.preemptions == 0
    bench.drain()


@pytest.mark.parametrize("lag", [0, 1])
def test_a_reservation_of_an_urgent_request_gets_blocks_of_batch(lag: int) -> None:
    bench, _ = batch_takes_all(lag)
    request = bench.request(numbers(12 * SIZE, 90), 4, urgency=URGENT)
    for _ in range(4):
        reservation = bench.scheduler.reserve(request)
        if reservation is not None:
            break
        bench.step()
    assert bench.scheduler.preemptions > 0
    sequence = bench.resume(request, reservation)
    assert steps_until(bench, sequence) <= 4 + lag, "it has a row at once"
    bench.drain()


def test_batch_goes_on_where_a_reservation_that_was_refused_never_asks_again() -> None:
    bench, batch = batch_takes_all()
    request = bench.request(numbers(12 * SIZE, 90), 4, urgency=URGENT)
    assert bench.scheduler.reserve(request) is None
    bench.drain()
    assert all(one.status is Status.FINISHED for one in batch)


@settings(deadline=None, max_examples=30)
@given(
    urgencies=st.lists(
        st.tuples(st.sampled_from([0, 10]), st.integers(-1, 1), st.sampled_from([math.inf, 5.0, 500.0])),
        min_size=2,
        max_size=6,
    )
)
def test_waiting_requests_start_by_class_priority_deadline_and_arrival(
    urgencies: list[tuple[int, int, float]],
) -> None:
    bench = Bench(40, max_batch_tokens=64, max_sequences=1)
    waiting = [add(bench, Urgency(*each), SIZE, 2, 10 * number) for number, each in enumerate(urgencies)]
    order = sorted(range(len(waiting)), key=lambda number: (urgencies[number], number))
    ended: list[int] = []
    while len(ended) < len(waiting):
        bench.step()
        ended += [number for number, one in enumerate(waiting) if one.ended and number not in ended]
    assert ended == order
    bench.check_over()


@settings(deadline=None, max_examples=12)
@given(
    urgent=st.integers(1, 4),
    batch=st.integers(1, 6),
    prompts=st.integers(0, 2),
    bound=st.sampled_from([4.0, 6.0, 30.0]),
)
def test_batch_fills_what_urgent_requests_leave_and_each_of_it_advances(
    urgent: int, batch: int, prompts: int, bound: float
) -> None:
    bench = Bench(800, max_batch_tokens=64, max_sequences=32, max_context=120, step_cost=(1.0, 1.0), step_seconds=bound)
    first = [add(bench, URGENT, SIZE, 60, 10 * number) for number in range(urgent)]
    rest = [add(bench, BATCH, SIZE, 60, 100 + 10 * number) for number in range(batch)]
    while not all(one.generated for one in (*first, *rest)):
        bench.step()
    fillers = [add(bench, BATCH, 8 * SIZE, 2, 200 + 10 * number) for number in range(prompts)]
    last = dict.fromkeys(rest, 0)
    for step in range(1, 20):
        plan = bench.launch()
        handles = {handle for handle, _, _ in spans(plan)}
        assert {one.handle for one in first} <= handles, "an urgent one has its row in each step"
        work = plan.work
        # Beside them there is a row of batch, and a block of a prompt, at least.
        least = 1.0 + urgent + 1 + SIZE * bool(work.prompt_tokens)
        assert bench.seconds(plan.num_tokens) <= max(bound + 1.0, least + SIZE)
        for one in rest:
            if one.handle in handles:
                last[one] = step
            assert step - last[one] <= batch, "rows of batch take turns"
            assert one.handle in handles or bench.seconds(urgent + batch) > bound, "all are in it where there is time"
        bench.land()
    assert all(one.num_computed for one in fillers[:1]), "a prompt of batch advances by a block a step"
    bench.drain()


def test_a_prompt_waits_for_no_decodes_of_a_less_urgent_class() -> None:
    bench, _ = batch_takes_all(step_seconds=6.0)
    add(bench, URGENT, 8 * SIZE, 2, 90)
    while not (plan := bench.launch()) or not plan.work.prompt_tokens:
        bench.land()
    assert plan.work.prompt_tokens >= 7 * SIZE, "the bound is for those who decode and are no less urgent"
    bench.land()
    bench.drain()


@pytest.mark.parametrize("coming", [URGENT, BATCH])
def test_a_sequence_whose_kv_is_on_its_way_bounds_a_prompts_step(coming: Urgency) -> None:
    """The sequence's next token would wait for the whole step that has begun when its KV comes."""
    bench = Bench(100, max_batch_tokens=64, max_sequences=4, step_cost=(1.0, 1.0), step_seconds=1.0 + 2 * SIZE)
    reservation = bench.scheduler.reserve(bench.request(numbers(SIZE), 4, urgency=coming))
    add(bench, URGENT, 8 * SIZE, 2, 90)
    plan = bench.launch()
    assert plan.work.prompt_tokens == (2 * SIZE if coming is URGENT else 8 * SIZE)
    bench.land()
    reservation.hold.release()
    bench.drain()


@pytest.mark.parametrize("others", [URGENT, BATCH])
@pytest.mark.parametrize("running", [False, True])
def test_only_holders_of_no_greater_rank_have_a_share_of_a_prompts_step(others: Urgency, running: bool) -> None:
    """A prompt of holder 1 meets holder 2, who decodes, or whose KV is on its way."""
    bench = Bench(100, max_batch_tokens=64, max_sequences=4, step_cost=(1.0, 1.0))
    request = bench.request(numbers(SIZE), 20, urgency=others, holder=2)
    reservation = None if running else bench.scheduler.reserve(request)
    if running:
        other = bench.add(request)
        while not other.generated:
            bench.step()
    bench.add(bench.request(numbers(6 * SIZE, 90), 2, urgency=URGENT, holder=1))
    plan = bench.launch()
    if others is BATCH:
        assert plan.work.prompt_tokens == 6 * SIZE
    else:
        assert plan.work.prompt_tokens < 6 * SIZE, "as much time as the other holder's token takes, and a part at least"
    bench.land()
    if reservation is not None:
        reservation.hold.release()
    bench.drain()


@pytest.mark.parametrize("reserves", [False, True])
def test_what_batch_has_is_told_as_room_for_others(reserves: bool) -> None:
    bench, batch = batch_takes_all()
    use = bench.scheduler.use(0.0)
    held = sum(len(one.hold.blocks) for one in batch)
    assert (use.yielding, use.yielding_requests) == (held, len(batch))
    assert use.yielding_growth == use.growth > 0
    request = bench.request(numbers(12 * SIZE, 90), 4, urgency=URGENT)
    if reserves:
        assert bench.scheduler.reserve(request) is None, "what batch has is given up first"
    else:
        bench.add(request)
    bench.step()
    assert bench.scheduler.use(0.0).yielding < held
    bench.drain()
    use = bench.scheduler.use(0.0)
    assert (use.yielding, use.yielding_growth, use.yielding_requests) == (0, 0, 0)


STEP_SECONDS, BUSY_STEPS = 0.1, 300
INTERACTIVE = WireUrgency(first_token_seconds=2.0)
KINDS = {"interactive": INTERACTIVE, "default": WireUrgency(), "batch": WireUrgency(rank=1)}


class Decoding:
    """A decode worker that is offered more than it can take: its scheduler, and the queue of the offers that wait."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now = rng, 0.0
        self.bench = Bench(24, max_batch_tokens=16, max_sequences=4)
        self.queue = ReservationQueue()
        self.offers: dict[Key, tuple[Request, float]] = {}
        """Requests that have no reservation yet, and the times of their offers."""
        self.arriving: list[tuple[Request, Reservation]] = []

    def offer(self, kind: str) -> None:
        """An offer comes."""
        urgency = request_of(Submit(urgency=KINDS[kind]), self.bench.runner.spec, self.now).urgency
        prompt = numbers(self.rng.randint(1, 6) * SIZE, len(self.bench.sequences) + len(self.offers))
        request = self.bench.request(prompt, self.rng.randint(2, 20), urgency=urgency)
        self.offers[request.key] = request, self.now
        self.ask(request.key)

    def ask(self, key: Key) -> bool:
        """Whether an offer gets its reservation."""
        request, arrived = self.offers[key]
        passing = self.queue.passing(key, request.urgency)
        reservation = self.bench.scheduler.reserve(request, passing=passing)
        if reservation is None:
            self.queue.wait(key, request.urgency)
            return False
        self.queue.leave(key)
        del self.offers[key]
        for other, _ in self.offers.values():
            assert request.urgency.rank <= other.urgency.rank, "more urgent classes go first"
            late = request.urgency.rank == other.urgency.rank and arrived > other.urgency.due
            assert not late, f"{request} came after {other} was late, and went first"
        self.arriving.append((request, reservation))
        return True

    def step(self) -> None:
        """The KV of granted offers arrives, a step is computed, and those that wait ask again."""
        arrived, self.arriving = self.arriving, []
        for request, reservation in arrived:
            sequence = self.bench.resume(request, reservation)
            assert sequence.order[:3] == request.urgency[:3], "its deadline is the one that it came with"
        self.bench.step()
        self.now += STEP_SECONDS
        while (first := self.queue.first) is not None and self.ask(first):
            pass


@settings(deadline=None, max_examples=2)
@given(seed=st.integers(0, 2**16))
def test_offers_wait_for_blocks_by_class_and_deadline_and_none_for_ever(seed: int) -> None:
    """Interactive requests alone are more than the worker can take; those of the same rank without a target get their
    blocks as soon as they are late, and those of batch in the end."""
    rng = random.Random(seed)
    worker = Decoding(rng)
    for _ in range(BUSY_STEPS):
        for kind, rate in (("interactive", 0.6), ("default", 0.1), ("batch", 0.05)):
            if rng.random() < rate:
                worker.offer(kind)
        worker.step()
    assert worker.offers, "it had more than it could take"
    while worker.offers or worker.arriving:
        worker.step()
    worker.bench.drain()
