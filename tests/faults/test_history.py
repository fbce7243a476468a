"""The judge accepts a correct history, and rejects each kind of wrong one."""

import time
from collections.abc import Sequence

import pytest

from support.history import CANCEL_SECONDS, MAX_RETRIES, Asked, History, violations


def oracle(asked: Sequence[Asked]) -> list[list[int]]:
    return [[sum(prompt) + (seed or 0) + index for index in range(count)] for prompt, count, seed in asked]


def record(history: History, script: str) -> History:
    """Adds events: "a invoke 3", "a token 1=4" (token 4 at index 1), "a finish 3/1" (3 tokens, 1 retry), ..."""
    for line in script.split("; "):
        request, kind, *rest = line.split(maxsplit=2)
        match kind, rest:
            case "invoke", [count]:
                history.add(request, "invoke", prompt=(1, 2), count=int(count))
            case "token", [value]:
                index, _, token = value.partition("=")
                history.add(request, "token", index=int(index), token=int(token))
            case "finish", [value]:
                count, _, retries = value.partition("/")
                history.add(request, "finish", count=int(count), retries=int(retries))
            case _, _:
                history.add(request, kind, text=" ".join(rest))  # type: ignore[arg-type]  # checked by the judge
    return history


RIGHT = (
    "a invoke 3; b invoke 3; a token 0=3; b token 0=3; a retry; a token 1=4; "
    "b cancel; b retry; a token 2=5; a finish 3/1"
)
UNFINISHED = "a invoke 3; a token 0=3"
WRONG = {
    "another token": ("a token 1=9; a cancel", "token 9 at index 1, where 4 was due"),
    "a token twice": ("a token 0=3; a cancel", "token index 0 where 1 was due"),
    "a gap": ("a token 2=5; a cancel", "token index 2 where 1 was due"),
    "one token too many": (
        "a token 1=4; a token 2=5; a token 3=6; a finish 4/0",
        "token 6 at index 3, where none was due",
    ),
    "no end": ("a retry", "ended 0 times"),
    "two ends": ("a cancel; a error late", "ended 2 times: ['cancel', 'error']"),
    "a token after the end": ("a cancel; a token 1=4", "token after its end"),
    "an early end": ("a finish 1/0", "finished with 1 tokens, says 1; asked were 3"),
    "another count": ("a token 1=4; a token 2=5; a finish 2/0", "finished with 3 tokens, says 2"),
    "an error": ("a error UNAVAILABLE", "failed: UNAVAILABLE"),
    "hidden retries": (
        "a token 1=4; a token 2=5; a retry; a finish 3/0",
        "says that it was tried again 0 times; that happened 1 times",
    ),
    "too many retries": ("; ".join(["a retry"] * (MAX_RETRIES + 1)) + "; a cancel", "was tried again 4 times"),
    "an unknown request": ("a cancel; z token 0=1", "z: is known by 0 invocations"),
    "invoked twice": ("a cancel; a invoke 3", "a: is known by 2 invocations"),
}


def test_a_right_history_is_accepted() -> None:
    """Two requests: one is retried, the other ended by its client while the router retries it."""
    assert violations(record(History(), RIGHT), oracle) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_history_is_rejected(name: str) -> None:
    script, complaint = WRONG[name]
    found = violations(record(History(), f"{UNFINISHED}; {script}"), oracle)
    assert any(complaint in each for each in found), found


def test_a_retry_long_after_a_cancel_is_rejected() -> None:
    history = record(History(), f"{UNFINISHED}; a cancel")
    history.add("a", "retry", at=time.monotonic() + 2 * CANCEL_SECONDS)
    assert violations(history, oracle) == ["a: retry after its end"]


def test_an_error_is_accepted_where_it_was_allowed_and_the_tokens_before_it_are_judged() -> None:
    history = record(History(), f"{UNFINISHED}; a error UNAVAILABLE")
    assert violations(history, oracle, may_fail={"a"}) == []
    history = record(History(), f"{UNFINISHED}; a token 1=9; a error UNAVAILABLE")
    assert len(violations(history, oracle, may_fail={"a"})) == 1


def test_retries_beyond_the_budget_are_rejected() -> None:
    history = History()
    for number in range(10):
        record(history, f"{number} invoke 0")
    for number in range(4):
        record(history, f"{number} retry")
    for number in range(10):
        record(history, f"{number} finish 0/{int(number < 4)}")
    assert violations(history, oracle) == ["4 retries to 10 requests within 10 s"]
    assert violations(history, oracle, budget=False) == []
