"""A deadline that moves with every token."""

import asyncio
import math
import time
from collections.abc import Callable


class Alarm:
    """Calls `ring` on the event loop when its time has come.

    Moving it later, as every token does, is one assignment: the loop's timer stays, and is set again if it fires too
    early. `asyncio.timeout` would make and cancel a timer each time.
    """

    def __init__(self, ring: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ring: Callable[[], object] = ring
        self._at = math.inf
        self._timer: asyncio.Handle | None = None
        self._fires_at = math.inf
        """Time on the clock at which the timer fires. uvloop's handle of a near time doesn't tell it."""

    def set(self, at: float) -> None:
        """Rings once at `at` on the clock, unless set again before; infinite for never."""
        self._at = at
        if at < math.inf and (self._timer is None or at < self._fires_at):
            self._start_timer()

    def close(self) -> None:
        """Never rings again, and forgets whom it would call, which has a reference to it."""
        self._ring = lambda: None
        self._at = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._fires_at = self._at
        # The time of some event loops is not the clock's.
        self._timer = loop.call_at(loop.time() + self._at - self._clock(), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._at <= self._clock():
            self._at = math.inf
            self._ring()
        elif self._at < math.inf:
            self._start_timer()
