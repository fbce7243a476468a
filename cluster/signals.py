"""The signals that ask a process to end, remembered instead of breaking into what it does."""

import signal
import threading
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The user wanted it to end before it was done."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """Whether the user wants this process to end."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._number = 0

    def install(self) -> None:
        """Takes the signals over, but for those that this process was started to ignore (nohup)."""
        for number in NUMBERS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on)

    def interrupt(self) -> None:
        """Lets Ctrl-C break into what follows, as KeyboardInterrupt, until `install`."""
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Raises Interrupted if one came."""
        if self._came.is_set():
            raise Interrupted(self._number)

    def wait(self, seconds: float) -> bool:
        """Waits for one; whether one came."""
        return self._came.wait(seconds)

    def _on(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        self._came.set()
