"""The wait before a lost member's replacement."""

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cluster.fleet.replacement import LONG_LIFE_SECONDS, MOST_SECONDS, Backoff


def test_the_first_replacement_is_immediate_and_the_wait_then_doubles() -> None:
    backoff = Backoff()
    assert [backoff.after(1.0) for _ in range(9)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_long_life_resets_the_wait() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.after(1.0)
    assert backoff.after(LONG_LIFE_SECONDS) == 0.0
    assert backoff.after(1.0) == 0.5


@given(st.lists(st.floats(0, 200), max_size=50))
def test_the_wait_is_bounded(lives: list[float]) -> None:
    backoff = Backoff()
    assert all(0.0 <= backoff.after(life) <= MOST_SECONDS for life in lives)
