"""Whatever comes, goes, is preempted or handed over in whatever order: right tokens, no leaks, no starvation."""

import dataclasses
import subprocess
import sys
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv.blocks import BlockPool, Hold, IntegrityError
from kvrelay.engine.kv.prefix import PrefixIndex
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.request import FinishReason, Request, SamplingParams
from kvrelay.engine.runner.base import StepHandle
from kvrelay.engine.scheduler import Progress, Reservation, Scheduler
from kvrelay.engine.sequence import Sequence, Status
from support.hash_runner import HashRunner, expected_outcome, expected_tokens, hash_spec

SIZE = 8


class Bench:
    """A scheduler with a hash runner, and what is known of every sequence from outside."""

    def __init__(
        self,
        blocks: int,
        *,
        max_batch_tokens: int = 16,
        max_sequences: int = 4,
        max_context: int | None = None,
        prefix_cache: bool = True,
        lag: int = 0,
    ) -> None:
        self.config = EngineConfig(block_size=SIZE, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences)
        self.max_context = blocks * SIZE if max_context is None else max_context
        self.pool = BlockPool(blocks)
        self.prefix = PrefixIndex(self.pool, SIZE, b"hash", enabled=prefix_cache)
        # Computes as late as a device may, whatever the lag.
        self.runner = HashRunner(blocks, spec=hash_spec(self.max_context), lag=1)
        self.scheduler = Scheduler(self.config, self.prefix, self.runner.spec, lag)
        self.lag = lag
        self.flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self.sequences: list[Sequence] = []
        self.heard: dict[Sequence, list[int]] = {}
        self.exports: list[tuple[Hold, tuple[int, ...]]] = []
        self._names = 0

    def request(self, tokens: tuple[int, ...], max_tokens: int = 1, **options: object) -> Request:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=options.pop("min_tokens", 0),
            stop_token_ids=frozenset(options.pop("stop", ())),
        )
        self._names += 1
        prompt_tokens = options.pop("prompt_tokens", len(tokens))
        return Request(f"r{self._names}", 1, tokens, prompt_tokens, sampling, **options)

    def add(self, request: Request, *, handoff: bool = False) -> Sequence:
        return self._follow(self.scheduler.add(request, handoff=handoff), [])

    def receive(self, reservation: Reservation, request: Request) -> None:
        """Does what a transfer does: writes the KV that isn't there yet."""
        have = reservation.have_tokens
        assert have % SIZE == 0
        assert self.runner.holds_kv_of(reservation.hold.blocks, request.tokens[:have])
        self.runner.fill(reservation.hold.blocks, request.tokens[have:], have)

    def resume(self, request: Request, reservation: Reservation) -> Sequence:
        token = expected_tokens(request.tokens, 1)[0]
        return self._follow(self.scheduler.resume(request, token, reservation.hold), [token])

    def step(self) -> list[Progress]:
        """Plans as far ahead as the lag allows, then lands the oldest; again if nothing came of it."""
        while True:
            while len(self.flight) <= self.lag and self.launch() is not None:
                pass
            if not self.flight:
                return []
            reports = self.land()
            if reports:
                return reports

    def launch(self) -> StepPlan | None:
        """One more plan in flight."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.flight.append((plan, self.runner.launch(plan)))
        return plan

    def land(self, nonfinite: tuple[int, ...] = ()) -> list[Progress]:
        """Computes and commits the oldest plan in flight; the rows `nonfinite` come back as not finite."""
        plan, launched = self.flight.popleft()
        out = dataclasses.replace(launched.result(), nonfinite=nonfinite)
        reports = self.scheduler.commit(plan, out)
        for report in reports:
            if report.error is None:
                self._hear(report)
        return reports

    def commit(self, plan: StepPlan) -> list[Progress]:
        reports = self.scheduler.commit(plan, self.runner.run(plan))
        for report in reports:
            self._hear(report)
        return reports

    def drain(self) -> None:
        """Runs until nothing is left, in no more steps than one per token that may still come."""
        limit = sum(
            sequence.num_tokens + sequence.request.sampling.max_tokens
            for sequence in self.sequences
            if not sequence.ended
        )
        for _ in range(limit + 1):
            while self.exports:
                self.exports.pop()[0].release()
            if not self.scheduler.has_work:
                break
            assert self.step()
        assert not self.scheduler.has_work
        while self.flight:
            assert self.land() == []

    def check(self) -> None:
        """Everything that must hold between any two calls."""
        self.pool.check_integrity()
        self.prefix.check_integrity()
        live = [sequence for sequence in self.sequences if not sequence.ended]
        load = self.scheduler.load()
        assert load.free + load.cached + load.held == load.total
        assert load.waiting + load.running == len(live)
        assert load.running == sum(sequence.status is Status.RUNNING for sequence in live)
        assert load.running <= self.config.max_sequences
        assert load.pending_tokens == sum(sequence.num_tokens - sequence.num_computed for sequence in live)
        assert self.scheduler.has_work == bool(live)
        for sequence in live:
            assert sequence.num_computed < sequence.num_tokens
            assert self.runner.holds_kv_of(sequence.hold.blocks, sequence.tokens[: sequence.num_computed])
        for hold, tokens in self.exports:
            assert self.runner.holds_kv_of(hold.blocks, tokens)

    def check_over(self) -> None:
        """Everything that must hold once all sequences and outside holds are gone."""
        self.check()
        assert self.pool.owners() == {}
        assert self.pool.free + self.pool.cached == self.pool.total
        for sequence in self.sequences:
            assert sequence.ended
            assert sequence.lifetime.finished is not None

    def _follow(self, sequence: Sequence, heard: list[int]) -> Sequence:
        self.sequences.append(sequence)
        self.heard[sequence] = heard
        return sequence

    def _hear(self, report: Progress) -> None:
        sequence = report.sequence
        assert report.error is None
        assert report.computed == sequence.num_computed
        if report.token is None:
            assert report.finish is report.hold is None
            return
        heard = self.heard[sequence]
        heard.append(report.token)
        tokens, reason = expected_outcome(sequence.request, self.max_context)
        assert heard == tokens[: len(heard)]
        assert report.finish == (reason if len(heard) == len(tokens) else None)
        assert (sequence.status is Status.FINISHED) == (report.finish is not None)
        assert (report.hold is not None) == (sequence.handoff and report.finish is None)
        if report.hold is not None:
            assert sequence.status is Status.HANDED_OFF
            self.exports.append((report.hold, sequence.request.tokens))


# Beginnings are often alike, and lengths lie around the borders of blocks and chunks.
BEGINNINGS = ((), (1,) * SIZE, (1,) * (3 * SIZE), (1,) * SIZE + (2,) * SIZE)
prompts = st.builds(
    lambda beginning, rest: (beginning + rest) or (0,),
    st.sampled_from(BEGINNINGS),
    st.lists(st.integers(0, 2), max_size=3 * SIZE).map(tuple),
)


@st.composite
def requests(draw: st.DrawFn, bench: Bench) -> Request:
    """A request that the bench can serve: with stop tokens or not, fresh or on a later attempt."""
    tokens = draw(prompts)[: bench.max_context - 2]
    done = draw(st.integers(0, min(3, len(tokens) - 1)))
    max_tokens = done + draw(st.integers(1, 40))
    max_tokens = min(max_tokens, bench.max_context - len(tokens) + done)
    stop = draw(st.sampled_from([(), (), tuple(expected_tokens(tokens, 7)[::3])]))
    return bench.request(
        tokens,
        max_tokens,
        min_tokens=draw(st.sampled_from([0, done + 2])),
        stop=stop,
        prompt_tokens=len(tokens) - done,
        tenant=draw(st.sampled_from(["", "other"])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """All that a prefill, a decode and a co-located worker do to a scheduler, in any order."""

    @initialize(
        blocks=st.integers(4, 16),
        max_batch_tokens=st.integers(SIZE, 40),
        max_sequences=st.integers(1, 5),
        prefix_cache=st.booleans(),
        lag=st.integers(0, 1),
    )
    def start(self, blocks: int, max_batch_tokens: int, max_sequences: int, prefix_cache: bool, lag: int) -> None:
        self.bench = Bench(
            blocks, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences, prefix_cache=prefix_cache, lag=lag
        )
        self.scheduler = self.bench.scheduler
        self.reserved: list[tuple[Request, Reservation]] = []

    @rule(data=st.data(), handoff=st.booleans())
    def add(self, data: st.DataObject, handoff: bool) -> None:
        self.bench.add(data.draw(requests(self.bench)), handoff=handoff)

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        request = data.draw(requests(self.bench))
        running = [sequence for sequence in self.bench.sequences if sequence.status is Status.RUNNING]
        reservation = self.scheduler.reserve(request)
        if reservation is not None:
            self.reserved.append((request, reservation))
        assert all(sequence.status is Status.RUNNING for sequence in running)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), arrives=st.booleans())
    def end_transfer(self, data: st.DataObject, arrives: bool) -> None:
        pair = data.draw(st.sampled_from(self.reserved))
        self.reserved.remove(pair)
        request, reservation = pair
        if arrives and len(expected_outcome(request, self.bench.max_context)[0]) > 1:
            self.bench.receive(reservation, request)
            self.bench.resume(request, reservation)
        else:
            reservation.release()

    @precondition(lambda self: self.bench.exports)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        hold, tokens = self.bench.exports.pop(data.draw(st.integers(0, len(self.bench.exports) - 1)))
        assert self.bench.runner.holds_kv_of(hold.blocks, tokens)
        hold.release()

    @rule(data=st.data())
    def share_what_is_computed(self, data: st.DataObject) -> None:
        """An exporter that ships finished blocks while the rest is computed, or outlives a cancel."""
        sharable = [sequence for sequence in self.bench.sequences if not sequence.ended and sequence.handoff]
        if sharable:
            sequence = data.draw(st.sampled_from(sharable))
            blocks = sequence.num_computed // SIZE
            hold = self.bench.pool.share(sequence.hold.blocks[:blocks], "exporter")
            self.bench.exports.append((hold, tuple(sequence.tokens[: blocks * SIZE])))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        live = [sequence for sequence in self.bench.sequences if not sequence.ended]
        if live:
            sequence = data.draw(st.sampled_from(live))
            assert self.scheduler.cancel(sequence.request.key)
            assert not self.scheduler.cancel(sequence.request.key)
            # A step in flight may still write: the blocks stay until it has ended.
            assert sequence.hold.released == (sequence.scheduled == 0)

    @precondition(lambda self: len(self.bench.flight) <= self.bench.lag)
    @rule()
    def make_plan(self) -> None:
        plan = self.bench.launch()
        if plan is not None:
            assert plan.num_tokens <= self.bench.config.max_batch_tokens
            assert plan.num_rows <= self.bench.config.max_sequences

    @precondition(lambda self: self.bench.flight)
    @rule()
    def commit(self) -> None:
        self.bench.land()

    @rule(count=st.integers(1, 20))
    def run_on(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()
            self.bench.check()

    @precondition(lambda self: self.bench.flight)
    @rule(data=st.data())
    def fail_rows(self, data: st.DataObject) -> None:
        plan, _ = self.bench.flight[0]
        running = {sequence.handle for sequence in self.bench.sequences if sequence.status is Status.RUNNING}
        bad = data.draw(st.sets(st.integers(0, plan.num_rows - 1), min_size=1))
        reports = self.bench.land(tuple(bad))
        failed = [report for report in reports if report.error is not None]
        assert {report.sequence.handle for report in failed} == {plan.handles[row] for row in bad} & running
        for report in failed:
            assert report.error == "the model's logits are not finite"
            assert report.sequence.status is Status.FAILED

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            while self.bench.flight:
                self.bench.land()
            for _, reservation in self.reserved:
                reservation.release()
            self.bench.drain()
            self.bench.check_over()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def spans(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """(handle, first position, one past the last) of each row."""
    assert plan is not None
    rows = zip(plan.handles, plan.starts.tolist(), plan.lengths.tolist(), strict=True)
    return [(handle, start, start + length) for handle, start, length in rows]


def numbers(length: int, first: int = 0) -> tuple[int, ...]:
    """A prompt that begins like no other with another `first`."""
    return tuple((first * 7 + position) % 200 for position in range(length))


def steps_until(bench: Bench, sequence: Sequence) -> int:
    """Steps until the sequence has ended."""
    for count in range(1, 1000):
        bench.step()
        if sequence.ended:
            return count
    raise AssertionError(f"{sequence} doesn't end")


# What a step computes.


def test_decodes_go_first_and_chunks_share_the_rest() -> None:
    bench = Bench(32, max_batch_tokens=20)
    first, second = (bench.add(bench.request(numbers(4, n), 8)) for n in range(2))
    bench.step()
    long = bench.add(bench.request(numbers(60, 2), 4))
    late = bench.add(bench.request(numbers(9, 3), 4))
    plan = bench.scheduler.plan()
    # 18 tokens are left: two blocks of the long prompt. The next in line waits until a step has tokens to spare.
    assert spans(plan) == [(first.handle, 4, 5), (second.handle, 4, 5), (long.handle, 0, 16)]
    assert plan.sample.tolist() == [True, True, False]
    assert plan.generated.tolist() == [1, 1, 0]
    bench.commit(plan)
    for start in (16, 32):
        plan = bench.scheduler.plan()
        assert spans(plan)[2:] == [(long.handle, start, start + 16)]
        bench.commit(plan)
    assert spans(bench.scheduler.plan())[2:] == [(long.handle, 48, 60), (late.handle, 0, 6)]


@settings(deadline=None)
@given(length=st.integers(1, 100), budget=st.integers(SIZE, 40))
def test_chunks_end_at_block_borders(length: int, budget: int) -> None:
    bench = Bench(16, max_batch_tokens=budget)
    sequence = bench.add(bench.request(numbers(length), 2))
    computed = []
    while not sequence.generated:
        (report,) = bench.step()
        computed.append(report.computed)
    assert computed[-1] == length
    assert all(end % SIZE == 0 for end in computed[:-1])
    sizes = [end - start for start, end in zip([0, *computed], computed, strict=False)]
    # No step leaves out a block that would have fitted.
    assert all(budget - SIZE < size <= budget for size in sizes[:-1])
    assert sizes[-1] <= budget


def test_a_chunk_short_of_a_block_still_moves() -> None:
    bench = Bench(32, max_batch_tokens=SIZE, max_sequences=8)
    for number in range(5):
        bench.add(bench.request((number,), 30))
        bench.step()
    long = bench.add(bench.request(numbers(20), 1))
    reports = bench.step()
    assert reports[-1] == Progress(long, 3)
    bench.drain()
    bench.check_over()


def test_rows_never_outnumber_the_budget() -> None:
    bench = Bench(64, max_batch_tokens=SIZE, max_sequences=32)
    for number in range(20):
        bench.add(bench.request((number,), 20))
    for _ in range(12):
        bench.step()
    assert bench.scheduler.load().running == SIZE


def test_the_head_of_the_queue_blocks_the_rest() -> None:
    bench = Bench(6, max_batch_tokens=64)
    bench.add(bench.request(numbers(20), 20))
    bench.step()
    big, small = bench.add(bench.request(numbers(24, 1), 2)), bench.add(bench.request(numbers(2, 2), 2))
    bench.step()
    assert (big.status, small.status) == (Status.WAITING, Status.WAITING)
    bench.drain()
    assert big.lifetime.scheduled <= small.lifetime.scheduled


# The prefix cache.


@pytest.mark.parametrize("length", [SIZE - 1, SIZE, SIZE + 1, 3 * SIZE, 3 * SIZE + 1])
def test_the_last_token_is_always_computed(length: int) -> None:
    bench = Bench(16)
    request = numbers(length)
    for repetition in range(2):
        sequence = bench.add(bench.request(request, 3))
        steps_until(bench, sequence)
        assert sequence.cached_tokens == ((length - 1) // SIZE * SIZE if repetition else 0)
        assert sequence.recomputed_tokens == 0
    bench.check_over()


def test_completions_are_cached_too() -> None:
    bench = Bench(16)
    prompt = numbers(SIZE)
    steps_until(bench, bench.add(bench.request(prompt, 2 * SIZE)))
    turn = bench.add(bench.request((*prompt, *expected_tokens(prompt, 2 * SIZE), 1, 2), 3))
    steps_until(bench, turn)
    # Of the last completion token no KV was computed, so its block isn't known.
    assert turn.cached_tokens == 2 * SIZE


def test_a_failed_row_leaves_nothing_to_the_cache() -> None:
    bench = Bench(16, max_batch_tokens=SIZE)
    bad, good = (bench.add(bench.request(numbers(20, n), 4)) for n in range(2))
    bench.step()
    plan = bench.launch()
    assert plan is not None
    report = next(report for report in bench.land((plan.handles.index(bad.handle),)) if report.error is not None)
    assert (report.sequence, report.token, report.error) == (bad, None, "the model's logits are not finite")
    assert bad.hold.released
    again = bench.add(bench.request(numbers(20, 0), 4))
    bench.drain()
    assert again.cached_tokens == 0
    assert good.status is again.status is Status.FINISHED
    bench.check_over()


# Out of blocks.


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    bench = Bench(6, max_batch_tokens=64, prefix_cache=False)
    old, mid, young = (bench.add(bench.request(numbers(SIZE, n), 24)) for n in range(3))
    bench.step()
    late = bench.add(bench.request(numbers(SIZE, 3), 2))
    while not (mid.status is young.status is Status.PREEMPTED):
        bench.step()
        bench.check()
        assert old.status is Status.RUNNING
        assert late.status is Status.WAITING
    bench.drain()
    assert (old.recomputed_tokens, late.recomputed_tokens) == (0, 0)
    assert mid.recomputed_tokens > 0
    ends = [sequence.lifetime.finished for sequence in (old, mid, young)]
    assert ends == sorted(ends)
    bench.check_over()


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    recomputed = []
    for prefix_cache in (True, False):
        bench = Bench(8, max_batch_tokens=64, prefix_cache=prefix_cache)
        old = bench.add(bench.request(numbers(SIZE), 20))
        young = bench.add(bench.request(numbers(5 * SIZE - 1, 1), 3))
        while young.status is not Status.PREEMPTED and not young.ended:
            bench.step()
            if young.status is Status.RUNNING and bench.pool.available:
                bench.exports.append((bench.pool.allocate(bench.pool.available, "elsewhere"), ()))
        assert young.status is Status.PREEMPTED
        bench.drain()
        assert old.status is young.status is Status.FINISHED
        assert young.cached_tokens == 0
        recomputed.append(young.recomputed_tokens)
        bench.check_over()
    assert 0 < recomputed[0] < recomputed[1]


def test_alone_without_room_it_waits_where_it_is() -> None:
    bench = Bench(4)
    sequence = bench.add(bench.request(numbers(SIZE), 10))
    bench.step()
    rest = bench.pool.allocate(3, "exports")
    while (reports := bench.step()) != []:
        assert reports[0].error is None
    assert (sequence.status, sequence.num_computed) == (Status.RUNNING, SIZE)
    assert bench.scheduler.has_work
    rest.release()
    bench.drain()
    assert sequence.recomputed_tokens == 0
    bench.check_over()


@pytest.mark.parametrize("blocks", [9, 64])
@pytest.mark.parametrize("max_sequences", [1, 2])
def test_nobody_starves_while_others_keep_coming(max_sequences: int, blocks: int) -> None:
    """Younger prompts and hand-offs come as fast as they are taken; rows are always short, blocks perhaps."""
    bench = Bench(blocks, max_batch_tokens=16, max_sequences=max_sequences)
    for number in range(3):
        bench.add(bench.request(numbers(3, number), 30))
        bench.step()
    old = bench.add(bench.request(numbers(6 * SIZE, 9), 8))
    for number in range(400):
        request = bench.request(numbers(5, number), 12)
        reservation = bench.scheduler.reserve(request)
        if reservation is not None:
            bench.receive(reservation, request)
            bench.resume(request, reservation)
        if bench.scheduler.load().waiting < 6:
            bench.add(bench.request(numbers(4, number), 6))
        bench.step()
        if old.ended:
            break
    assert old.status is Status.FINISHED
    bench.drain()
    bench.check_over()


# KV from elsewhere.


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 5 * SIZE])
def test_the_prompt_of_a_resumed_sequence_is_not_computed(length: int) -> None:
    bench = Bench(16)
    request = bench.request(numbers(length), 12)
    reservation = bench.scheduler.reserve(request)
    assert reservation.have_tokens == 0
    assert len(reservation.hold.blocks) == length // SIZE + 1
    bench.receive(reservation, request)
    sequence = bench.resume(request, reservation)
    plan = bench.scheduler.plan()
    assert spans(plan) == [(sequence.handle, length, length + 1)]
    assert plan.generated.tolist() == [1]
    bench.commit(plan)
    while not sequence.ended:
        (report,) = bench.step()
        assert report.computed == sequence.num_computed
    assert (sequence.recomputed_tokens, sequence.cached_tokens) == (0, 0)
    assert sequence.lifetime.committed is not None
    bench.check_over()


@pytest.mark.parametrize("length", [SIZE, 2 * SIZE + 3, 4 * SIZE])
def test_a_reservation_takes_what_is_cached(length: int) -> None:
    bench = Bench(16)
    request = bench.request(numbers(length), 4)
    first = bench.scheduler.reserve(request)
    bench.receive(first, request)
    bench.resume(request, first)
    second = bench.scheduler.reserve(bench.request(numbers(length), 4))
    # Its logits come from the first token, so that nothing needs the prompt's last token to be computed.
    assert second.have_tokens == length - length % SIZE
    assert second.hold.blocks[: length // SIZE] == first.hold.blocks[: length // SIZE]
    other = bench.scheduler.reserve(bench.request(numbers(length), 4, tenant="other"))
    assert other.have_tokens == 0
    second.release()
    other.release()
    bench.drain()
    bench.check_over()


def test_a_reservation_leaves_a_block_for_each_that_runs() -> None:
    bench = Bench(6)
    bench.add(bench.request(numbers(2), 20))
    bench.add(bench.request(numbers(2, 1), 20))
    bench.step()
    assert bench.pool.available == 4
    assert bench.scheduler.reserve(bench.request(numbers(2 * SIZE, 2), 4)) is None
    reservation = bench.scheduler.reserve(bench.request(numbers(2 * SIZE - 1, 2), 4))
    assert bench.pool.available == 2
    reservation.release()
    assert bench.pool.available == 4


def test_reservations_end_where_rows_end() -> None:
    bench = Bench(64, max_sequences=2)
    reservations = [bench.scheduler.reserve(bench.request(numbers(2, n), 4)) for n in range(4)]
    assert [reservation is None for reservation in reservations] == [False, False, False, True]
    reservations[0].release()
    assert bench.scheduler.reserve(bench.request(numbers(2, 4), 4)) is not None


def test_a_sequence_that_waits_for_room_goes_before_reservations() -> None:
    bench = Bench(6)
    bench.add(bench.request(numbers(2 * SIZE), 8))
    bench.step()
    bench.add(bench.request(numbers(4 * SIZE, 1), 2))
    bench.step()
    assert bench.scheduler.reserve(bench.request(numbers(2, 2), 2)) is None
    bench.drain()
    assert bench.scheduler.reserve(bench.request(numbers(2, 2), 2)) is not None


def test_one_that_has_its_kv_gives_way_when_the_only_row_needs_a_block() -> None:
    bench = Bench(5, max_sequences=1)
    first = bench.add(bench.request(numbers(SIZE), 20))
    bench.step()
    request = bench.request(numbers(2 * SIZE, 1), 4)
    reservation = bench.scheduler.reserve(request)
    bench.receive(reservation, request)
    second = bench.resume(request, reservation)
    bench.step()
    third = bench.pool.allocate(bench.pool.available, "elsewhere")
    while not first.ended:
        assert bench.step()
        bench.check()
    third.release()
    bench.drain()
    assert first.recomputed_tokens == 0
    assert second.recomputed_tokens > 0
    bench.check_over()


def test_what_resume_refuses_stays_with_the_caller() -> None:
    bench = Bench(8)
    request = bench.request(numbers(SIZE + 1), 4, stop=(7,))
    reservation = bench.scheduler.reserve(request)
    small = bench.pool.allocate(1, "small")
    with pytest.raises(ValueError, match="first_token is 7"):
        bench.scheduler.resume(request, 7, reservation.hold)
    with pytest.raises(ValueError, match="first_token has the id 251; allowed: 0 to 250"):
        bench.scheduler.resume(request, 251, reservation.hold)
    with pytest.raises(ValueError, match="'small' has 1 blocks; 9 tokens"):
        bench.scheduler.resume(request, 8, small)
    assert not reservation.hold.released
    assert not small.released
    assert not bench.scheduler.has_work


# Hand-off, cancel, ends.


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_handoff_leaves_with_its_first_token(max_tokens: int) -> None:
    bench = Bench(8, max_batch_tokens=SIZE)
    prompt = numbers(2 * SIZE + 3)
    sequence = bench.add(bench.request(prompt, max_tokens), handoff=True)
    assert [report.computed for report in bench.step() + bench.step()] == [SIZE, 2 * SIZE]
    (report,) = bench.step()
    assert report.token == expected_tokens(prompt, 1)[0]
    assert sequence.ended
    assert not bench.scheduler.has_work
    if max_tokens == 1:
        assert (report.finish, report.hold) == (FinishReason.LENGTH, None)
        assert bench.pool.held == 0
    else:
        assert (report.finish, sequence.status) == (None, Status.HANDED_OFF)
        assert bench.pool.owners() == {"export r1/1": 3}
        assert bench.runner.holds_kv_of(report.hold.blocks, prompt)
        report.hold.release()
    bench.exports.clear()
    bench.check_over()


@pytest.mark.parametrize("handoff", [True, False])
def test_blocks_of_a_canceled_sequence_stay_until_the_step_in_flight_ends(handoff: bool) -> None:
    bench = Bench(4, prefix_cache=False)
    sequence = bench.add(bench.request(numbers(SIZE), 8), handoff=handoff)
    plan = bench.scheduler.plan()
    assert bench.scheduler.cancel(sequence.request.key)
    assert bench.pool.held == 1
    assert bench.commit(plan) == []
    assert bench.pool.held == 0
    assert not bench.scheduler.cancel(sequence.request.key)
    bench.check_over()


@pytest.mark.parametrize(
    ("sampling", "resumed", "tokens", "reason"),
    [
        (SamplingParams(max_tokens=3), 0, 3, FinishReason.LENGTH),
        (SamplingParams(max_tokens=40 - SIZE), 0, 40 - SIZE, FinishReason.LENGTH),
        (SamplingParams(max_tokens=5), 2, 3, FinishReason.LENGTH),
        (SamplingParams(max_tokens=30, stop_token_ids=frozenset(range(251))), 0, 1, FinishReason.STOP),
        (SamplingParams(max_tokens=30, min_tokens=4, stop_token_ids=frozenset(range(251))), 0, 4, FinishReason.STOP),
        (SamplingParams(max_tokens=30, min_tokens=4, stop_token_ids=frozenset(range(251))), 3, 1, FinishReason.STOP),
        # A token that is both is a stop.
        (SamplingParams(max_tokens=1, stop_token_ids=frozenset(range(251))), 0, 1, FinishReason.STOP),
    ],
)
def test_a_sequence_ends_once(sampling: SamplingParams, resumed: int, tokens: int, reason: FinishReason) -> None:
    bench = Bench(8, max_context=40)
    sequence = bench.add(Request("r", 2, numbers(SIZE), SIZE - resumed, sampling))
    reports = []
    while not sequence.ended:
        reports += bench.step()
    assert [report.finish for report in reports] == [None] * (tokens - 1) + [reason]
    assert sequence.generated == resumed + tokens
    stamps = sequence.lifetime
    assert stamps.submitted <= stamps.scheduled <= stamps.first_token <= stamps.finished


# Mistakes.


@pytest.mark.parametrize(
    ("tokens", "prompt_tokens", "max_tokens", "message"),
    [
        ((), 0, 1, "prompt_tokens is 0; allowed: 1 to the tokens given .0."),
        ((1, 2), 3, 1, "prompt_tokens is 3"),
        ((1, 2, 3), 1, 2, "max_tokens is 2; 2 completion tokens are there"),
        ((1,) * 64, 64, 1, "prompt_tokens plus max_tokens is 65; allowed: up to 64"),
        ((1,) * 20, 18, 47, "prompt_tokens plus max_tokens is 65; allowed: up to 64"),
        ((1,) * 20, 20, 30, "prompt_tokens plus max_tokens is 50; the KV pool holds 32"),
        ((1, 251, 2), 3, 1, "tokens has the id 251; allowed: 0 to 250"),
        ((1, -1, 2), 3, 1, "tokens has the id -1; allowed: 0 to 250"),
    ],
)
def test_what_can_never_be_served_is_refused(
    tokens: tuple[int, ...], prompt_tokens: int, max_tokens: int, message: str
) -> None:
    bench = Bench(4, max_context=64)
    request = bench.request(tokens, max_tokens, prompt_tokens=prompt_tokens)
    with pytest.raises(ValueError, match=message):
        bench.scheduler.add(request)
    with pytest.raises(ValueError, match=message):
        bench.scheduler.reserve(request)
    assert not bench.scheduler.has_work
    bench.check_over()


def test_a_key_is_here_once() -> None:
    bench = Bench(4)
    request = bench.request((1,), 4)
    bench.add(request)
    with pytest.raises(ValueError, match=r"\('r1', 1\)"):
        bench.scheduler.add(request)


def test_plan_and_commit_take_turns() -> None:
    bench = Bench(4)
    bench.add(bench.request((1,), 4))
    plan = bench.scheduler.plan()
    with pytest.raises(IntegrityError, match="plan 0 is still in flight"):
        bench.scheduler.plan()
    out = bench.runner.run(plan)
    bench.scheduler.commit(plan, out)
    with pytest.raises(IntegrityError, match="plan 0 came back; in flight is none"):
        bench.scheduler.commit(plan, out)


@pytest.mark.parametrize("tokens", [(), (None,), (1, 2)])
def test_output_that_does_not_fit_the_plan_is_refused(tokens: tuple[int | None, ...]) -> None:
    bench = Bench(4)
    bench.add(bench.request((1,), 4))
    with pytest.raises(IntegrityError):
        bench.scheduler.commit(bench.scheduler.plan(), StepOutput(tokens))


def test_a_failure_must_name_a_row() -> None:
    bench = Bench(4)
    bench.add(bench.request((1,), 4))
    with pytest.raises(IntegrityError, match="names rows"):
        bench.scheduler.commit(bench.scheduler.plan(), StepOutput((None,), nonfinite=(1,)))


# A step ahead.


def test_a_step_is_planned_while_another_runs() -> None:
    """A steady batch keeps one step in flight at all times, and computes no row too many where lengths end it."""
    bench = Bench(32, max_batch_tokens=32, lag=1)
    first, second = bench.add(bench.request(numbers(9), 12)), bench.add(bench.request(numbers(5, 1), 7))
    assert spans(bench.launch()) == [(0, 0, 9), (1, 0, 5)]
    plan = bench.launch()
    assert spans(plan) == [(0, 9, 10), (1, 5, 6)]
    assert plan is not None
    assert plan.feeds is not None
    assert (plan.tokens.tolist(), plan.feeds.tolist()) == ([0, 0], [0, 1])
    rows = 0
    while bench.flight:
        bench.land()
        plan = bench.launch()
        rows += 0 if plan is None else plan.num_rows
        assert len(bench.flight) >= 1 or plan is None
    assert rows == (12 - 2) + (7 - 2)
    assert first.status is second.status is Status.FINISHED
    bench.check_over()


def test_an_end_that_was_not_foreseen_costs_one_row_and_its_blocks_stay_until_that_has_landed() -> None:
    bench = Bench(32, lag=1)
    prompt = numbers(9)
    sequence = bench.add(bench.request(prompt, 30, stop=expected_tokens(prompt, 3)[2:]))
    while not sequence.ended:
        bench.step()
    assert sequence.tokens[len(prompt) :] == expected_tokens(prompt, 3)
    assert len(bench.flight) == 1
    assert not sequence.hold.released
    assert bench.step() == []
    assert sequence.hold.released
    bench.check_over()


def test_a_hand_off_leaves_nothing_in_flight() -> None:
    bench = Bench(32, lag=1)
    bench.add(bench.request(numbers(9), 30), handoff=True)
    assert bench.launch() is not None
    assert bench.launch() is None
    (report,) = bench.land()
    assert report.hold is not None
    bench.exports.pop()[0].release()
    bench.check_over()


def test_preemption_waits_until_nothing_is_in_flight() -> None:
    bench = Bench(4, max_batch_tokens=32, lag=1)
    old, young = (bench.add(bench.request(numbers(SIZE, n), 20)) for n in range(2))
    while young.status is not Status.PREEMPTED:
        assert bench.step() != []
        if young.status is Status.PREEMPTED:
            assert young.scheduled == 0
    bench.drain()
    assert old.tokens[SIZE:] == expected_tokens(numbers(SIZE), 20)
    assert young.tokens[SIZE:] == expected_tokens(numbers(SIZE, 1), 20)
    bench.check_over()


@pytest.mark.parametrize(
    "module",
    ["engine.engine", "engine.kv.blocks", "engine.kv.prefix", "engine.scheduler", "engine.sequence"],
)
def test_the_control_half_needs_no_torch(module: str) -> None:
    code = f"import sys, kvrelay.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd="/", check=False).returncode == 0
