"""Gathers a stream's tokens into fewer messages while a router has many streams.

A message costs a router as much as many tokens do. After a message of a stream, its tokens gather for the pace: the
time in which all streams could send a message and the router still has half of its time left, at most
`longest_seconds`. Holders (tenants or addresses) have equal shares of that half: a holder's pace is the time in which
its own streams could send a message each in its share, so one with few streams doesn't wait for another's many. The
first token that comes later than that is due at once, and takes the gathered ones with it; if none comes, they are due
when the oldest of them has waited for `longest_seconds`. So with few streams, or slow ones, each token goes out when it
comes.

What is due goes out a few streams at a time, of each holder in turn; then the router reads again what workers have
sent. So a router that has more to do than it can falls behind in neither: tokens gather while their stream waits for
its turn, messages become fewer and larger, and none waits longer than a message of each stream takes.
"""

import asyncio
import time
from collections import Counter, deque
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

    def __init__(self, longest_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            longest_seconds: longest time that a token waits for others; 0 for none.
        """
        self.streams: Counter[str] = Counter()
        """Streams of each holder that run; without those who have none."""
        self._longest, self._clock = longest_seconds, clock
        self._held: deque[tuple[float, OnPause, int]] = deque()
        """Pauses with the monotonic time at which their tokens have waited long enough, in order."""
        self._due: dict[str, deque[tuple[OnPause, int]]] = {}
        """Pauses that are due to end, by holder; the holder whose turn it is comes first."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, holder: str) -> None:
        """A stream of a holder begins to run."""
        self.streams[holder] += 1

    def end(self, holder: str) -> None:
        """A stream of a holder has ended."""
        self.streams[holder] -= 1
        if not self.streams[holder]:
            del self.streams[holder]

    def seconds(self, holder: str) -> float:
        """A holder's pace now."""
        return min(self._longest, STREAM_SECONDS * self.streams[holder] * len(self.streams))

    def hold(self, waited: OnPause, pause: int) -> None:
        """Starts the wait of a pause's first token: calls `waited(pause)` when it has waited for long enough."""
        self._held.append((self._clock() + self._longest, waited, pause))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._longest, self._on_timer)

    def due(self, holder: str, release: OnPause, pause: int) -> None:
        """Queues a pause whose tokens are due: calls `release(pause)` when it is their turn."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._let_go)
        self._due.setdefault(holder, deque()).append((release, pause))

    def _on_timer(self) -> None:
        limit = self._clock() + TOGETHER_SECONDS
        while self._held and self._held[0][0] <= limit:
            _, waited, pause = self._held.popleft()
            waited(pause)
        self._timer = None
        if self._held:
            wait = self._held[0][0] - self._clock()
            self._timer = asyncio.get_running_loop().call_later(wait, self._on_timer)

    def _let_go(self) -> None:
        for _ in range(AT_ONCE):
            if not self._due:
                return
            holder = next(iter(self._due))
            line = self._due.pop(holder)
            release, pause = line.popleft()
            if line:
                self._due[holder] = line
            release(pause)
        if self._due:
            asyncio.get_running_loop().call_soon(self._let_go)
