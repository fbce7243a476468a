"""Guesses are made where they pay, and cost next to nothing where they don't. By a clock that only steps move."""

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.build import engine_on
from kvrelay.engine.config import EngineConfig, SpeculationConfig
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.speculate.allowance import FIRST, MOST, SHARE, Allowance
from kvrelay.engine.speculate.base import Guess, Want
from kvrelay.engine.speculate.choice import FREE, Candidate, Guessing, counts
from kvrelay.engine.speculate.costs import Choosing, StepCosts
from kvrelay.engine.speculate.speculation import Speculation
from support.guesses import HashGuesses
from support.hash_runner import HashRunner, hash_spec

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=1.0)
SHAPED = SamplingParams(temperature=0.0, repetition_penalty=1.1)
STEP = 1e-3
OPTIONS = EngineConfig(block_size=8, max_batch_tokens=64, max_sequences=32)


class Priced(HashRunner):
    """Steps take STEP, and a share of it for each row by how its token is chosen."""

    def __init__(self, prices: dict[Choosing, float], lag: int = 0) -> None:
        super().__init__(300, spec=hash_spec(500), lag=lag)
        self.prices = prices
        self.now = 0.0

    def run(self, plan: StepPlan) -> StepOutput:
        self.now += self.seconds(plan)
        return super().run(plan)

    def seconds(self, plan: StepPlan) -> float:
        return STEP * (1 + sum([self.prices[Choosing.of(params)] for params in plan.sampling]))

    def clock(self) -> float:
        return self.now


class PricedGuesses(HashGuesses):
    """A guess takes a share of STEP, for a whole batch at a time."""

    passes = True

    def __init__(self, runner: Priced, price: float, wrong_every: int) -> None:
        super().__init__(wrong_every=wrong_every)
        self._runner, self._price = runner, price

    def propose(self, wants: Sequence[Want]) -> list[Guess]:
        self._runner.now += STEP * self._price * max([want.most for want in wants])
        return super().propose(wants)


def prices(drawn: float, row: float = 0.01) -> dict[Choosing, float]:
    return {
        Choosing.GREEDY: row,
        Choosing.DRAWN: row + drawn,
        Choosing.FILTERED: row + 2 * drawn,
        Choosing.SHAPED: row + 3 * drawn,
    }


class Blank(Priced):
    """Yields token 0 for every row."""

    def run(self, plan: StepPlan) -> StepOutput:
        self.now += self.seconds(plan)
        return StepOutput((0,) * plan.num_rows)


def measured(runner: Blank) -> StepCosts:
    costs = StepCosts(32, runner.clock)
    costs.measure(runner)
    return costs


def test_measured_costs_are_those_of_the_steps() -> None:
    """With rows that are chosen in different ways, alone and together, and with shaped ones once there were some."""
    runner = Blank(prices(0.1))
    costs = measured(runner)
    for kinds in ([Choosing.GREEDY] * 5, [Choosing.DRAWN] * 11, [Choosing.FILTERED] * 3 + [Choosing.DRAWN]):
        expected = STEP * (1 + sum([runner.prices[kind] for kind in kinds]))
        assert costs.step(len(kinds), 0, kinds, drafted=False) == pytest.approx(expected, rel=0.01)
    shaped = [Choosing.SHAPED] * 4
    expected = STEP * (1 + 4 * runner.prices[Choosing.SHAPED])
    for _ in range(50):
        costs.observe(4, 0, shaped, expected, drafted=False)
    assert costs.step(4, 0, shaped, drafted=False) == pytest.approx(expected, rel=0.01)


