"""Guesses are made where they pay, and cost next to nothing where they don't. By a clock that only steps move."""

from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvrelay.engine.build import engine_on
from kvrelay.engine.config import EngineConfig, SpeculationConfig
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.speculate.base import Want
from kvrelay.engine.speculate.speculation import (
    FIRST,
    MOST,
    PLAIN_EVERY,
    PLAIN_STEPS,
    SHARE,
    WORST,
    Account,
    Speculation,
)
from support.guesses import HashGuesses
from support.hash_runner import HashRunner, hash_spec

STEP = 1e-3
MOST_TOKENS = 4
GUESSES = SpeculationConfig("ngram", max_tokens=MOST_TOKENS)
OPTIONS = EngineConfig(block_size=8, max_batch_tokens=64, max_sequences=32)
NEVER, ALWAYS = 1, 1000
"""Values of `wrong_every`."""


class Priced(HashRunner):
    """Steps take STEP, a share of it for each row, and another one for each draft."""

    def __init__(self, row: float = 0.01, draft: float = 0.0) -> None:
        super().__init__(700, spec=hash_spec(2000))
        self.now = 0.0
        self.slower = 1.0
        self._row, self.draft = row, draft

    def run(self, plan: StepPlan) -> StepOutput:
        self.now += STEP * self.slower * (1 + self._row * plan.num_rows + self.draft * plan.num_drafts)
        return super().run(plan)

    def clock(self) -> float:
        return self.now


class PricedGuesses(HashGuesses):
    """Guesses that take shares of STEP: each pass, for a whole batch at a time, and each token that is read first.
    None are found if `wrong_every` is 0, after one pass. Its chains are noted."""

    def __init__(self, runner: Priced, price: float = 0.0, reading: float = 0.0, wrong_every: int = NEVER) -> None:
        super().__init__(wrong_every=wrong_every)
        self.asked: list[tuple[int, int]] = []
        """Tokens of the sequence, and guesses asked for, of each first want of a step."""
        self._runner, self._price, self._reading = runner, price, reading
        self._read: dict[int, int] = {}

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        unread = sum([len(want.tokens) - self._read.get(want.handle, 0) for want in wants])
        self._read |= {want.handle: len(want.tokens) for want in wants}
        passes = max([want.most for want in wants]) if self.wrong_every else 1
        self._runner.now += STEP * (self._price * passes + self._reading * unread)
        self.asked.append((len(wants[0].tokens), wants[0].most))
        return super().propose(wants) if self.wrong_every else [[] for _ in wants]


class Batches:
    """Batches of sequences of one length, one behind the other."""

    def __init__(self, runner: Priced, proposer: PricedGuesses | None) -> None:
        self.engine = engine_on(runner, OPTIONS)
        if proposer is not None:
            self.speculation = Speculation(GUESSES, proposer, runner.clock)
            self.engine.scheduler.speculation = self.speculation
        self._runner, self._count = runner, 0

    def seconds(self, tokens: int, rows: int = 1) -> float:
        """Seconds of a batch."""
        began = self._runner.now
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
        for _ in range(rows):
            self.engine.scheduler.add(Request(f"{self._count}", 1, tuple(range(9)), 9, sampling))
            self._count += 1
        while self.engine.has_work:
            self.engine.step()
        return self._runner.now - began


@settings(max_examples=200, deadline=None)
@given(
    worst=st.floats(0.1, WORST),
    steps=st.lists(st.tuples(st.integers(1, 60), st.floats(-1.0, 1.0)), max_size=60),
)
@example(worst=WORST, steps=[(5000, -1.0)])
def test_no_more_is_lost_than_allowed(worst: float, steps: list[tuple[int, float]]) -> None:
    """The loss is bounded whatever guesses lead to, if none are made while none are allowed.

    Args:
        worst: plain steps that a step loses at most.
        steps: how often in a row a step with guesses wins so many plain steps, or that share of `worst`, if it loses.
    """
    account, won, number = Account(), 0.0, 0
    account.measure(STEP)
    for times, share in steps:
        for _ in range(times):
            number += 1
            gain = share * (MOST_TOKENS if share > 0 else worst) if account.begin() else 0.0
            account.settle(gain)
            won += gain
            assert won >= -(SHARE * number + FIRST + 1 + (MOST + 1) * max(0.0, worst - 1)) - 1e-9


