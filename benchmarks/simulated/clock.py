"""An event loop whose clock jumps to the next timer when nothing is ready."""

import asyncio
import logging
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

RESOLUTION = 1e-9
"""Seconds by which asyncio fires a timer early. The clock jumps as far past one, so that nobody who waits for a time
finds it not reached, again and again."""
STILL = 10_000
"""Rounds of the loop at one moment after which the clock moves a little: a sum of two times may be rounded."""
START = 1000.0
"""Simulated time in seconds at which a loop begins: some figures of a request take 0 as "not yet"."""


class _Jumps(selectors.SelectSelector):
    """Waits for no file: as long as the loop would wait, the clock jumps ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self._still = 0
        """Rounds of the loop since the clock moved."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """
        Raises:
            RuntimeError: no timer is set, so nothing would ever happen.
        """
        if timeout is None:
            raise RuntimeError("every task of the simulation waits for something that never comes")
        self._still = 0 if timeout > 0 else self._still + 1
        if timeout > 0 or self._still > STILL:
            self.now += timeout + RESOLUTION
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Runs callbacks and timers as asyncio does, in simulated time. It can't wait for sockets or other threads."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Simulated time in seconds; the clock of everything that is simulated."""
        return self._jumps.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end in simulated time, as `asyncio.run` does in real time; kvrelay logs errors only
    meanwhile.

    Raises:
        Exception: what a callback or a task of the simulation has raised, and nobody else takes.
    """
    failures: list[Exception] = []

    def fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        failures.append(error if isinstance(error, Exception) else RuntimeError(context["message"]))
        loop.stop()

    log = logging.getLogger("kvrelay")
    level = log.level
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.get_loop().set_exception_handler(fail)
        log.setLevel(logging.ERROR)
        try:
            return runner.run(main)
        except RuntimeError:
            if failures:  # the loop was stopped
                raise failures[0] from None
            raise
        finally:
            log.setLevel(level)
            runner.get_loop().set_exception_handler(None)
