"""A command on a terminal of its own, with the keys that a user presses."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence

import pyte

SECONDS = 60.0
LINES = 200
CTRL_C, CTRL_D = "\x03", "\x04"
# The terminal must be the controlling one of the command's session, or else Ctrl-C sends no signal.
ATTACH = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """Runs a command; a `with` kills it in the end if it still runs."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], columns: int = 100) -> None:
        """
        Args:
            environment: all of its variables but TERM.
        """
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        variables = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", ATTACH, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=variables | {"TERM": "xterm"},
            start_new_session=True,
        )
        os.close(theirs)
        self._screen = pyte.Screen(columns, LINES)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def lines(self) -> list[str]:
        """The screen, without trailing spaces and the empty lines at its end."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip("\n").split("\n")

    def wait_for(self, words: str, seconds: float = SECONDS) -> None:
        """Waits until the screen shows `words`; as `wait_until`."""
        self.wait_until(lambda lines: any(words in line for line in lines), repr(words), seconds)

    def wait_until(self, shows: Callable[[list[str]], bool], what: str, seconds: float = SECONDS) -> None:
        """Waits until `lines` are as wanted.

        Raises:
            AssertionError: it has ended, or the time is over; the text names `what`.
        """
        deadline = time.monotonic() + seconds
        while not shows(self.lines):
            if not self._read(deadline):
                raise AssertionError(f"no {what} within {seconds} s: {self.lines}")

    def press(self, keys: str) -> None:
        """Types."""
        os.write(self._ours, keys.encode())

    def end(self, seconds: float = SECONDS) -> int:
        """Waits until it has ended; returns its exit status."""
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            continue
        return self._process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, deadline: float) -> bool:
        """Takes what comes next; False if it has closed the terminal, or the time is over."""
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([self._ours], [], [], left)[0]:
            return False
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # the other end is closed
            return False
        self._stream.feed(data)
        return bool(data)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(SECONDS)
        os.close(self._ours)
