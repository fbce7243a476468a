"""Gathers a stream's tokens into fewer messages while a router has many streams.

A message costs a router as much as many tokens do. After a message of a stream, its tokens gather for the pace: the
time in which all streams could send a message and the router still has half of its time left, at most
`longest_seconds`. The first token that comes later than that goes out at once, and takes the gathered ones with it; if
none comes, they go out when the oldest of them has waited for `longest_seconds`. So with few streams, or slow ones,
each token goes out when it comes, and with many fast ones no token waits for longer than that.
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
        self._held: deque[tuple[float, Callable[[int], object], int]] = deque()
        """When gathered tokens have to go out, on the monotonic clock, in order."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def seconds(self) -> float:
        """The pace now."""
        return min(self._longest, STREAM_SECONDS * self.streams)

    def hold(self, release: Callable[[int], object], pause: int) -> None:
        """Calls `release(pause)` when a token that has come now has waited for long enough."""
        self._held.append((time.monotonic() + self._longest, release, pause))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._longest, self._release)

    def _release(self) -> None:
        due = time.monotonic() + TOGETHER_SECONDS
        while self._held and self._held[0][0] <= due:
            _, release, pause = self._held.popleft()
            release(pause)
        self._timer = None
        if self._held:
            wait = self._held[0][0] - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(wait, self._release)