@settings(max_examples=40, deadline=None)
@given(
    share=st.floats(0.0, 1.0),
    drawn=st.floats(0.0, 1.0),
    row=st.floats(0.0, 0.2),
    rows=st.integers(1, 16),
    start_price=st.floats(0.0, 0.5),
    pass_price=st.floats(0.0, 1.0),
)
def test_guesses_are_checked_where_they_raise_tokens_per_second(
    share: float, drawn: float, row: float, rows: int, start_price: float, pass_price: float
) -> None:
    guessing = Guessing(start_price * STEP, pass_price * STEP)
    costs = measured(Blank(prices(drawn, row)))
    for kind in (Choosing.GREEDY, Choosing.DRAWN, Choosing.FILTERED):
        candidates = [Candidate(share, 4, 0, kind)] * rows
        found = counts(candidates, costs, 32 - rows, guessing)
        tokens = rows + sum([share**level for count in found for level in range(1, count + 1)])
        seconds = costs.step(rows + sum(found), 0, [kind] * (rows + sum(found)), drafted=True)
        alone = costs.step(rows, 0, [kind] * rows, drafted=False)
        gain = tokens / (seconds + guessing.seconds(max(found))) / (rows / alone)
        assert gain > 1.0 or not any(found)
        assert sum(found) <= 32 - rows
        # The first guess of one sequence is the one that costs the least and is the most likely.
        with_one = costs.step(rows + 1, 0, [kind] * (rows + 1), drafted=True) + guessing.seconds(1)
        one = (rows + share) / with_one / (rows / alone)
        assert any(found) or one < 1.031


def test_drawn_rows_that_cost_much_get_no_guesses() -> None:
    """A third of the guesses comes true: that pays for greedy rows, and not for those whose drawing takes long."""
    costs = measured(Blank(prices(0.15)))
    for kind, pays in ((Choosing.GREEDY, True), (Choosing.DRAWN, False), (Choosing.FILTERED, False)):
        assert any(counts([Candidate(0.33, 8, 0, kind)] * 8, costs, 24, FREE)) == pays


def test_long_chains_are_checked_where_guesses_come_true() -> None:
    costs = measured(Blank(prices(0.0)))
    assert counts([Candidate(0.97, 16, 0, Choosing.GREEDY)], costs, 31, FREE) == [16]
    assert counts([Candidate(0.3, 16, 0, Choosing.GREEDY)], costs, 31, FREE)[0] < 5


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(-2.0, 2.0)), max_size=400))
def test_no_more_is_lost_than_allowed(steps: list[tuple[bool, float]]) -> None:
    """Whatever guesses lead to, if there are none while nothing may be lost."""
    allowance, won, worst = Allowance(), 0.0, 0.0
    for number, (guessed, gain) in enumerate(steps):
        guessed = guessed and allowance.open
        allowance.settle(gain if guessed else 0.0)
        won += gain if guessed else 0.0
        worst = min(worst, gain)
        assert won >= worst - FIRST - SHARE * (number + 1) - 1e-9


def run_seconds(runner: Priced, sampling: SamplingParams, rows: int, proposer: HashGuesses | None) -> tuple[float, int]:
    """Seconds of a batch, and its steps."""
    options = dataclasses.replace(OPTIONS, speculation=SpeculationConfig("ngram", max_tokens=4))
    engine = engine_on(runner, OPTIONS if proposer is None else options, proposer)
    if proposer is not None:
        speculation = Speculation(options.speculation, proposer, OPTIONS.max_sequences, runner.clock)
        engine.scheduler.speculation = speculation
        engine.warm_up()
    began, steps = runner.now, runner.steps
    for number in range(rows):
        prompt = tuple(range(number, number + 9))
        sampled = dataclasses.replace(sampling, seed=number, max_tokens=120)
        engine.scheduler.add(Request(f"{number}", 1, prompt, len(prompt), sampled))
    while engine.has_work:
        engine.step()
    return runner.now - began, runner.steps - steps


