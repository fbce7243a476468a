"""A record of what clients saw of their requests, and a judge of it that knows nothing of how it came about.

    invoke -> token 0, token 1, ... -> finish | error | cancel        each request once, with retries in between

Recorders append from any thread; `violations` reads the whole record beside an oracle of the tokens.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["invoke", "token", "retry", "finish", "error", "cancel"]
ENDS = ("finish", "error", "cancel")
Asked = tuple[Sequence[int], int, int | None]
"""Prompt, count and seed of a request."""
Oracle = Callable[[Sequence[Asked]], Sequence[Sequence[int]]]
"""Function from requests to the tokens of their undisturbed runs."""

MAX_RETRIES = 3
"""Retries that one request may have: the router's `max_attempts` less one."""
RETRY_SHARE, RETRIES_AT_LEAST = 0.2, 3
"""The router's budget: retries for each request of the last ten seconds, and retries that are always allowed."""
WINDOW_SECONDS = 10.0
CANCEL_SECONDS = 0.5
"""Seconds that a cancel may take to reach the router, which meanwhile retries an attempt that fails."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a request."""

    request: str
    kind: Kind
    at: float
    """Time on the monotonic clock."""
    prompt: tuple[int, ...] = ()
    """Prompt of an invoke."""
    count: int = 0
    """Tokens: of an invoke, those asked for; of a finish, those that the stream says it had."""
    seed: int | None = None
    """Seed of an invoke's sampling; None for greedy decoding."""
    index: int = -1
    """Index of a token."""
    token: int = -1
    """Id of a token."""
    retries: int = 0
    """Retries that a finished stream says it took."""
    text: str = ""
    """Text of an error or a retry."""


@dataclass
class History:
    """The record."""

    events: list[Event] = field(default_factory=list)

    def add(self, request: str, kind: Kind, at: float | None = None, **fields: Any) -> None:
        """Records an event of now; `at` if it was learnt of later."""
        self.events.append(Event(request, kind, time.monotonic() if at is None else at, **fields))

    def longest_silence(self, prefix: str = "", since: Kind = "invoke") -> float:
        """Longest time in seconds between two events of one request whose name begins so, its first one `since`."""
        longest, last = 0.0, dict[str, float]()
        for event in sorted(self.events, key=lambda event: event.at):
            if event.request.startswith(prefix) and (event.kind == since or event.request in last):
                longest = max(longest, event.at - last.get(event.request, event.at))
                last[event.request] = event.at
        return longest


def violations(history: History, oracle: Oracle, *, may_fail: Collection[str] = (), budget: bool = True) -> list[str]:
    """Violations in the record, in words: everything that must not be.

    Args:
        may_fail: requests that may end with an error. Their tokens before it must be right all the same.
        budget: whether the router's retry budget bounds all retries. It doesn't count those of requests that lost a
            worker, so False where workers are killed.
    """
    by_request: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(history.events, key=lambda event: event.at):
        by_request[event.request].append(event)
    expected = oracle([(events[0].prompt, events[0].count, events[0].seed) for events in by_request.values()])
    found = [
        f"{request}: {what}"
        for (request, events), tokens in zip(by_request.items(), expected, strict=True)
        for what in _of_one(events, tokens, request in may_fail)
    ]
    return found + (_over_budget(history.events) if budget else [])


def _of_one(events: Sequence[Event], expected: Sequence[int], may_fail: bool) -> list[str]:
    """Mistakes in one request's events, the first of which should be its invocation."""
    found = []
    kinds = [event.kind for event in events]
    if kinds[0] != "invoke" or kinds.count("invoke") != 1:
        return [f"is known by {kinds.count('invoke')} invocations, and begins with {kinds[0]}"]
    ends = [position for position, kind in enumerate(kinds) if kind in ENDS]
    if len(ends) != 1:
        found.append(f"ended {len(ends)} times: {[kinds[position] for position in ends]}")
    for end in ends[:1]:
        found += [f"{event.kind} after its end" for event in events[end + 1 :] if not _unaware(events[end], event)]
    asked = events[0]
    tokens = [event for event in events if event.kind == "token"]
    indices = [event.index for event in tokens]
    if indices != list(range(len(indices))):
        wrong = next(at for at, index in enumerate(indices) if index != at)
        found.append(f"token index {indices[wrong]} where {wrong} was due")
    for event in tokens:
        if not 0 <= event.index < asked.count or event.token != expected[event.index]:
            due = expected[event.index] if 0 <= event.index < asked.count else "none"
            found.append(f"token {event.token} at index {event.index}, where {due} was due")
            break
    retries = kinds.count("retry")
    if retries > MAX_RETRIES:
        found.append(f"was tried again {retries} times")
    for event in events:
        if event.kind == "finish" and (len(tokens), len(tokens)) != (asked.count, event.count):
            found.append(f"finished with {len(tokens)} tokens, says {event.count}; asked were {asked.count}")
        if event.kind == "finish" and event.retries != retries:
            found.append(f"says that it was tried again {event.retries} times; that happened {retries} times")
        if event.kind == "error" and not may_fail:
            found.append(f"failed: {event.text}")
    return found


def _unaware(end: Event, later: Event) -> bool:
    """Whether the router may have retried because it didn't know of the cancel yet."""
    return end.kind == "cancel" and later.kind == "retry" and later.at - end.at < CANCEL_SECONDS


def _over_budget(events: Sequence[Event]) -> list[str]:
    """Retries beyond the budget, by a window that is a second more generous at both ends than the router's."""
    invoked = [event.at for event in events if event.kind == "invoke"]
    for at in (event.at for event in events if event.kind == "retry"):
        requests = sum(at - WINDOW_SECONDS - 1 < other <= at + 1 for other in invoked)
        retries = sum(at - WINDOW_SECONDS + 1 < event.at <= at for event in events if event.kind == "retry")
        if retries > max(RETRIES_AT_LEAST, int(RETRY_SHARE * requests)):
            return [f"{retries} retries to {requests} requests within {WINDOW_SECONDS:g} s"]
    return []


PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
BIAS = {5: 2.0, 77: -1.5, 200: 1.0}


def sampling_options(seed: int | None) -> dict[str, Any]:
    """Sampling options as a client gives them. One seed in three makes each token depend even more on those before
    it."""
    if seed is None:
        return {"temperature": 0.0}
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": seed}
    return drawn if seed % 3 else {**drawn, **PENALTIES, "logit_bias": BIAS}


def seed_of(name: str) -> int | None:
    """Draws a request's seed of sampling; None, which means greedy decoding, for one name in four."""
    draw = random.Random(f"seed of {name}")
    return draw.getrandbits(64) if draw.random() < 0.75 else None
