"""Requests that wait in the router, because no decode worker would have capacity at the end of their prefill.

    producer    a session that places its request; one that places it again goes to the front
    consumer    the first request in line, as soon as it has a place; no other request overtakes it
    leaves too  a request whose client is gone, whose time limit has passed, or for which there are no workers left

So a full decode worker holds prompts back here, where they cost nothing, instead of filling prefill memory with KV that
no worker can take.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from kvrelay.router.placement import Demand, NoPlace, Placement

T = TypeVar("T")


class QueueFull(Exception):
    """The largest number of requests is waiting already."""


class PlacementQueue:
    """First come, first served. Used on one event loop only."""

    def __init__(self, decide: Callable[[Demand], Placement | NoPlace], max_waiting: int) -> None:
        """
        Args:
            decide: the placement of a request by the workers' state now.
            max_waiting: requests that may wait.
        """
        self._decide = decide
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[object, asyncio.Event] = OrderedDict()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    async def place(
        self, demand: Demand, until: float, start: Callable[[Placement], T], *, first: bool = False
    ) -> T | NoPlace:
        """Waits for a place and takes it: `start` is called at once, so that no other request gets the same capacity.

        Args:
            until: monotonic time at which to stop waiting.
            start: takes the place.
            first: goes before the requests that wait already, and is never refused because of their number.

        Returns:
            The result of `start`; or NO_WORKERS; or NO_CAPACITY if the time is up.

        Raises:
            QueueFull: too many requests wait.
        """
        if first or not self._waiting:
            place = self._decide(demand)
            if place is not NoPlace.NO_CAPACITY:
                return start(place) if isinstance(place, Placement) else place
        if not first and len(self._waiting) >= self._max_waiting:
            raise QueueFull
        ticket, turn = object(), asyncio.Event()
        self._waiting[ticket] = turn
        self._waiting.move_to_end(ticket, last=not first)
        try:
            async with asyncio.timeout(until - time.monotonic()):
                while True:
                    await turn.wait()
                    turn.clear()
                    place = self._decide(demand)
                    if place is not NoPlace.NO_CAPACITY:
                        return start(place) if isinstance(place, Placement) else place
        except TimeoutError:
            return NoPlace.NO_CAPACITY
        finally:
            del self._waiting[ticket]
            self.wake_first()

    def wake_first(self) -> None:
        """The workers' state has changed: the first request in line may have a place now."""
        if self._waiting:
            next(iter(self._waiting.values())).set()
