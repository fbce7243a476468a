"""The time of steps is shared among holders: shares hold, rows take turns, and nobody who is alone is limited."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_bench import SIZE, Bench, numbers, spans

from kvrelay.engine.plan import StepPlan
from kvrelay.engine.scheduling.fairness import max_min
from kvrelay.engine.sequence import Sequence, Status


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 40), max_size=6), st.integers(0, 100))
def test_shares_are_max_min(wanted: dict[int, int], total: int) -> None:
    shares = max_min(wanted, total)
    assert all(0 <= shares[key] <= wanted[key] for key in wanted)
    assert sum(shares.values()) == min(total, sum(wanted.values())), "nothing is left while somebody wants more"
    for key in wanted:
        if shares[key] < wanted[key]:
            assert all(shares[other] <= shares[key] + 1 for other in wanted), "nobody has more than who wants more"


def streams(bench: Bench, counts: dict[int, int], tokens: int) -> list[Sequence]:
    """So many sequences of each holder, which have decoded a token each."""
    found = [
        bench.add(bench.request(numbers(3, 10 * holder + number), tokens, holder=holder))
        for holder, count in counts.items()
        for number in range(count)
    ]
    while not all(sequence.generated for sequence in found):
        bench.step()
    return found


def of_holders(bench: Bench, plan: StepPlan) -> Counter[int]:
    """Tokens of each holder in a plan."""
    holder_of = {sequence.handle: sequence.holder for sequence in bench.sequences}
    tokens: Counter[int] = Counter()
    for handle, start, end in spans(plan):
        tokens[holder_of[handle]] += end - start
    return tokens


@settings(deadline=None, max_examples=8)
@given(
    counts=st.dictionaries(st.integers(1, 3), st.integers(1, 7), min_size=1, max_size=3),
    fixed=st.floats(0.0, 20.0),
    lag=st.integers(0, 1),
    prompts=st.sampled_from([0, 0, 1, 2]),
    drafts=st.sampled_from([0, 0, 2]),
)
def test_a_step_costs_each_holder_no_more_than_its_share_and_all_rows_advance_in_turn(
    counts: dict[int, int], fixed: float, lag: int, prompts: int, drafts: int
) -> None:
    """`Bench` compares all tokens with those of the model alone, whatever steps they come in."""
    bench = Bench(
        600, max_batch_tokens=64, max_sequences=64, max_context=100, lag=lag, drafts=drafts, step_cost=(fixed, 1.0)
    )
    running = streams(bench, counts, 60)
    decoding, holder = list(running), min(counts)
    for number in range(prompts):
        running.append(bench.add(bench.request(numbers(60, 100 + number), 5, holder=holder)))
    last: dict[Sequence, int] = defaultdict(int)
    for step in range(1, 30):
        for sequence in running:
            if sequence.status is not Status.RUNNING:
                last[sequence] = step
        wanted: Counter[int] = Counter()
        for sequence in running:
            if not sequence.ended:
                wanted[sequence.holder] += sequence.expected - sequence.reach
        plan = bench.launch()
        if plan is not None and len(wanted) > 1:
            allowed = len(wanted) * bench.seconds(min(wanted.values()))
            assert bench.seconds(plan.num_tokens) <= allowed + 1e-6
            assert len(of_holders(bench, plan)) == len(wanted) or lag or drafts, "each holder has a part of each step"
        elif plan is not None and not (lag or drafts):
            assert plan.num_tokens >= min(sum(wanted.values()), 64 - SIZE), "who is alone is not limited"
        for sequence in decoding:
            if plan is not None and sequence.handle in plan.handles:
                last[sequence] = step
            # A lag leaves a row out where its token isn't known, and prompts take half of their holder's share.
            assert step - last[sequence] <= 2 * (1 + lag + bool(drafts)) * max(counts.values()), "nobody starves"
        while len(bench.flight) > lag or (bench.flight and plan is None):
            bench.land()
    bench.drain()


def rows_of_next(bench: Bench) -> int:
    """Rows of the next step, which is run."""
    plan = bench.launch()
    bench.land()
    return plan.num_rows


@pytest.mark.parametrize("mine", [1, 3])
def test_what_comes_soon_is_expected_with_short_steps(mine: int) -> None:
    bench = Bench(600, max_batch_tokens=64, max_sequences=64, max_context=100, step_cost=(1.0, 1.0))
    streams(bench, {1: 12, 2: 2}, 30)
    for sequence in [sequence for sequence in bench.sequences if sequence.holder == 2]:
        bench.scheduler.cancel(sequence.request.key)
    assert rows_of_next(bench) == 12
    bench.scheduler.coming = frozenset({(0, 2)})
    assert rows_of_next(bench) <= 3, "a request has said that it comes"
    bench.scheduler.coming = frozenset()
    requests = [bench.request(numbers(3, 200 + number), 4, holder=2) for number in range(mine)]
    kept = [bench.scheduler.reserve(request) for request in requests]
    assert rows_of_next(bench) <= 3, "its blocks are reserved"
    for reservation in kept:
        reservation.release()
    assert rows_of_next(bench) == 12
    bench.drain()


def test_a_holder_of_few_needs_no_other_sequence_to_end() -> None:
    bench = Bench(600, max_batch_tokens=64, max_sequences=16, max_context=100)
    many = streams(bench, {1: 16}, 60)
    late = []
    for holder, number in ((1, 0), (2, 1), (2, 2)):
        request = bench.request(numbers(2 * SIZE, 50 + number), 6, holder=holder)
        reservation = bench.scheduler.reserve(request)
        late.append(bench.resume(request, reservation))
    for holder in (1, 2):
        request = bench.request(numbers(SIZE, 60), 6, holder=holder)
        assert bench.scheduler.reserve(request) is None, "two rows are spare, for holders that have fewer"
    bench.step()
    assert [sequence.status is Status.RUNNING for sequence in late] == [False, True, True]
    last = dict.fromkeys(many, 0)
    for step in range(1, 30):
        plan = bench.launch()
        assert plan.num_rows <= 16
        for sequence in many:
            if sequence.handle in plan.handles:
                last[sequence] = step
            assert step - last[sequence] <= 3, "rows take turns"
        bench.land()
        bench.check()
    assert late[1].ended
    assert late[2].ended
    bench.drain()


@settings(deadline=None, max_examples=25)
@given(
    fixed=st.floats(0.0, 0.02),
    each=st.floats(1e-5, 0.01),
    bound=st.floats(0.01, 0.1),
    decoding=st.integers(0, 6),
    lag=st.integers(0, 1),
)
def test_a_step_with_a_chunk_beside_decodes_keeps_its_time_and_prompts_never_starve(
    fixed: float, each: float, bound: float, decoding: int, lag: int
) -> None:
    bench = Bench(400, max_batch_tokens=64, max_sequences=16, lag=lag, step_cost=(fixed, each), step_seconds=bound)
    streams(bench, {1: decoding} if decoding else {}, 60)
    prompts = [bench.add(bench.request(numbers(150, 300 + number), 2, holder=1)) for number in range(2)]
    while any(not sequence.generated for sequence in prompts):
        decodes = any(sequence.generated and not sequence.ended for sequence in bench.sequences)
        before = sum(sequence.num_computed for sequence in prompts)
        plan = bench.launch()
        if plan is not None and plan.work.prompt_tokens:
            work = plan.work
            if decodes:
                least = bench.seconds(work.sequences + SIZE)
                assert bench.seconds(plan.num_tokens) <= max(bound, least) * (1 + 1e-9)
            elif lag == 0 and before + 64 <= 150:
                assert plan.num_tokens == 64, "a prompt that is alone has the whole step"
        while len(bench.flight) > lag or (bench.flight and plan is None):
            bench.land()
        if lag == 0 and plan is not None:
            after = sum(sequence.num_computed for sequence in prompts)
            assert after > before or all(sequence.generated for sequence in prompts), "prompts advance in each step"
    bench.drain()
