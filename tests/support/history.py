"""What clients saw of their requests, and a judge of it that knows nothing of how it came about.

    invoke --> token 0, token 1, ... --> finish | error | cancel        each request once; retries in between
    pools                                                               what the workers hold, once all is quiet

Recorders append, from any thread; `violations` is given the whole record and an oracle of the tokens.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["invoke", "token", "retry", "finish", "error", "cancel"]
ENDS = ("finish", "error", "cancel")
Oracle = Callable[[Sequence[int], int], Sequence[int]]
"""Prompt and count to the tokens of the undisturbed run."""

MAX_RETRIES = 3
"""Of one request: the router's `max_attempts` less one."""
RETRY_SHARE, RETRIES_AT_LEAST = 0.2, 3
"""The router's budget: so many retries to one request of the last ten seconds, or so many in any case."""
WINDOW_SECONDS = 10.0
CANCEL_SECONDS = 0.5
"""How long a router may not know yet that a client has gone away; until then an attempt that fails is a retry."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a request. `count` and `prompt` are an invocation's, or a finish's own `count`."""

    at: float
    request: str
    kind: Kind
    index: int = -1
    token: int = -1
    count: int = 0
    retries: int = 0
    prompt: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Pool:
    """What a worker says of its blocks and requests."""

    worker: str
    total: int
    free: int
    cached: int
    held: int
    requests: int

    @property
    def whole(self) -> bool:
        """Nothing is held, and no block is missing."""
        return self.requests == 0 and self.held == 0 and self.free + self.cached == self.total > 0


@dataclass
class History:
    """The record."""

    events: list[Event] = field(default_factory=list)
    pools: list[Pool] | None = None
    """As they were once all requests had ended; None while nobody has looked."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def invoke(self, request: str, prompt: Sequence[int], count: int) -> None:
        """A client asks for `count` tokens."""
        self._add(Event(time.monotonic(), request, "invoke", count=count, prompt=tuple(prompt)))

    def token(self, request: str, index: int, token: int) -> None:
        """A client got its token number `index`."""
        self._add(Event(time.monotonic(), request, "token", index, token))

    def retry(self, request: str, text: str = "", at: float | None = None) -> None:
        """An attempt has failed, and the request goes on; `at` where that was learnt later."""
        self._add(Event(time.monotonic() if at is None else at, request, "retry", text=text))

    def finish(self, request: str, count: int, retries: int) -> None:
        """The stream has ended well; it says that it had `count` tokens, and took `retries` more attempts."""
        self._add(Event(time.monotonic(), request, "finish", count=count, retries=retries))

    def error(self, request: str, text: str) -> None:
        """The client was told that the request has failed."""
        self._add(Event(time.monotonic(), request, "error", text=text))

    def cancel(self, request: str) -> None:
        """The client has ended the request."""
        self._add(Event(time.monotonic(), request, "cancel"))

    def quiet(self, pools: Sequence[Pool]) -> None:
        """All requests have ended: what the workers hold now."""
        self.pools = list(pools)

    def _add(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)
            self.pools = None


def violations(history: History, oracle: Oracle, *, may_fail: Collection[str] = (), budget: bool = True) -> list[str]:
    """Everything in the record that must not be, in words; empty where there is nothing.

    Args:
        may_fail: requests that may end with an error. What they got before must be right all the same.
        budget: whether all retries were within the router's budget; those of requests that lost a worker are not
            asked of it, so not where workers were killed.
    """
    by_request: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(history.events, key=lambda event: event.at):
        by_request[event.request].append(event)
    found = [
        f"{request}: {what}"
        for request, events in by_request.items()
        for what in _of_one(events, oracle, request in may_fail)
    ]
    if budget:
        found += _over_budget(history.events)
    if history.pools is None:
        found.append("nobody looked at the pools after the last event")
    elif not history.pools:
        found.append("no worker said what it holds")
    return found + [f"{pool.worker}: not whole: {pool}" for pool in history.pools or () if not pool.whole]


def _of_one(events: Sequence[Event], oracle: Oracle, may_fail: bool) -> list[str]:
    """What is wrong with one request's events."""
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
    expected = oracle(asked.prompt, asked.count)
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
    """Whether the router may well have tried again because the word of the cancel was still under way."""
    return end.kind == "cancel" and later.kind == "retry" and later.at - end.at < CANCEL_SECONDS


def _over_budget(events: Sequence[Event]) -> list[str]:
    """Retries beyond the budget, by a window that is a second kinder at both ends than the router's."""
    invoked = [event.at for event in events if event.kind == "invoke"]
    retried = [event.at for event in events if event.kind == "retry"]
    found = []
    for at in retried:
        requests = sum(at - WINDOW_SECONDS - 1 < other <= at + 1 for other in invoked)
        retries = sum(at - WINDOW_SECONDS + 1 < other <= at for other in retried)
        if retries > max(RETRIES_AT_LEAST, int(RETRY_SHARE * requests)):
            found.append(f"{retries} retries to {requests} requests within {WINDOW_SECONDS:g} s")
    return found[:1]
