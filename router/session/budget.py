"""Limits retries, so that they never become the load."""

import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 10.0
SHARE = 0.2
AT_LEAST = 3
_BUCKETS = 10


class RetryBudget:
    """Allows retries for a fifth of the requests of the last ten seconds, and always three.

    It protects a cluster that refuses requests as fast as they come. A request whose worker was lost needs no budget:
    a worker is lost once, and all of its requests must continue elsewhere.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[list[int]] = deque()  # [number of the bucket, requests, retries]

    def request(self) -> None:
        """Counts a request."""
        self._bucket()[1] += 1

    def take(self) -> bool:
        """Whether one more retry is allowed; counts it if so."""
        bucket = self._bucket()
        requests = sum(bucket[1] for bucket in self._buckets)
        retries = sum(bucket[2] for bucket in self._buckets)
        if retries >= max(AT_LEAST, int(SHARE * requests)):
            return False
        bucket[2] += 1
        return True

    def _bucket(self) -> list[int]:
        """The current bucket; drops those outside the window."""
        number = int(self._clock() * _BUCKETS / WINDOW_SECONDS)
        while self._buckets and self._buckets[0][0] <= number - _BUCKETS:
            self._buckets.popleft()
        if not self._buckets or self._buckets[-1][0] != number:
            self._buckets.append([number, 0, 0])
        return self._buckets[-1]
