"""Gathers a stream's tokens into fewer messages while a router has many streams.

A message costs a router as much as many tokens do. After a message of a stream, its tokens gather for the pace: the
time in which all streams could send a message and the router still has half of its time left, at most
`longest_seconds`. The first token that comes later than that is due at once, and takes the gathered ones with it; if
none comes, they are due when the oldest of them has waited for `longest_seconds`. So with few streams, or slow ones,
each token goes out when it comes.

What is due goes out in order, a few streams at a time; then the router reads again what workers have sent. So a router
that has more to do than it can falls behind in neither: tokens gather while their stream waits for its turn, messages
become fewer and larger, and none waits longer than a message of each stream takes.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

UNPACED_TOKENS = 8
"""First tokens of a completion, which go out when they come."""
STREAM_SECONDS = 160e-6
"""Time between two messages for each stream that runs: twice what a message costs."""
TOGETHER_SECONDS = 0.0005
"""Waits that end within this time end together, by one timer."""
AT_ONCE = 4
"""Streams that write before the router reads again: a message of a worker may have tokens of hundreds of streams."""

OnPause = Callable[[int], object]
"""Called with the number of a stream's pause, which may be over."""


class Pacer:
    """The pace of all streams of one router. Used on one event loop only."""

    def __init__(self, longest_seconds: float) -> None:
        """
        Args:
            longest_seconds: longest time that a token waits for others; 0 for none.
        """
        self.streams = 0
        """Streams that run; kept by the sessions."""
        self._longest = longest_seconds
        self._held: deque[tuple[float, OnPause, int]] = deque()
        """When gathered tokens have waited for long enough, on the monotonic clock, in order."""
        self._due: deque[tuple[OnPause, int]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def seconds(self) -> float:
        """The pace now."""
        return min(self._longest, STREAM_SECONDS * self.streams)

    def hold(self, waited: OnPause, pause: int) -> None:
        """The first token has come in a pause: calls `waited(pause)` when it has waited for long enough."""
        self._held.append((time.monotonic() + self._longest, waited, pause))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._longest, self._on_timer)

    def due(self, release: OnPause, pause: int) -> None:
        """The tokens of a pause go out when it is their turn: calls `release(pause)`."""
        self._due.append((release, pause))
        if len(self._due) == 1:
            asyncio.get_running_loop().call_soon(self._let_go)

    def _on_timer(self) -> None:
        limit = time.monotonic() + TOGETHER_SECONDS
        while self._held and self._held[0][0] <= limit:
            _, waited, pause = self._held.popleft()
            waited(pause)
        self._timer = None
        if self._held:
            wait = self._held[0][0] - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(wait, self._on_timer)

    def _let_go(self) -> None:
        for _ in range(min(AT_ONCE, len(self._due))):
            release, pause = self._due.popleft()
            release(pause)
        if self._due:
            asyncio.get_running_loop().call_soon(self._let_go)
