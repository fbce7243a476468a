"""A clock for how long an event loop is held, on a machine that has other work as well."""

import os
import threading
import time
import weakref


class Clock:
    """Measures the time of its thread, without what the thread waited for a core.

    It goes on while another thread of the process holds the interpreter, up to what the process computes meanwhile.
    """

    def __init__(self) -> None:
        self._statistics = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        weakref.finalize(self, os.close, self._statistics)
        self._last = self._read()

    def _read(self) -> tuple[float, float]:
        """Seconds but those for which this thread waited for a core, and seconds that this process computed."""
        waited = int(os.pread(self._statistics, 100, 0).split()[1]) / 1e9
        return time.monotonic() - waited, time.process_time()

    def lap(self) -> float:
        """Seconds since the last call, or since the clock was made."""
        last, self._last = self._last, self._read()
        return min(now - then for now, then in zip(self._last, last, strict=True))
