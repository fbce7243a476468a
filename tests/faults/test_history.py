"""The judge of histories accepts a right one, and rejects each kind of wrong one."""

import time
from collections.abc import Callable, Sequence

import pytest

from support.history import CANCEL_SECONDS, MAX_RETRIES, History, Pool, violations

WHOLE = Pool("decode-0", total=8, free=5, cached=3, held=0, requests=0)


def oracle(prompt: Sequence[int], count: int) -> list[int]:
    return [sum(prompt) + index for index in range(count)]


def right() -> History:
    """Two requests, one of them tried again, one ended by its client."""
    history = History()
    history.invoke("a", [1, 2], 3)
    history.invoke("b", [5], 3)
    history.token("a", 0, 3)
    history.token("b", 0, 5)
    history.retry("a")
    history.token("a", 1, 4)
    history.cancel("b")
    history.retry("b", "failed while the cancel was under way")
    history.token("a", 2, 5)
    history.finish("a", 3, retries=1)
    history.quiet([WHOLE])
    return history


def unfinished() -> History:
    history = History()
    history.invoke("a", [1, 2], 3)
    history.token("a", 0, 3)
    return history


def test_a_right_history_is_accepted() -> None:
    assert violations(right(), oracle) == []


WRONG: dict[str, tuple[Callable[[History], None], str]] = {
    "another token": (lambda h: (h.token("a", 1, 9), h.cancel("a"))[0], "token 9 at index 1, where 4 was due"),
    "a token twice": (lambda h: (h.token("a", 0, 3), h.cancel("a"))[0], "token index 0 where 1 was due"),
    "a gap": (lambda h: (h.token("a", 2, 5), h.cancel("a"))[0], "token index 2 where 1 was due"),
    "one token too many": (
        lambda h: ([h.token("a", at, 3 + at) for at in (1, 2, 3)], h.finish("a", 4, 0))[1],
        "token 6 at index 3, where none was due",
    ),
    "no end": (lambda h: None, "ended 0 times"),
    "two ends": (lambda h: (h.cancel("a"), h.error("a", "late"))[0], "ended 2 times: ['cancel', 'error']"),
    "a token after the end": (lambda h: (h.cancel("a"), h.token("a", 1, 4))[0], "token after its end"),
    "a retry long after a cancel": (
        lambda h: (h.cancel("a"), h.retry("a", at=time.monotonic() + 2 * CANCEL_SECONDS))[0],
        "retry after its end",
    ),
    "an early end": (lambda h: h.finish("a", 1, 0), "finished with 1 tokens, says 1; asked were 3"),
    "another count": (
        lambda h: ([h.token("a", at, 3 + at) for at in (1, 2)], h.finish("a", 2, 0))[1],
        "finished with 3 tokens, says 2",
    ),
    "an error": (lambda h: h.error("a", "UNAVAILABLE"), "failed: UNAVAILABLE"),
    "hidden retries": (
        lambda h: ([h.token("a", at, 3 + at) for at in (1, 2)], h.retry("a"), h.finish("a", 3, 0))[2],
        "says that it was tried again 0 times; that happened 1 times",
    ),
    "too many retries": (
        lambda h: ([h.retry("a") for _ in range(MAX_RETRIES + 1)], h.cancel("a"))[1],
        "was tried again 4 times",
    ),
    "an unknown request": (lambda h: (h.cancel("a"), h.token("z", 0, 1))[0], "z: is known by 0 invocations"),
    "invoked twice": (lambda h: (h.cancel("a"), h.invoke("a", [1, 2], 3))[0], "a: is known by 2 invocations"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_history_is_rejected(name: str) -> None:
    history = unfinished()
    spoil, complaint = WRONG[name]
    spoil(history)
    history.quiet([WHOLE])
    assert any(complaint in found for found in violations(history, oracle)), violations(history, oracle)


@pytest.mark.parametrize(
    "pool",
    [
        Pool("decode-0", 8, 5, 2, 1, 0),
        Pool("decode-0", 8, 5, 2, 0, 0),
        Pool("decode-0", 8, 5, 3, 0, 1),
        Pool("decode-0", 0, 0, 0, 0, 0),
    ],
    ids=["held", "lost", "request", "empty"],
)
def test_a_pool_that_is_not_whole_is_rejected(pool: Pool) -> None:
    history = right()
    history.quiet([WHOLE, pool])
    assert violations(history, oracle) == [f"decode-0: not whole: {pool}"]


def test_somebody_must_have_looked_at_the_pools_after_the_last_event() -> None:
    history = right()
    history.invoke("late", [1], 1)
    history.token("late", 0, 1)
    history.finish("late", 1, 0)
    assert violations(history, oracle) == ["nobody looked at the pools after the last event"]
    history.quiet([])
    assert violations(history, oracle) == ["no worker said what it holds"]


def test_an_error_is_accepted_where_it_was_allowed_and_the_tokens_before_it_are_judged() -> None:
    history = unfinished()
    history.error("a", "UNAVAILABLE")
    history.quiet([WHOLE])
    assert violations(history, oracle, may_fail={"a"}) == []
    history = unfinished()
    history.token("a", 1, 9)
    history.error("a", "UNAVAILABLE")
    history.quiet([WHOLE])
    assert len(violations(history, oracle, may_fail={"a"})) == 1


def test_retries_beyond_the_budget_are_rejected() -> None:
    history = History()
    for number in range(10):
        history.invoke(str(number), [number], 0)
    for number in range(4):
        history.retry(str(number))
    for number in range(10):
        history.finish(str(number), 0, int(number < 4))
    history.quiet([WHOLE])
    assert violations(history, oracle) == ["4 retries to 10 requests within 10 s"]
    assert violations(history, oracle, budget=False) == []
