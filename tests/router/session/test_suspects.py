"""Suspects: the router blames a request that ends its worker each time, and no other request that ran beside it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.session.suspects import CLEAN_TOKENS, MAX_LOSSES, TRIAL_TOKENS, Suspicion


@settings(max_examples=300)
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
