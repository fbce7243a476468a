"""Who gets what is scarce: the order of those that wait for it, and the places of those that have some of it."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from kvrelay.router.errors import Exhausted

KeyT = TypeVar("KeyT", bound=Hashable)

_KEPT = 64
"""Keys that may be remembered without need."""
ROUND_SECONDS = 0.001
"""Time of one round of the event loop, in seconds, in which work of a millisecond may begin."""
WOKEN = 8
"""Waiting tasks that go on in one round, of which those wait again for whose work there is no time in it."""


class Shares(Generic[KeyT]):
    """Start-time fair queueing (Goyal, Vin, Cheng 1996): a virtual time for each key, which advances by what the key
    gets, divided by its weight; the earliest goes next.

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
        """Adds a key that waits for something from now on."""
        self._at[key] = self[key]
        self._joined.add(key)

    def leave(self, key: KeyT) -> None:
        """Removes a key that waits for nothing any more."""
        self._joined.discard(key)
        if len(self._at) > 2 * len(self._joined) + _KEPT:
            self._at = {key: at for key, at in self._at.items() if key in self._joined or at > self._now}

    def charge(self, key: KeyT, amount: float) -> None:
        """Charges a key for an amount, divided by its weight."""
        at = self[key]
        self._now = max(self._now, min((self._at[other] for other in self._joined), default=at))
        self._at[key] = at + amount


class Turns:
    """Time of the event loop for work that takes it for a millisecond or more: in each of its rounds, in which it goes
    through all that can go on, such work is begun within ROUND_SECONDS. The holder that has had the fewest is next."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shares: Shares[str] = Shares()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._since: float | None = None
        """Monotonic time at which the round's first work began, in seconds."""
        self._ending = False
        """Whether the round's end is due."""

    async def take(self, holder: str) -> None:
        """Returns when the holder's work may begin, which goes on to its next `await`."""
        if self._waiting or not self._free():
            await self._wait(holder, first=False)
            while not self._free():
                await self._wait(holder, first=True)
        else:
            self._shares.charge(holder, 1.0)
        if self._since is None:
            self._since = self._clock()
            self._end_round_soon()

    def _free(self) -> bool:
        return self._since is None or self._clock() - self._since < ROUND_SECONDS

    async def _wait(self, holder: str, *, first: bool) -> None:
        turn = asyncio.get_running_loop().create_future()
        if holder not in self._waiting:
            self._waiting[holder] = deque()
            self._shares.join(holder)
        queue = self._waiting[holder]
        (queue.appendleft if first else queue.append)(turn)
        self._end_round_soon()
        await turn

    def _end_round_soon(self) -> None:
        if not self._ending:
            self._ending = True
            asyncio.get_running_loop().call_soon(self._end_round)

    def _end_round(self) -> None:
        self._since, self._ending = None, False
        for _ in range(WOKEN):
            if not self._waiting:
                return
            holder = min(self._waiting, key=self._shares.__getitem__)
            turn = self._waiting[holder].popleft()
            if not self._waiting[holder]:
                del self._waiting[holder]
                self._shares.leave(holder)
            if not turn.done():  # its task was cancelled otherwise
                self._shares.charge(holder, 1.0)
                turn.set_result(None)
        self._end_round_soon()


class Places:
    """Counts the places that holders have of a limited number. A holder is a tenant, or a client's address where nobody
    is authenticated.

        some are free        anybody takes one; the last ones, the reserve, only who has less than an equal share
        none is free         who has two fewer than another one may take one of the other's, the largest holder's first
    """

    def __init__(self, most: int, reserve: int = 0) -> None:
        self.most = most
        self.taken = 0
        self._reserve = reserve
        self._counts: dict[str, int] = {}

    def __getitem__(self, holder: str) -> int:
        """Places of a holder."""
        return self._counts.get(holder, 0)

    def free(self, holder: str) -> bool:
        """Whether the holder may take a free place."""
        if self.taken < self.most - self._reserve:
            return True
        # Counts one holder more than there are, because another one may come.
        holders = len(self._counts) + (holder not in self._counts) + 1
        return self.taken < self.most and (not self._reserve or self[holder] < self.most // holders)

    def larger(self, holder: str) -> list[str]:
        """The holders that have at least two more than this one, the largest first."""
        least = self[holder] + 2
        return sorted((other for other, count in self._counts.items() if count >= least), key=self.__getitem__)[::-1]

    def take(self, holder: str) -> None:
        self.taken += 1
        self._counts[holder] = self[holder] + 1

    def release(self, holder: str) -> None:
        self.taken -= 1
        self._counts[holder] -= 1
        if not self._counts[holder]:
            del self._counts[holder]


class Seats:
    """Places for streams that go on for as long as their clients want. Used on the event loop only."""

    def __init__(self, most: int, what: str) -> None:
        """
        Args:
            what: the streams, in the words of an error.
        """
        self._places = Places(most)
        self._what = what
        self._scopes: dict[str, dict[asyncio.Timeout, None]] = {}
        """Streams of each holder, the oldest first."""

    @asynccontextmanager
    async def seat(self, holder: str) -> AsyncIterator[None]:
        """A place for the duration of an `async with`.

        Raises:
            Exhausted: there is none, or the stream had to give it up to another holder.
        """
        places = self._places
        if not places.free(holder):
            if not (larger := places.larger(holder)):
                raise Exhausted(f"{places.taken} {self._what} are open; allowed: {places.most}")
            oldest = next(iter(self._scopes[larger[0]]))
            self._leave(larger[0], oldest)
            oldest.reschedule(asyncio.get_running_loop().time())
        places.take(holder)
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes.setdefault(holder, {})[scope] = None
                try:
                    yield
                finally:
                    self._leave(holder, scope)
        except TimeoutError:
            if not scope.expired():
                raise
            raise Exhausted(f"gave way to another client: {places.most} {self._what} are open") from None

    def _leave(self, holder: str, scope: asyncio.Timeout) -> None:
        """Gives a place back, once."""
        scopes = self._scopes.get(holder, {})
        if scope in scopes:
            del scopes[scope]
            self._places.release(holder)
            if not scopes:
                del self._scopes[holder]
