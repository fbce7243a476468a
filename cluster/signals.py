"""Signals that ask a process to end. They are recorded and checked between steps, so they interrupt no step."""

import signal
import threading
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal asked this process to end before it was ready."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted before the cluster was ready; nothing of it is left")
        self.code = 128 + number
        """Exit code of the process, as a shell reports it."""


class Signals:
    """The last signal that asked this process to end."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._number = 0

    def install(self) -> None:
        """Handles the signals, except those that this process was started to ignore (nohup)."""
        for number in NUMBERS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on)

    def check(self) -> None:
        """Raises Interrupted if a signal came."""
        if self._came.is_set():
            raise Interrupted(self._number)

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for a signal; True if one came."""
        return self._came.wait(seconds)

    def _on(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        self._came.set()