@pytest.mark.more
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 8),
    row=st.floats(0.0, 0.2),
    draft=st.floats(0.0, 0.3),
    price=st.floats(0.0, 0.25),
    wrong_every=st.integers(0, 3),
)
def test_guesses_never_cost_more_than_they_may(
    rows: int, row: float, draft: float, price: float, wrong_every: int
) -> None:
    """Right ones, wrong ones, and look-ups that find nothing; for steps that cost more with drafts, and don't."""
    tokens = 250
    alone = 1 + row * rows
    longest = (1 + row * rows + (row + draft) * rows * MOST_TOKENS + price * MOST_TOKENS) / alone
    assume(longest <= 1 + WORST)
    plain = Batches(Priced(row, draft), None).seconds(tokens, rows)
    runner = Priced(row, draft)
    guessed = Batches(runner, PricedGuesses(runner, price, wrong_every=wrong_every)).seconds(tokens, rows)
    lost = SHARE * tokens + FIRST + 1 + (MOST + 1) * max(0.0, longest - 2)
    assert guessed <= plain + lost * STEP * alone


@pytest.mark.parametrize("rows", [1, 6])
def test_right_guesses_are_made_in_nearly_all_steps(rows: int) -> None:
    runner = Priced()
    batches = Batches(runner, PricedGuesses(runner, 0.05, wrong_every=ALWAYS))
    batches.seconds(900, rows)
    steps, counts = batches.engine.steps, batches.speculation.counts
    assert steps - counts.steps <= 2 + PLAIN_STEPS * (1 + steps // PLAIN_EVERY)
    assert counts.accepted > 0.95 * counts.proposed


@pytest.mark.more
def test_another_text_is_noticed() -> None:
    """Guesses end where they don't pay, and come back where they do, though what was written meanwhile must be read."""
    runner = Priced()
    proposer = PricedGuesses(runner, 0.2, 0.007)
    batches, plain = Batches(runner, proposer), STEP * 1.01
    longest = 1 + 0.2 * MOST_TOKENS + 0.007 * 409
    for _ in range(2):
        proposer.wrong_every = NEVER
        bad = sum([batches.seconds(400) for _ in range(5)])
        assert bad < plain * (2000 + SHARE * 2000 + MOST + 1 + (MOST + 1) * (longest - 2))
        proposer.wrong_every = ALWAYS
        assert batches.seconds(400) < plain * 400
        assert batches.seconds(400) < 0.5 * plain * 400


@pytest.mark.more
def test_what_a_step_costs_is_known_while_all_have_guesses() -> None:
    """Guesses pay on a slow machine as on a fast one, and not when it becomes fast but for them."""
    runner = Priced()
    batches = Batches(runner, PricedGuesses(runner, wrong_every=3))
    for slower, draft, pays in ((1.0, 0.1, True), (3.0, 0.1, True), (1.0, 1.2, False), (1.0, 0.1, True)):
        runner.slower, runner.draft = slower, draft
        batches.seconds(1900)
        plain, before, steps = 1900 * STEP * 1.01 * slower, batches.speculation.counts.steps, batches.engine.steps
        took = batches.seconds(1900)
        guessed = (batches.speculation.counts.steps - before) / (batches.engine.steps - steps)
        assert guessed > 0.8 if pays else guessed < 0.05
        assert took < (0.8 if pays else 1 + 2 * SHARE) * plain


def test_a_chain_is_one_longer_than_what_was_kept() -> None:
    runner = Priced(0.0)
    proposer = PricedGuesses(runner, wrong_every=11)
    Batches(runner, proposer).seconds(150)
    assert len(proposer.asked) < PLAIN_EVERY
    pairs = list(zip(proposer.asked, proposer.asked[1:], strict=False))
    # A step adds one token more than it keeps guesses. The end of the sequence cuts the last chains.
    grown = [(now - before, most) for (before, _), (now, most) in pairs if now < 9 + 150 - MOST_TOKENS]
    assert all(most == min(MOST_TOKENS, more) for more, most in grown)
    assert {most for _, most in grown} == set(range(1, MOST_TOKENS + 1))
