"""The router's expectations of requests, learnt from requests that have ended."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.placing.usual import HOLDERS, UNKNOWN_TOKENS, CompletionRate, UsualLengths
from support.router_fakes import entries


@given(st.integers(1, 100_000), st.lists(st.integers(1, 100_000), max_size=40))
def test_an_expectation_is_within_what_was_asked_for_and_one_of_equal_lengths_comes_near(
    most: int, ended: list[int]
) -> None:
    lengths = UsualLengths()
    assert lengths.expected(1, most) == min(most, UNKNOWN_TOKENS)
    for tokens in ended:
        lengths.learn(1, most, min(most, tokens))
        assert 1 <= lengths.expected(1, most) <= most
    length = max(1, most // 3)
    for _ in range(200):
        lengths.learn(2, most, length)
    assert length <= lengths.expected(2, most) <= length * 1.1 + 1


def test_each_holder_has_its_own_and_what_is_remembered_is_bounded() -> None:
    lengths, rng = UsualLengths(), random.Random(0)
    for _ in range(100):
        lengths.learn(1, 1000, 1000)
        lengths.learn(2, 1000, rng.randrange(5, 15))
    assert lengths.expected(1, 1000) == 1000
    assert lengths.expected(2, 1000) < 100
    for holder in range(3 * HOLDERS):
        lengths.learn(holder, 1000, 10)
    assert entries(lengths) <= HOLDERS


def test_the_delay_of_a_refused_request_follows_from_how_fast_others_end() -> None:
    now = 0.0
    rate = CompletionRate(lambda: now)
    for _ in range(100):
        now += 0.1
        rate.ended()
    assert 4.9 < rate.retry_seconds(waiting=49) < 5.1
    slow = rate.retry_seconds(waiting=10_000)
    assert slow == 120
    now += 1000
    assert rate.retry_seconds(waiting=0) == 30, "nothing has ended lately"
