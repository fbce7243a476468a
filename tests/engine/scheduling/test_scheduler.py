"""The scheduler: tokens of a step, the prefix cache, preemption, refusals, and steps planned ahead."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scheduler_bench import SIZE, Bench, numbers, spans, steps_until

from kvrelay.engine.kv.blocks import IntegrityError
from kvrelay.engine.kv.layout import LayerGroup
from kvrelay.engine.plan import StepOutput
from kvrelay.engine.scheduling.progress import Progress
from kvrelay.engine.sequence import Status
from support.hash_runner import STATE, HashRunner, expected_tokens, window_of

# What a step computes.


def test_decodes_go_first_and_chunks_share_the_rest() -> None:
    bench = Bench(32, max_batch_tokens=20)
    first, second = (bench.add(bench.request(numbers(4, n), 8)) for n in range(2))
    bench.step()
    long = bench.add(bench.request(numbers(60, 2), 4))
    late = bench.add(bench.request(numbers(9, 3), 4))
    plan = bench.launch()
    # 18 tokens are left: two blocks of the long prompt. The next in line waits until a step has tokens to spare.
    assert spans(plan) == [(first.handle, 4, 5), (second.handle, 4, 5), (long.handle, 0, 16)]
    assert plan.sample.tolist() == [True, True, False]
    assert plan.generated.tolist() == [1, 1, 0]
    bench.land()
    for start in (16, 32):
        plan = bench.launch()
        assert spans(plan)[2:] == [(long.handle, start, start + 16)]
        bench.land()
    assert spans(bench.scheduler.plan())[2:] == [(long.handle, 48, 60), (late.handle, 0, 6)]


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


@pytest.mark.parametrize("drafts", [0, 4])
def test_a_state_that_a_step_has_taken_further_is_not_left(drafts: int) -> None:
    """`Bench` compares the tokens of the turn behind it."""
    bench = Bench(16, sides=(STATE,), drafts=drafts)
    sequence = bench.add(bench.request(numbers(SIZE + 4), 20))
    while sequence.generated < 3:
        bench.step()
    bench.launch()
    bench.scheduler.cancel(sequence.request.key)
    bench.land()
    turn = bench.add(bench.request((*sequence.tokens, 1, 2), 3))
    steps_until(bench, turn)
    assert turn.cached_tokens == SIZE
    bench.check_over()


def test_a_failed_row_leaves_nothing_to_the_cache() -> None:
    bench = Bench(16, max_batch_tokens=SIZE)
    bad, good = (bench.add(bench.request(numbers(20, n), 4)) for n in range(2))
    bench.step()
    plan = bench.launch()
    report = next(report for report in bench.land((plan.handles.index(bad.handle),)) if report.error is not None)
    assert (report.sequence, report.token, report.error) == (bad, None, "the model's logits are not finite")
    assert bad.hold.released
    again = bench.add(bench.request(numbers(20, 0), 4))
    bench.drain()
    assert again.cached_tokens == 0
    assert good.status is again.status is Status.FINISHED


class SpreadingRunner(HashRunner):
    """What is computed behind wrong KV is wrong, too, in all layer groups."""

    def __init__(self, num_blocks: int, **options: Any) -> None:
        super().__init__(num_blocks, **options)
        self.wrong = np.zeros((num_blocks, SIZE), np.bool_)
        """Slots whose KV is wrong."""
        self._spreads = False

    def spoil(self, block: int) -> None:
        self.pool.bytes.numpy()[block] ^= 1
        self.wrong[block] = True

    def fill(self, blocks: Any, tokens: Any, first_position: int, side_tables: Any = ()) -> None:
        before, own = (
            (np.asarray(blocks)[places // SIZE], places % SIZE)
            for places in (np.arange(first_position), np.arange(first_position, first_position + len(tokens)))
        )
        self._spreads = bool(self.wrong[before].any())
        super().fill(blocks, tokens, first_position, side_tables)
        self.wrong[own] = self._spreads

    def _kv_of(self, tokens: Any, first_position: int) -> NDArray[np.uint8]:
        return super()._kv_of(tokens, first_position) ^ np.uint8(self._spreads)


@pytest.mark.parametrize("sides", [(), (window_of(12),), (STATE,)], ids=["full", "window", "state"])
@settings(max_examples=30, deadline=None)
@given(data=st.data(), lag=st.integers(0, 1), drafts=st.sampled_from([0, 3]))
def test_what_was_computed_from_a_block_in_doubt_is_computed_again(
    sides: tuple[LayerGroup, ...], data: st.DataObject, lag: int, drafts: int
) -> None:
    """A block goes bad, some time passes, and one of its readers yields numbers that aren't finite. From then on, each
    token is right behind the tokens before it, in sequences that live and in those that find something in the cache.
    """
    lag = 0 if sides else lag
    bench = Bench(60, max_batch_tokens=24, lag=lag, drafts=drafts, sides=sides, runner=SpreadingRunner)
    runner, scheduler = bench.runner, bench.scheduler
    prompts = st.builds(
        lambda shared, rest: (1,) * shared + tuple(rest),
        st.sampled_from([SIZE, 3 * SIZE]),
        st.lists(st.integers(2, 3), min_size=1, max_size=2 * SIZE),
    )

    def add() -> None:
        request = bench.request(data.draw(prompts), data.draw(st.integers(1, 30)))
        bench.sequences.append(scheduler.add(request, handoff=data.draw(st.sampled_from([False, False, True]))))

    def land(judged: bool, nonfinite: tuple[int, ...] = ()) -> None:
        plan, launched = bench.flight.popleft()
        for report in scheduler.commit(plan, replace(launched.result(), nonfinite=nonfinite)):
            if report.hold is not None:
                report.hold.release()
            if judged and report.token is not None:
                end = report.sequence.request.prompt_tokens + report.token_index
                assert expected_tokens(report.sequence.tokens[:end], 1) == [report.token]

    def advance(steps: int, *, judged: bool) -> None:
        for _ in range(steps):
            while len(bench.flight) <= lag and bench.launch() is not None:
                pass
            if bench.flight:
                land(judged)

    for _ in range(data.draw(st.integers(1, 4))):
        add()
        advance(data.draw(st.integers(0, 3)), judged=True)
    read = [one for one in bench.sequences if one.status is Status.RUNNING and one.num_computed]
    assume(read)
    sequence = data.draw(st.sampled_from(read))
    block = sequence.hold.blocks[data.draw(st.integers(0, sequence.num_computed - 1)) // SIZE]
    runner.spoil(block)
    for _ in range(data.draw(st.integers(0, 3))):
        add()
        advance(data.draw(st.integers(0, 3)), judged=False)
    while len(bench.flight) <= lag and bench.launch() is not None:
        pass
    assume(bench.flight)
    handles = bench.flight[0][0].handles
    # The first row of a sequence counts, whatever becomes of drafts.
    readers = [
        handles.index(one.handle)
        for one in bench.sequences
        if one.handle in handles and one.status is Status.RUNNING and block in one.hold.blocks
    ]
    assume(readers)
    land(True, (data.draw(st.sampled_from(readers)),))
    for _ in range(data.draw(st.integers(0, 2))):
        add()
    for _ in range(2000):
        if not scheduler.has_work and not bench.flight:
            break
        advance(1, judged=True)
        for one in bench.sequences:
            if not one.ended and not one.hold.doubtful:
                assert runner.holds_kv_of(one.hold.blocks, one.tokens[: one.num_computed])
        scheduler.check_integrity()
    assert not scheduler.has_work
    for one in tuple(bench.sequences):
        bench.add(bench.request((*one.tokens, 0), 2))
        bench.drain()


# Out of blocks.


def test_the_holder_with_most_gives_blocks_up_and_a_holder_of_little_finds_some() -> None:
    bench = Bench(32, max_batch_tokens=64, max_sequences=8, prefix_cache=False)
    # Sixteen blocks each, in the end, where the pool has 32.
    many = [bench.add(bench.request(numbers(SIZE, n), 15 * SIZE, holder=1, expected_tokens=SIZE)) for n in range(4)]
    for _ in range(3):
        bench.step()
    rounds = 0
    while not all(sequence.status is Status.FINISHED for sequence in many):
        short = bench.add(bench.request(numbers(SIZE, 9 + rounds), SIZE, holder=2))
        for _ in range(3 * SIZE):
            bench.step()
            bench.check()
            assert short.status is not Status.PREEMPTED
            if many[0].status is not Status.FINISHED:
                assert many[0].status is Status.RUNNING, "the oldest one always advances"
        assert short.status is Status.FINISHED, "it finds blocks at once"
        rounds += 1
    assert bench.scheduler.preemptions > 0
    assert rounds < 60
    bench.drain()


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
            bench.resume(request, reservation)
        if bench.scheduler.waiting < 6:
            bench.add(bench.request(numbers(4, number), 6))
        bench.step()
        if old.ended:
            break
    assert old.status is Status.FINISHED
    bench.drain()


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


def test_broken_rules_of_use_are_named() -> None:
    """A key is here once, plans and commits take turns, and an output has what its plan asks for."""
    bench = Bench(4)
    request = bench.request((1,), 4)
    bench.add(request)
    with pytest.raises(ValueError, match=r"\('r1', 1\)"):
        bench.scheduler.add(request)
    plan = bench.scheduler.plan()
    with pytest.raises(IntegrityError, match="plan 0 is still in flight"):
        bench.scheduler.plan()
    bench.scheduler.commit(plan, bench.runner.run(plan))
    with pytest.raises(IntegrityError, match="plan 0 came back; in flight is none"):
        bench.scheduler.commit(plan, bench.runner.run(plan))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (StepOutput(()), "has 1 rows; its output has 0"),
        (StepOutput((None,)), "its row yielded no token"),
        (StepOutput((1, 2)), "its output has 2"),
        (StepOutput((None,), nonfinite=(1,)), r"names rows \(1,\)"),
    ],
)
def test_output_that_does_not_fit_the_plan_is_refused(out: StepOutput, message: str) -> None:
    bench = Bench(4)
    bench.add(bench.request((1,), 4))
    with pytest.raises(IntegrityError, match=message):
        bench.scheduler.commit(bench.scheduler.plan(), out)


# A step ahead.


def test_a_step_is_planned_while_another_runs() -> None:
    """A steady batch keeps one step in flight at all times, and computes no row too many where lengths end it."""
    bench = Bench(32, max_batch_tokens=32, lag=1)
    first, second = bench.add(bench.request(numbers(9), 12)), bench.add(bench.request(numbers(5, 1), 7))
    assert spans(bench.launch()) == [(0, 0, 9), (1, 0, 5)]
    plan = bench.launch()
    assert spans(plan) == [(0, 9, 10), (1, 5, 6)]
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


@pytest.mark.parametrize("lead", range(8))
def test_a_request_that_takes_the_last_block_beside_a_plan_in_flight_ends_no_engine(lead: int) -> None:
    """It comes some steps before a running sequence needs a block, while the plan is in flight that preempts nobody."""
    bench = Bench(8, max_batch_tokens=64, max_sequences=2, lag=1)
    bench.add(bench.request(numbers(7 * SIZE - lead), max_tokens=8))
    assert bench.launch() is not None
    for step in range(2 * SIZE):
        if step == lead // 2:
            bench.add(bench.request(numbers(3, 5), max_tokens=4, holder=1))
        bench.launch()
        if bench.flight:
            bench.land()
    bench.drain()
