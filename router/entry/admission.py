"""How many calls a router works on at once, how much memory their requests take, and which of them give way.

Calls have places, which their holders share (`router/shares.py`):

    place     one for each call, from the headers of its request on. A call with several completions has one for each
              that runs; the first takes the call's own, the others wait until there is one for them
    begun     once a worker was told of one of its completions; until then, a call may have to give way
    give way  if no place is free, a newcomer takes one of the largest holder: that of a completion which waits beside
              others of its call, and then waits for another place; else that of a call, which ends as Exhausted.
              A call that finds no larger holder takes the place of such a completion of its own holder

An API key's limit of requests at once counts places, too.

A request of n bytes counts as CHARGE * n bytes until its prompt is known: gRPC keeps its n bytes to the end of the
call, and each byte may be a token of four bytes. From then on it counts as n bytes and those of its packed prompt.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvrelay.router.errors import Exhausted, LimitReached
from kvrelay.router.shares import Places

TOKEN_BYTES = 4
CHARGE = 1 + TOKEN_BYTES
PEER_SHARE = 2
"""One client may hold 1 / PEER_SHARE of all bytes."""
RESERVED_SHARE = 16
"""1 / RESERVED_SHARE of all places is for holders that have less than an equal share."""
BUSY_SECONDS = 1.0
"""Seconds after which to try again while other requests of the key run."""
CROWDED_SECONDS = 0.25
"""Seconds before a completion is tried again for which the queue had no room."""


class Place:
    """The place of one completion."""

    __slots__ = ("_begun", "_scope", "ticket")

    def __init__(self, ticket: "Ticket") -> None:
        self.ticket = ticket
        self._begun: Callable[[], bool] | None = None
        self._scope: asyncio.Timeout | None = None

    @property
    def begun(self) -> bool:
        """Whether a worker was told of its completion."""
        return self._begun is not None and self._begun()

    @property
    def waits(self) -> bool:
        """Whether its completion can give way."""
        return self._scope is not None and not self._scope.expired() and not self.begun

    @contextmanager
    def work(self, scope: asyncio.Timeout, begun: Callable[[], bool]) -> Iterator[None]:
        """The completion runs in the body of a `with`, until it gives way and `scope` ends it."""
        self._scope, self._begun = scope, begun
        try:
            yield
        finally:
            self.ticket.begun |= begun()
            self._scope = self._begun = None

    def give_way(self) -> None:
        """Ends the completion's work."""
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())


class Ticket:
    """The share of one call."""

    def __init__(self, admission: "Admission", peer: str, size: int, end: Callable[[], object]) -> None:
        self.holder = peer
        """The client's tenant, or its address where nobody is authenticated."""
        self.key = ""
        self.concurrent = 0
        """Places that its API key may have at once; 0 for any number."""
        self.begun = False
        """Whether a worker was told of one of its completions, or an answer is being made. Then it never gives way."""
        self.arrived = False
        """Whether the whole request is there."""
        self.displaced = False
        """Whether the call had to give way, and has lost its share."""
        self.places: dict[Place, None] = {}
        """Places that it has, the oldest first; one at least."""
        self.waiting: deque[tuple[Place, asyncio.Future[None]]] = deque()
        self.most = admission.most
        """Places that it may have; fewer after the queue had no room for one of its completions."""
        self._own: Place | None = None
        """First place of the ticket, while no completion uses it."""
        self._end: Callable[[], object] = end
        self._admission = admission
        self._size = size
        self._prompts = 0
        self.nbytes = 0
        self._set(CHARGE * size)

    def hold(self, nbytes: int) -> None:
        """Counts the `nbytes` of a packed prompt of the request."""
        self._prompts += nbytes
        self._set(self._size + self._prompts)

    def resize(self, size: int) -> None:
        """Sets the size of the request, which has arrived, to `size` bytes.

        Raises:
            Exhausted: too many bytes.
        """
        self._admission.check_bytes(self.holder, CHARGE * size - self.nbytes)
        self.arrived = True
        self._size = size
        self._set(CHARGE * size)

    @contextmanager
    def lent(self, place: Place) -> Iterator[Place]:
        """A place of this call, which it takes back at the end of a `with`."""
        try:
            yield place
        finally:
            self._admission.take_back(place)

    async def place(self) -> Place:
        """A place for a completion; waits until the call has one for it."""
        if (place := self._own) is not None:
            self._own = None
            return place
        return await self._admission.wait(Place(self))

    async def again(self, place: Place) -> None:
        """Waits until a completion may be tried again that had to give way, or for which the queue had no room."""
        if place not in self.places:
            await self._admission.wait(place, again=True)
        elif len(self.places) == 1:
            await asyncio.sleep(CROWDED_SECONDS)
        else:
            self.most = len(self.places) - 1
            self._admission.drop(place)
            await self._admission.wait(place, again=True)

    def lend_own(self, place: Place) -> None:
        """Keeps the call's last place, which no completion uses any more, for the next completion."""
        self._own = place

    def give_way(self) -> None:
        """Ends the call."""
        self.displaced = True
        end = self._end
        self._admission.remove(self)
        end()

    def close(self) -> None:
        """Drops the function that ends the call, because it refers to all of the call's objects."""
        self._end = lambda: None

    def _set(self, nbytes: int) -> None:
        if not self.displaced:
            self._admission.add_bytes(self.holder, nbytes - self.nbytes)
            self.nbytes = nbytes


