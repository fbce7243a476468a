"""Costs: fitted to what they are measured from, and never falling when there is more to do."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.costs.fit import ALL_SAMPLES, FORGOTTEN, LinearFit
from kvrelay.costs.handoff import KvBytes, LinkCost, LinkFit, typical
from kvrelay.costs.step import StepCost, StepFit, StepWork, pairs
from kvrelay.costs.worker import WorkerCosts
from kvrelay.rpc.costs import costs_message, read_costs

COST_VALUES = (2e-3, 3e-4, 1e-6, 1e-4, 4e-3, 5e-5, 2e-8)
COST = StepCost(*COST_VALUES)


def works(rng: random.Random, count: int) -> list[StepWork]:
    """Steps as an engine has them: chunks, decodes, or both."""
    found = []
    for _ in range(count):
        chunk = rng.choice([0, 0, rng.randint(1, 512), 512])
        sequences = rng.randint(0 if chunk else 1, 32)
        found.append(
            StepWork(
                chunk,
                pairs(rng.randrange(4096), chunk),
                sequences,
                sequences * rng.randint(16, 4096),
                rng.randint(0, 4),
            )
        )
    return found


@given(seed=st.integers(0, 2**32), noise=st.floats(0, 0.1))
@settings(max_examples=20, deadline=None)
def test_a_fit_predicts_steps_like_those_that_it_has_seen(seed: int, noise: float) -> None:
    rng, fit = random.Random(seed), StepFit()
    for work in works(rng, 400):
        slow = 20.0 if rng.random() < 0.02 else 1.0  # a pause of the process
        fit.add(work, slow * COST.seconds(work) * rng.uniform(1 - noise, 1 + noise))
    cost = fit.cost()
    off = [abs(cost.seconds(work) / COST.seconds(work) - 1) for work in works(rng, 200)]
    assert sorted(off)[100] < 0.05 + noise
    assert max(fit.decode_error, fit.prompt_error) < 0.25 + noise


def test_large_steps_are_remembered_through_many_small_ones_and_a_slower_machine_is_noticed() -> None:
    fit, large, small = StepFit(), StepWork(512, pairs(0, 512)), StepWork(0, 0, 1, 64)
    for tokens in (64, 256, 512) * 8:
        fit.add(StepWork(tokens, pairs(0, tokens)), COST.seconds(StepWork(tokens, pairs(0, tokens))))
    for _ in range(2000):
        fit.add(small, COST.seconds(small))
    cost = fit.cost()
    assert cost.seconds(large) == pytest.approx(COST.seconds(large), rel=0.05)
    for _ in range(150):
        fit.add(small, 2 * COST.seconds(small))
    cost = fit.cost()
    assert cost.seconds(small) == pytest.approx(2 * COST.seconds(small), rel=0.05)


@given(st.integers(0, 2**32), st.integers(1, 40), st.floats(0, 0.01))
@settings(max_examples=10, deadline=None)
def test_the_interval_between_two_tokens_is_predicted_with_what_chunks_and_pauses_add(
    seed: int, every: int, pause: float
) -> None:
    """Each step of a chunk and decodes is followed by `every` - 1 steps of decodes alone."""
    rng, fit = random.Random(seed), StepFit()
    intervals = []
    for step in range(1000):
        sequences = rng.randint(1, 16)
        chunk = rng.randint(1, 256) if step % every == 0 else 0
        work = StepWork(chunk, pairs(0, chunk), sequences, 300 * sequences)
        fit.add(work, COST.seconds(work))
        interval = COST.seconds(work) + pause
        fit.add_interval(work, interval)
        intervals.append((interval, COST.seconds(StepWork(0, 0, sequences, 300 * sequences))))
    mean, decodes = (sum(column) / len(column) for column in zip(*intervals, strict=True))
    assert fit.extra == pytest.approx(mean - decodes, rel=0.3, abs=0.1 * mean)


@given(
    samples=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 64), st.floats(1e-6, 10)), min_size=1, max_size=60),
    work=st.tuples(st.integers(0, 1000), st.integers(0, 100), st.integers(0, 100000), st.integers(0, 9)),
)
@settings(max_examples=100, deadline=None)
def test_whatever_was_measured_more_work_never_costs_less(
    samples: list[tuple[int, int, float]], work: tuple[int, int, int, int]
) -> None:
    fit = StepFit()
    for tokens, sequences, seconds in samples:
        fit.add(StepWork(tokens, pairs(0, tokens), sequences, 50 * sequences), seconds)
    cost = fit.cost()
    tokens, sequences, context, guesses = work
    here = cost.seconds(StepWork(tokens, pairs(0, tokens), sequences, context, guesses))
    assert 0 <= here < math.inf
    for more in (
        StepWork(tokens + 1, pairs(0, tokens + 1), sequences, context, guesses),
        StepWork(tokens, pairs(0, tokens), sequences + 1, context, guesses),
        StepWork(tokens, pairs(0, tokens), sequences, context + 100, guesses),
        StepWork(tokens, pairs(0, tokens), sequences, context, guesses + 1),
    ):
        assert cost.seconds(more) >= here * (1 - 1e-9)
    assert cost.prefill(tokens + 1, 0, 256) >= cost.prefill(tokens, 0, 256) >= 0


@given(budget=st.floats(1e-4, 1), start=st.integers(0, 10**5), sequences=st.integers(0, 64), known=st.booleans())
@settings(deadline=None)
def test_the_largest_chunk_within_a_time_fits_and_the_next_one_doesnt(
    budget: float, start: int, sequences: int, known: bool
) -> None:
    others = StepWork(100 * known, pairs(0, 100 * known), sequences, 500 * sequences)
    tokens = COST.tokens_within(budget, start, others)

    def seconds(more: int) -> float:
        chunk = StepWork(others.prompt_tokens + more, others.prompt_pairs + pairs(start, more), *others[2:])
        return COST.seconds(chunk)

    assert tokens == 0 or seconds(tokens) <= budget * (1 + 1e-9)
    assert seconds(tokens + 1) > budget * (1 - 1e-6)


@given(
    seed=st.integers(0, 2**32),
    budget=st.floats(0.02, 0.2),
    sequences=st.integers(0, 32),
    smallest=st.integers(1, 64),
)
@settings(max_examples=12, deadline=None)
def test_bounded_steps_keep_their_time_and_grow_no_faster_than_they_are_measured(
    seed: int, budget: float, sequences: int, smallest: int
) -> None:
    """Whatever a machine's steps cost, which the fit has seen for one small chunk only: a long prompt is computed."""
    rng, fit = random.Random(seed), StepFit()
    true = StepCost(*[value * 10 ** rng.uniform(-0.5, 0.5) for value in COST_VALUES])
    decodes = StepWork(sequences=sequences, context_tokens=500 * sequences)
    fit.add(StepWork(smallest, pairs(0, smallest)), true.seconds(StepWork(smallest, pairs(0, smallest))))
    if sequences:
        for count in (1, sequences) * 8:
            work = StepWork(sequences=count, context_tokens=500 * count)
            fit.add(work, true.seconds(work))
    largest, start, least = smallest, 0, 16
    while start < 20_000:
        cost = fit.cost()
        chunk = cost.tokens_within(budget, start, decodes)
        assert chunk <= 2 * largest
        chunk = min(512, max(least, chunk))
        work = decodes._replace(prompt_tokens=chunk, prompt_pairs=pairs(start, chunk))
        seconds = true.seconds(work) * rng.uniform(0.95, 1.05)
        must = true.seconds(work._replace(prompt_tokens=least, prompt_pairs=pairs(start, least)))
        assert seconds <= 2 * max(budget, must), (start, chunk)
        fit.add(work, seconds)
        largest, start = max(largest, chunk), start + chunk


