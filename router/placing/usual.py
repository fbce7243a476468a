"""Statistics of the completions that have ended on this router: how long they usually are, and how many end a second.

The length: for each holder (tenant or client address) and each range of `max_tokens`, from a power of two to the next,
this keeps the average number of generated tokens, and its deviation. So clients that ask for much and stop early are
expected to do so again. Unknown clients are expected to use what they ask for, up to UNKNOWN_TOKENS.
"""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

UNKNOWN_TOKENS = 2048
"""Most tokens that are expected of a request of which nothing is known: clients often give no `max_tokens`, which then
is the rest of the context."""
MEMORY = 32
"""Number of completions after which an older one counts for little."""
HOLDERS = 1024
"""Number of pairs of a holder and a range that are remembered."""
RATE_SECONDS = 30.0
"""Length in seconds of the window in which ended completions are counted."""
LEAST_RETRY_SECONDS = 1.0
MOST_RETRY_SECONDS = 120.0


@dataclass(slots=True)
class _Length:
    """An average that follows what is new, and its variance."""

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    def add(self, tokens: int) -> None:
        if not self.count:
            self.mean, self.variance = float(tokens), (tokens / 2) ** 2  # one says little
        self.count = min(self.count + 1, MEMORY)
        share, off = 1 / self.count, tokens - self.mean
        self.mean += share * off
        self.variance = (1 - share) * (self.variance + share * off * off)


class UsualLengths:
    """On the event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int], _Length] = OrderedDict()
        """The latest used last. Holder 0 stands for all."""

    def expected(self, holder: int, max_tokens: int) -> int:
        """Tokens that a request is expected to generate: 1 to `max_tokens`."""
        size = max_tokens.bit_length()
        known = self._known.get((holder, size)) or self._known.get((0, size))
        if known is None:
            return min(max_tokens, UNKNOWN_TOKENS)
        return max(1, min(max_tokens, math.ceil(known.mean + math.sqrt(known.variance))))

    def learn(self, holder: int, max_tokens: int, tokens: int) -> None:
        """A request has ended with so many tokens generated."""
        for key in {(holder, max_tokens.bit_length()), (0, max_tokens.bit_length())}:
            if key not in self._known:
                self._known[key] = _Length()
            self._known.move_to_end(key)
            self._known[key].add(tokens)
        while len(self._known) > HOLDERS:
            self._known.popitem(last=False)


class CompletionRate:
    """Completions of the last RATE_SECONDS. On the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: deque[float] = deque(maxlen=4096)

    def ended(self) -> None:
        """A request has ended, and made room."""
        self._ended.append(self._clock())

    def seconds(self, count: int) -> float | None:
        """Seconds in which so many requests end at the present rate; None if none has ended."""
        now = self._clock()
        while self._ended and self._ended[0] < now - RATE_SECONDS:
            self._ended.popleft()
        if not self._ended:
            return None
        return count * max(1.0, now - self._ended[0]) / len(self._ended)

    def retry_seconds(self, waiting: int, predicted: float | None = None) -> float:
        """Seconds after which a refused request may find room, with so many others waiting.

        Args:
            predicted: seconds until these have their places, if that is known; else the present rate tells it.
        """
        seconds = self.seconds(waiting + 1) if predicted is None else predicted
        if seconds is None:
            return RATE_SECONDS
        return min(MOST_RETRY_SECONDS, max(LEAST_RETRY_SECONDS, seconds))