class Admission:
    """Admits calls up to a number and an amount of memory. Used on the event loop only."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._places = Places(max_requests, max_requests // RESERVED_SHARE)
        self._tickets: dict[str, dict[Ticket, None]] = {}
        """The calls of each holder, the oldest first."""
        self._keys: Counter[str] = Counter()
        """Places of each API key that has a limit of them."""
        self._waiting: dict[str, dict[Ticket, None]] = {}
        """The calls of each holder that wait for a place, in turn."""
        self.nbytes = 0
        """Bytes that all calls hold."""
        self._by_peer: Counter[str] = Counter()

    @property
    def calls(self) -> int:
        """Calls that were admitted and have not ended; one with several completions that run counts as many."""
        return self._places.taken

    @property
    def most(self) -> int:
        """The largest number of calls."""
        return self._places.most

    @contextmanager
    def admit(
        self,
        peer: str,
        size: int,
        end: Callable[[], object] = lambda: None,
        key: str = "",
        concurrent: int = 0,
    ) -> Iterator[Ticket]:
        """Admits one call for the duration of a `with`.

        Args:
            peer: the client's tenant, or its address without the port where nobody is authenticated.
            size: of the request as it came, in bytes.
            end: called when the call has to give way.
            key: names the API key; it may have `concurrent` places, or any number if that is 0.

        Raises:
            Exhausted: too many calls, or too many bytes.
        """
        if concurrent and (running := self._keys[key]) >= concurrent:
            text = f"{running} requests of the API key are in flight; its limit concurrent is {concurrent}"
            raise LimitReached(text, BUSY_SECONDS)
        self.check_bytes(peer, CHARGE * size)
        if not self._places.free(peer) and not self._displace(peer) and not self._take(self._beside(peer)):
            raise Exhausted(
                f"{self._places.taken} requests are in flight, {self._places[peer]} of them this client's; "
                f"the router's max_requests is {self.most}"
            )
        ticket = Ticket(self, peer, size, end)
        ticket.key, ticket.concurrent = key, concurrent
        self._tickets.setdefault(peer, {})[ticket] = None
        own = Place(ticket)
        self._grant(own)
        ticket.lend_own(own)
        try:
            yield ticket
        finally:
            if not ticket.displaced:
                self.remove(ticket)
                self._pass_on()

    # Places.

    async def wait(self, place: Place, *, again: bool = False) -> Place:
        """Waits until the call has this place.

        Args:
            again: goes before the others of the call.
        """
        ticket = place.ticket
        there_is = not ticket.waiting and self._may(ticket)
        if there_is and (self._places.free(ticket.holder) or self._displace(ticket.holder)):
            self._grant(place)
            return place
        turn = asyncio.get_running_loop().create_future()
        entry = place, turn
        if again:
            ticket.waiting.appendleft(entry)
        else:
            ticket.waiting.append(entry)
        self._waiting.setdefault(ticket.holder, {})[ticket] = None
        try:
            await turn
        except asyncio.CancelledError:
            if entry in ticket.waiting:
                ticket.waiting.remove(entry)
                self._tidy(ticket)
            elif place in ticket.places:
                self.take_back(place)
            raise
        return place

    def take_back(self, place: Place) -> None:
        """A completion needs its place no more."""
        ticket = place.ticket
        if place not in ticket.places:
            return
        # A completion has ended: perhaps the queue has room for one more than before.
        ticket.most += 1
        if len(ticket.places) > 1:
            self.drop(place)
        elif (entry := self._pop(ticket)) is not None:
            waiter, turn = entry
            del ticket.places[place]
            ticket.places[waiter] = None
            turn.set_result(None)
        else:
            ticket.lend_own(place)

    def drop(self, place: Place) -> None:
        """Takes a place from its call."""
        self._uncount(place)
        self._pass_on()

    def remove(self, ticket: Ticket) -> None:
        """Frees all places and bytes of a call."""
        for place in list(ticket.places):
            self._uncount(place)
        self.add_bytes(ticket.holder, -ticket.nbytes)
        ticket.nbytes = 0
        ticket.close()
        tickets = self._tickets[ticket.holder]
        del tickets[ticket]
        if not tickets:
            del self._tickets[ticket.holder]

    def _grant(self, place: Place) -> None:
        ticket = place.ticket
        self._places.take(ticket.holder)
        ticket.places[place] = None
        if ticket.concurrent:
            self._keys[ticket.key] += 1

    def _uncount(self, place: Place) -> None:
        ticket = place.ticket
        self._places.release(ticket.holder)
        del ticket.places[place]
        if ticket.concurrent:
            self._keys[ticket.key] -= 1
            if not self._keys[ticket.key]:
                del self._keys[ticket.key]

    def _may(self, ticket: Ticket) -> bool:
        """Whether the call may have one more place, if there is one."""
        within = not ticket.concurrent or self._keys[ticket.key] < ticket.concurrent
        return within and not ticket.displaced and len(ticket.places) < ticket.most

    def _pass_on(self) -> None:
        """Gives free places to calls that wait for them, the smallest holder's first."""
        while ticket := self._next():
            others = self._waiting[ticket.holder]
            del others[ticket]
            others[ticket] = None  # the holder's other calls go first next time
            if (entry := self._pop(ticket)) is not None:
                self._grant(entry[0])
                entry[1].set_result(None)

    def _pop(self, ticket: Ticket) -> tuple[Place, asyncio.Future[None]] | None:
        """The first that waits for a place of a call, which waits no more; None if nobody does.

        A task that was cancelled just now has not left the line itself yet.
        """
        entry = None
        while ticket.waiting and entry is None:
            entry = ticket.waiting.popleft()
            entry = None if entry[1].done() else entry
        self._tidy(ticket)
        return entry

    def _next(self) -> Ticket | None:
        for holder in sorted(self._waiting, key=self._places.__getitem__):
            if self._places.free(holder):
                for ticket in self._waiting[holder]:
                    if self._may(ticket):
                        return ticket
        return None

    def _tidy(self, ticket: Ticket) -> None:
        if not ticket.waiting and ticket in self._waiting.get(ticket.holder, ()):
            del self._waiting[ticket.holder][ticket]
            if not self._waiting[ticket.holder]:
                del self._waiting[ticket.holder]

    # Giving way.

    def _displace(self, holder: str) -> bool:
        """Frees a place of the largest holder for one that has fewer; False if none can be had."""
        return any(self._take(self._beside(other) or self._call(other)) for other in self._places.larger(holder))

    def _take(self, victim: Place | Ticket | None) -> bool:
        """Frees a place; False if there is none to be freed."""
        if isinstance(victim, Place):
            self._uncount(victim)
        if victim is not None:
            victim.give_way()
        return victim is not None

    def _beside(self, holder: str) -> Place | None:
        """Place of a holder's latest completion that waits beside others of its call."""
        for ticket in reversed(self._tickets.get(holder, {})):
            waiting = (
                (place for place in reversed(ticket.places) if place.waits) if len(ticket.places) > 1 else iter(())
            )
            if (place := next(waiting, None)) is not None:
                return place
        return None

    def _call(self, holder: str) -> Ticket | None:
        """The call that a holder loses: the request that has been arriving for the longest time, or the latest."""
        waiting = [ticket for ticket in self._tickets[holder] if _gives_way(ticket)]
        return next((ticket for ticket in waiting if not ticket.arrived), waiting[-1] if waiting else None)

    # Bytes.

    def check_bytes(self, peer: str, more: int) -> None:
        """Makes room for so many more bytes of a client.

        Raises:
            Exhausted: there is none.
        """
        if more <= 0:
            return
        if self._by_peer[peer] + more > self._max_bytes // PEER_SHARE:
            raise Exhausted(
                f"this client's requests hold {self._by_peer[peer]} bytes; its share of the router's max_queued_bytes "
                "would be passed"
            )
        while self.nbytes + more > self._max_bytes:
            if not self._displace_bytes(self._by_peer[peer] + more):
                raise Exhausted(
                    f"the requests in flight hold {self.nbytes} bytes; the router's max_queued_bytes would be passed"
                )

    def add_bytes(self, peer: str, nbytes: int) -> None:
        self.nbytes += nbytes
        self._by_peer[peer] += nbytes
        if not self._by_peer[peer]:
            del self._by_peer[peer]

    def _displace_bytes(self, least: int) -> bool:
        """Ends a call that has not begun, of the holder that has most bytes, and more than `least`."""
        for holder, nbytes in self._by_peer.most_common():
            if nbytes <= least:
                break
            if waiting := [ticket for ticket in self._tickets[holder] if _gives_way(ticket) and ticket.nbytes]:
                min(waiting, key=lambda ticket: ticket.arrived).give_way()
                return True
        return False


def _gives_way(ticket: Ticket) -> bool:
    return not ticket.begun and len(ticket.places) == 1 and not any(place.begun for place in ticket.places)
