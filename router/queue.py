"""Requests that wait at the router, because no decode worker would have room for them by the end of their prefill.

    in        a session that has not placed its request yet; one that places it anew goes to the front
    out       the first in line, as soon as the policy finds it a place; nobody passes it
    or        its client goes, its time is up, or there are no workers any more

So a full decode worker holds prompts back here, where they cost nothing, instead of filling prefill's memory with KV
that nobody takes.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvrelay.router.placement import Demand, NoPlace, Placement, Policy, WorkerView

T = TypeVar("T")


class QueueFull(Exception):
    """As many requests wait as may."""


class PlacementQueue:
    """First come, first served. Used on one event loop only."""

    def __init__(self, policy: Policy, view: Callable[[], Sequence[WorkerView]], max_waiting: int) -> None:
        """`view` gives the workers as they are now."""
        self._policy = policy
        self._view = view
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[object, asyncio.Event] = OrderedDict()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    async def place(
        self, demand: Demand, until: float, start: Callable[[Placement], T], *, first: bool = False
    ) -> T | NoPlace:
        """Waits for a place and takes it: `start` is called at once, so that nobody else is given the same room.

        Args:
            until: how long to wait at most, on the monotonic clock.
            start: takes the place; what it returns is returned.
            first: goes before those that wait already, and is never refused for their number.

        Returns:
            What `start` did; or NO_WORKERS; or NO_ROOM, if the time is up.

        Raises:
            QueueFull: as many wait as may.
        """
        if first or not self._waiting:
            verdict = self._policy.place(demand, self._view())
            if isinstance(verdict, Placement):
                return start(verdict)
            if verdict is NoPlace.NO_WORKERS:
                return verdict
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
                    verdict = self._policy.place(demand, self._view())
                    if isinstance(verdict, Placement):
                        return start(verdict)
                    if verdict is NoPlace.NO_WORKERS:
                        return verdict
        except TimeoutError:
            return NoPlace.NO_ROOM
        finally:
            del self._waiting[ticket]
            self.blocks_freed()

    def blocks_freed(self) -> None:
        """There may be a place for the first in line."""
        if self._waiting:
            next(iter(self._waiting.values())).set()
