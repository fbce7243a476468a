"""Tells a frozen process from a busy one. Both are silent; a busy one computes, or waits for a core or the disk."""

import time
from contextlib import suppress

import psutil
from psutil import NoSuchProcess, Process

SILENT_SECONDS = 3.0
"""Seconds without an answer after which a process that doesn't compute is frozen."""
QUIET_SECONDS = 1.5
"""Seconds without computing after which a process counts as idle."""
HUNG_SECONDS = 30.0
"""Seconds without an answer after which it is hung, whatever it computes."""
PAUSE_SECONDS = 1.0
"""Seconds between two looks above which this process itself was held up."""


class Silence:
    """Measures how long one process hasn't answered. The caller looks at it several times a second."""

    def __init__(self, seconds: float = SILENT_SECONDS, *, remote: bool = False) -> None:
        """
        Args:
            seconds: without an answer after which a process that doesn't compute is frozen; 2.5 or more.
            remote: whether it is on another machine. It can't be seen to compute from here, so it is frozen after
                `seconds` in any case.
        """
        self._seconds, self._remote = seconds, remote
        self._known = False
        self.process: Process | None = None
        """Process that answered last."""
        self._answered = self._looked = self._moved = time.monotonic()
        self._used = -1.0

    def answered(self, process: Process | None) -> None:
        """Notes that the process has answered."""
        self.process, self._answered = process, time.monotonic()
        self._known = process is not None or self._remote

    def verdict(self) -> str:
        """The reason why the process counts as frozen; empty if it doesn't."""
        now = time.monotonic()
        if (pause := now - self._looked) > PAUSE_SECONDS:
            self._answered += pause  # its answers may wait for this process
        self._looked = now
        silent = now - self._answered
        if not self._known or silent < PAUSE_SECONDS:
            self._moved = now
            return ""
        if self.process is not None:
            used, running = activity(self.process)
            if running or used != self._used:
                self._used, self._moved = used, now
        if silent >= HUNG_SECONDS or (silent >= self._seconds and now - self._moved >= QUIET_SECONDS):
            return f"has not answered for {silent:.0f} s"
        return ""


def activity(process: Process) -> tuple[float, bool]:
    """The CPU seconds that a process has used, and whether a thread of it runs, or waits for a core or the disk."""
    running = False
    with suppress(NoSuchProcess):
        for thread in process.threads():
            with suppress(NoSuchProcess):  # this thread has ended
                running |= Process(thread.id).status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
        return sum(process.cpu_times()[:2]), running
    return 0.0, running
