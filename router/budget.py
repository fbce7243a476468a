"""How many requests may be tried again, so that retries never become the load."""

import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 10.0
SHARE = 0.2
AT_LEAST = 3
_BUCKETS = 10


class RetryBudget:
    """Retries of the last ten seconds: up to a fifth of that time's requests, and always three.

    What it is for is a cluster that fails requests as fast as they come. A request that goes on elsewhere because its
    worker was lost is not asked of it: a worker is lost once, and all of its requests must go on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[list[int]] = deque()  # [bucket's number, requests, retries]

    def request(self) -> None:
        """Counts a request."""
        self._bucket()[1] += 1

    def take(self) -> bool:
        """Whether one more retry is allowed; counts it if so."""
        now = self._bucket()
        requests = sum(bucket[1] for bucket in self._buckets)
        retries = sum(bucket[2] for bucket in self._buckets)
        if retries >= max(AT_LEAST, int(SHARE * requests)):
            return False
        now[2] += 1
        return True

    def _bucket(self) -> list[int]:
        """The bucket of now; forgets those that are out of the window."""
        number = int(self._clock() * _BUCKETS / WINDOW_SECONDS)
        while self._buckets and self._buckets[0][0] <= number - _BUCKETS:
            self._buckets.popleft()
        if not self._buckets or self._buckets[-1][0] != number:
            self._buckets.append([number, 0, 0])
        return self._buckets[-1]