@pytest.mark.parametrize("sampling", [DRAWN, SHAPED], ids=["drawn", "shaped"])
@pytest.mark.parametrize(("rows", "drawn", "pass_price"), [(1, 0.5, 0.3), (8, 0.15, 0.0), (8, 0.15, 0.5)])
@pytest.mark.parametrize("wrong_every", [1, 3])
def test_guesses_never_cost_more_than_they_may(
    sampling: SamplingParams, rows: int, drawn: float, pass_price: float, wrong_every: int
) -> None:
    runner = Priced(prices(drawn))
    plain, steps = run_seconds(runner, sampling, rows, None)
    proposer = PricedGuesses(runner, pass_price, wrong_every) if pass_price else HashGuesses(wrong_every=wrong_every)
    guessed, _ = run_seconds(runner, sampling, rows, proposer)
    assert guessed <= plain * (1 + SHARE + (FIRST + 1) / steps)


class Slower(Priced):
    """Steps with drafts take longer than such steps did when they were measured."""

    def seconds(self, plan: StepPlan) -> float:
        return super().seconds(plan) * (1.0 if plan.drafts is None else 2.2)


class Reading(PricedGuesses):
    """Reads tokens that it hasn't seen before it guesses, as a draft model does."""

    def __init__(self, runner: Priced, price: float, wrong_every: int) -> None:
        super().__init__(runner, price, wrong_every)
        self._read: dict[int, int] = {}

    def propose(self, wants: Sequence[Want]) -> list[Guess]:
        for want in wants:
            unread = len(want.tokens) - self._read.get(want.handle, 0)
            self._runner.now += STEP * 0.04 * unread
            self._read[want.handle] = len(want.tokens)
        return super().propose(wants)


class Streams:
    """One after another, with guesses."""

    def __init__(self, runner: Priced, proposer: PricedGuesses) -> None:
        options = dataclasses.replace(OPTIONS, speculation=SpeculationConfig("ngram", max_tokens=4))
        self._engine = engine_on(runner, options, proposer)
        self._engine.scheduler.speculation = Speculation(
            options.speculation, proposer, OPTIONS.max_sequences, runner.clock
        )
        self._engine.warm_up()
        self._runner, self._proposer, self._count = runner, proposer, 0

    def cost(self, tokens: int, wrong_every: int) -> float:
        """Seconds of a stream, as a share of what it takes without guesses."""
        self._proposer.wrong_every = wrong_every
        began = self._runner.now
        sampled = dataclasses.replace(GREEDY, max_tokens=tokens)
        self._engine.scheduler.add(Request(f"{self._count}", 1, tuple(range(9)), 9, sampled))
        self._count += 1
        while self._engine.has_work:
            self._engine.step()
        return (self._runner.now - began) / (tokens * STEP * (1 + self._runner.prices[Choosing.GREEDY]))


def test_what_a_step_costs_is_known_while_all_have_guesses() -> None:
    """Otherwise, what steps with guesses take would seem to be the machine's speed, and guesses would seem to pay."""
    runner = Slower(prices(0.0, 0.1))
    streams = Streams(runner, PricedGuesses(runner, 0.1, 1))
    assert streams.cost(480, wrong_every=1000) < 0.8
    assert sum([streams.cost(480, wrong_every=2) for _ in range(4)]) / 4 < 1 + SHARE + (MOST + 2) / (4 * 480)


def test_guesses_come_back_after_texts_for_which_they_did_not_pay() -> None:
    """They are tried for several steps: the first one has to read what was written since, and doesn't pay."""
    runner = Priced(prices(0.0))
    streams = Streams(runner, Reading(runner, 0.2, 1))
    assert sum([streams.cost(400, wrong_every=1) for _ in range(5)]) / 5 < 1 + SHARE + (FIRST + 8) / (5 * 400)
    assert min([streams.cost(400, wrong_every=1000) for _ in range(3)]) < 0.6


def test_right_guesses_still_pay() -> None:
    runner = Priced(prices(0.15))
    plain, _ = run_seconds(runner, DRAWN, 8, None)
    guessed, _ = run_seconds(runner, DRAWN, 8, HashGuesses(wrong_every=1000))
    assert guessed < 0.75 * plain
