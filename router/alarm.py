"""A deadline that moves with every token."""

import asyncio
import math
import time
from collections.abc import Callable


class Alarm:
    """Calls `ring` once its time has come, on the event loop.

    To move it later, which every token does, costs an assignment: the loop's timer is left where it is, and set anew
    when it goes off too early. `asyncio.timeout` makes and cancels a timer each time.
    """

    def __init__(self, ring: Callable[[], object]) -> None:
        self._ring = ring
        self._at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at: float) -> None:
        """Rings at `at`, on the monotonic clock; infinite for never."""
        self._at = at
        if at < math.inf and (self._timer is None or at < self._timer.when()):
            self._arm()

    def close(self) -> None:
        """Never rings any more."""
        self._at = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        # The loop's clock is the monotonic one, but for loops that say otherwise.
        self._timer = loop.call_at(loop.time() + self._at - time.monotonic(), self._go_off)

    def _go_off(self) -> None:
        self._timer = None
        if self._at <= time.monotonic():
            self._at = math.inf
            self._ring()
        elif self._at < math.inf:
            self._arm()
