"""Gathers a stream's tokens into fewer messages while a router has many streams.

A message costs a router about as much as ten tokens do. Between two messages of one stream lies the pace: the time in
which all streams could send a message and the router still has half of its time left, at most `longest_seconds`. What
comes meanwhile goes out together. So with few streams, or slow ones, each token goes out when it comes.
"""

import asyncio
from collections import deque
from collections.abc import Callable

UNPACED_TOKENS = 8
"""First tokens of a completion, which go out when they come."""
STREAM_SECONDS = 160e-6
"""Time between two messages for each stream that runs: twice what a message costs."""
TOGETHER_SECONDS = 0.0005
"""Pauses that end within this time end together, by one timer."""


class Pacer:
    """The pace of all streams of one router. Used on one event loop only."""

    def __init__(self, longest_seconds: float) -> None:
        """
        Args:
            longest_seconds: longest pause between two messages of a stream; 0 for none.
        """
        self.streams = 0
        """Streams that run; kept by the sessions."""
        self._longest = longest_seconds
        self._pauses: deque[tuple[float, Callable[[], object]]] = deque()
        """Ends of pauses on the loop's clock, nearly in order, as the pace changes slowly."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def seconds(self) -> float:
        """The pace now."""
        return min(self._longest, STREAM_SECONDS * self.streams)

    def pause(self, end: Callable[[], object]) -> None:
        """Calls `end` when a stream that has just sent a message may send another one."""
        loop = asyncio.get_running_loop()
        self._pauses.append((loop.time() + self.seconds, end))
        if self._timer is None:
            self._timer = loop.call_at(self._pauses[0][0], self._end_pauses)

    def _end_pauses(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + TOGETHER_SECONDS
        while self._pauses and self._pauses[0][0] <= due:
            self._pauses.popleft()[1]()
        self._timer = loop.call_at(self._pauses[0][0], self._end_pauses) if self._pauses else None
