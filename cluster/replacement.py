"""How a member's process ended, and when its replacement starts. No I/O."""

from dataclasses import dataclass

FIRST_SECONDS = 0.5
MOST_SECONDS = 30.0
LONG_LIFE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process of a member ended."""

    reason: str = ""
    """Why, in one line; empty if it was asked to stop."""

    mistake: bool = False
    """Its configuration made it fail at start (a missing model, a port in use), so another try would fail as well."""


class Backoff:
    """The wait before a member's next process: none after a long life, then 0.5 s doubling to 30 s."""

    def __init__(self) -> None:
        self._next = 0.0

    def after(self, life_seconds: float) -> float:
        """Seconds to wait after a process that lived for `life_seconds`."""
        if life_seconds >= LONG_LIFE_SECONDS:
            self._next = 0.0
        wait = self._next
        self._next = min(max(FIRST_SECONDS, 2 * self._next), MOST_SECONDS)
        return wait
