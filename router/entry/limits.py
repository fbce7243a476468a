"""Limits of each API key on one router: requests and tokens a minute. `Admission` counts its requests at once.

A minute's amount is a bucket that fills steadily and holds a minute's worth. A request starts if the buckets hold one
request and its prompt, or if that of tokens is full: a prompt larger than a minute's tokens is not refused for ever.
What the request generates is taken afterwards, so a bucket may be short of tokens for a while, in which nothing starts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.router.errors import LimitReached

MINUTE = 60.0
LEAST_SECONDS = 0.001
"""Shortest wait in seconds; a shorter one counts as none, as delays are told in whole milliseconds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one API key; 0 for no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0
    """Requests at once, from their headers on; each prompt of a list, and each completion of a prompt, is one."""


NO_LIMITS = Limits()


@dataclass(slots=True)
class _Bucket:
    used: float = 0.0
    at: float = 0.0

    def wait(self, amount: float, per_minute: int, now: float) -> float:
        """Seconds until the bucket holds `amount`, or is full; always 0 without a limit."""
        if not per_minute:
            return 0.0
        rate = per_minute / MINUTE
        self.used = max(0.0, self.used - (now - self.at) * rate)
        self.at = now
        wait = max(0.0, self.used - max(0.0, per_minute - amount)) / rate
        return wait if wait > LEAST_SECONDS else 0.0


@dataclass(slots=True)
class _Use:
    requests: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)


class Meter:
    """Counts one request's tokens."""

    def __init__(self, limits: Limits, use: _Use, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._use = use
        self._clock = clock

    def prompt(self, tokens: int) -> None:
        """Takes the tokens of the prompt.

        Raises:
            LimitReached: the key has used up its tokens.
        """
        limit = self._limits.tokens_per_minute
        if wait := self._use.tokens.wait(tokens, limit, self._clock()):
            raise LimitReached(f"the API key's tokens_per_minute, {limit}, are used up", wait)
        self.generated(tokens)

    def generated(self, tokens: int) -> None:
        """Takes the tokens of a completion."""
        self._use.tokens.used += tokens


class KeyLimits:
    """Use of one router by its API keys."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    def request(self, key: str, limits: Limits) -> Meter:
        """Takes one request.

        Args:
            key: names the API key; `limits` are its.

        Raises:
            LimitReached: it may not start now.
        """
        use = self._uses.setdefault(key, _Use()) if limits != NO_LIMITS else _Use()
        if wait := use.requests.wait(1, limits.requests_per_minute, self._clock()):
            raise LimitReached(f"the API key's requests_per_minute, {limits.requests_per_minute}, are used up", wait)
        use.requests.used += 1
        return Meter(limits, use, self._clock)
