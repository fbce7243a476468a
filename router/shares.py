"""Start-time fair queueing (Goyal, Vin, Cheng 1996): who goes next, so that each gets its share of what is scarce."""

from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

_KEPT = 64
"""Keys that may be remembered without need."""


class Shares(Generic[KeyT]):
    """A virtual time for each key, which advances by what the key gets, divided by its weight: the earliest goes next.

    A key that has waited for nothing starts at the present virtual time: what it has not used before is not saved up.
    """

    def __init__(self) -> None:
        self._at: dict[KeyT, float] = {}
        self._joined: set[KeyT] = set()
        self._now = 0.0

    def __getitem__(self, key: KeyT) -> float:
        """The virtual time of a key."""
        return max(self._now, self._at.get(key, 0.0)) if key not in self._joined else self._at[key]

    def join(self, key: KeyT) -> None:
        """The key wants something from now on."""
        self._at[key] = self[key]
        self._joined.add(key)

    def leave(self, key: KeyT) -> None:
        """It wants nothing more."""
        self._joined.discard(key)
        if len(self._at) > 2 * len(self._joined) + _KEPT:
            self._at = {key: at for key, at in self._at.items() if key in self._joined or at > self._now}

    def charge(self, key: KeyT, amount: float) -> None:
        """The key gets so much, divided by its weight."""
        at = self[key]
        self._now = max(self._now, min((self._at[other] for other in self._joined), default=at))
        self._at[key] = at + amount
