"""Suspects: the router blames a request that ends its worker each time, and no other request that ran beside it."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.session.suspects import CLEAN_TOKENS, MAX_LOSSES, TRIAL_TOKENS, Suspicion


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=10))
def test_the_second_loss_on_trial_or_the_third_in_any_case_convicts(losses: list[tuple[int, bool]]) -> None:
    suspicion, tokens, count, last = Suspicion(), 0, 0, 0
    for more, tried in losses:
        tokens += more
        count = 1 if tokens - last >= CLEAN_TOKENS else count + 1
        last = tokens
        convicted = suspicion.lost(tokens, tried=tried)
        assert convicted == (count >= (2 if tried else MAX_LOSSES))
        assert suspicion.losses == count
        assert [suspicion.tokens_left(tokens + more) for more in (0, TRIAL_TOKENS - 1, TRIAL_TOKENS)] == [
            TRIAL_TOKENS,
            1,
            0,
        ]
    assert losses or not suspicion.tokens_left(0)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_one_that_ends_its_worker_each_time_ends_two_and_takes_no_other_along(seed: int) -> None:
    """A fleet in which requests run together, but suspects are tried one by one."""
    rng = random.Random(seed)
    requests = {name: Suspicion() for name in range(rng.randrange(2, 12))}
    poison = rng.randrange(len(requests))
    for name in requests:
        assert not requests[name].lost(0, tried=False)
    trials = list(requests)
    rng.shuffle(trials)
    convicted = [name for name in trials if name == poison and requests[name].lost(0, tried=True)]
    assert convicted == [poison]
    for name in set(requests) - {poison}:
        # Clear after its trial; another fault may still end its worker.
        assert not requests[name].lost(TRIAL_TOKENS, tried=False)