def test_sizes_that_were_not_seen_for_long_are_forgotten() -> None:
    fit = LinearFit(2)

    def measure(sizes: tuple[int, ...], each: float, count: int) -> None:
        for number in range(count):
            size = sizes[number % len(sizes)]
            fit.add([1.0, size], 1e-3 + each * size, size.bit_length())

    measure((500,), 1e-3, 64)  # the machine was slow then
    measure((1, 2, 4, 8), 1e-5, 256)
    before = fit.predict([1.0, 500])
    assert before > 0.012, "what was measured of this size counts, although small sizes are in sharp contrast to it"
    measure((1, 2, 4, 8), 1e-5, FORGOTTEN * ALL_SAMPLES)
    assert fit.predict([1.0, 500]) == pytest.approx(6e-3, rel=0.05), "the latest that is known"
    assert set(fit.strata) == {1, 2, 3, 4}


def test_a_chunk_that_costs_nothing_has_no_limit() -> None:
    assert StepCost(fixed=1e-3).tokens_within(0.1, 0) == 2**31


def test_a_fit_goes_on_from_what_was_kept_and_refuses_another_ones() -> None:
    fit, again = StepFit(), StepFit()
    rng = random.Random(0)
    for work in works(rng, 800):
        fit.add(work, COST.seconds(work))
    again.restore(fit.state())
    ours, theirs = fit.cost(), again.cost()
    assert theirs.seconds(StepWork(99, pairs(0, 99))) == pytest.approx(
        ours.seconds(StepWork(99, pairs(0, 99))), rel=0.01
    )
    # The same machine may be busier, or not as busy any more.
    work = StepWork(99, pairs(0, 99))
    for _ in range(16):
        again.add(work, COST.seconds(work) / 4)
    theirs = again.cost()
    assert theirs.seconds(work) == pytest.approx(COST.seconds(work) / 4, rel=0.3)
    for state in ({"decode": []}, {"decode": [[1.0, 2.0]], "prompt": []}, {"decode": [[math.nan] * 21], "prompt": []}):
        with pytest.raises(ValueError, match="state has"):
            StepFit().restore(state)
    with pytest.raises(ValueError, match="features has 2 numbers; this fit has 3"):
        LinearFit(3).add([1.0, 2.0], 1.0)


def test_a_hand_off_is_exposed_where_the_link_is_slower_than_the_computing() -> None:
    kv = KvBytes(100.0, ((10.0, 64),), 5000.0)
    assert kv.between(0, 1000) == 100_000 + 640 + 5000
    assert kv.between(990, 1000) == 1000 + 100 + 5000
    link = LinkCost(0.01, 1e-6)
    assert link.exposed(1e6, 1e5, 10.0) == pytest.approx(0.11)
    assert link.exposed(1e6, 1e5, 0.5) == pytest.approx(0.51)
    fit = LinkFit()
    for size in range(1000, 200_000, 1000):
        fit.add(size, link.exposed(size, size, 0.0))
    found = fit.cost()
    assert (found.fixed, found.byte) == (pytest.approx(0.01, rel=0.02), pytest.approx(1e-6, rel=0.02))
    assert typical([]) == LinkCost()
    assert typical([LinkCost(1, 2), LinkCost(3, 1), LinkCost(2, 3)]) == LinkCost(2, 2)


def test_costs_are_read_as_they_were_said() -> None:
    costs = WorkerCosts(
        COST, 512, 0.05, 0.1, 0.2, KvBytes(4.0, ((2.0, 8),), 16.0), {"prefill-0": LinkCost(1e-3, 1e-9)}, 0.01
    )
    assert read_costs(costs_message(costs)) == costs
