"""Offers that wait for free blocks."""

import itertools
from bisect import insort

from kvrelay.engine.request import Urgency
from kvrelay.transfer.protocol.messages import Key


class ReservationQueue:
    """Offers that found no free blocks, in the scheduler's order: class, priority, earliest deadline, arrival.

    While one waits, those behind it ask once, and say that they would pass it: small prompts could overtake a large one
    for ever otherwise. Each request has a deadline, so of a class and priority none is overtaken for ever either.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Urgency, int, Key]] = []
        self._places: dict[Key, tuple[Urgency, int, Key]] = {}
        self._arrivals = itertools.count()

    @property
    def first(self) -> Key | None:
        """The attempt that asks first when there may be room."""
        return self._waiting[0][-1] if self._waiting else None

    def passing(self, key: Key, urgency: Urgency) -> bool:
        """Whether others that wait go before `key`, which has this urgency."""
        if not self._waiting:
            return False
        first = self._waiting[0]
        return first[-1] != key and (key in self._places or first[0] <= urgency)

    def wait(self, key: Key, urgency: Urgency) -> None:
        """Puts `key` into the queue, unless it is there already: there was no room for it."""
        if key not in self._places:
            self._places[key] = place = urgency, next(self._arrivals), key
            insort(self._waiting, place)

    def leave(self, key: Key) -> bool:
        """Takes `key` from the queue, because it has its room or wants none any more. Returns whether it was waiting,
        so that another may have its turn.
        """
        place = self._places.pop(key, None)
        if place is not None:
            self._waiting.remove(place)
        return place is not None
