"""Signals that ask a process to end. They are recorded and checked between steps, so they interrupt no step."""

import signal
import threading
from collections.abc import Callable
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
        self._handle(self._on)

    def end_at_once(self, end: Callable[[int], object]) -> None:
        """Has the first signal call `end`, which ends this process, with its number, until `install` is called again.

        Code that can't be left by an exception runs meanwhile.
        """

        def on(number: int, frame: FrameType | None) -> None:
            for each in NUMBERS:
                signal.signal(each, signal.SIG_IGN)
            end(number)

        self._handle(on)

    def check(self) -> None:
        """Raises Interrupted if a signal came."""
        if self._came.is_set():
            raise Interrupted(self._number)

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for a signal; True if one came."""
        return self._came.wait(seconds)

    def _handle(self, handler: Callable[[int, FrameType | None], None]) -> None:
        for number in NUMBERS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)

    def _on(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        self._came.set()
