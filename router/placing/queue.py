"""Requests that wait in the router, because the workers that would compute them have enough to do.

    producer    a session that places its request; one that places it again goes to the front
    consumer    the first request that has a place, in this order
    leaves too  a request whose client is gone, whose time limit has passed, or for which there are no workers left

Requests go by the ranks of their classes, the smallest first; the others get what these leave. Of what a rank gets,
tenants have shares by their weights, in tokens, at least LEAST_TOKENS for each request, and a tenant's classes of this
rank have shares of its share. Within a class, the smallest priority goes first, then the request whose target passes
first, then the oldest.

A request that has no place yet is passed by others that have one, until these have got OVERTAKEN times its own tokens;
from then on it holds back all of those behind it. So a large prompt stops small ones for a while only, and waits for a
bounded number of them. It holds nobody back who only takes what the workers keep for holders of little.
"""

import asyncio
import heapq
import itertools
import math
import time
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from kvrelay.router.config import DEFAULT_SERVICE, Service
from kvrelay.router.placing.placement import Demand, NoPlace, Placement
from kvrelay.router.shares import Shares

T = TypeVar("T")

OVERTAKEN = 4
LEAST_TOKENS = 32
"""Tokens that a placed request counts as at least in its tenant's share: each one, however short, is also work for
those that hand its KV over. A tenant's many tiny prompts would go before another's few usual ones otherwise."""
LOOK_AHEAD = 8
"""Number of requests that are tried in search of one that has a place."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Facts that decide a request's turn."""

    tenant: str = ""
    """Holder of a share of the workers: a tenant, or a client's address where nobody is authenticated."""
    weight: float = 1.0
    """Weight of the tenant."""
    service: Service = DEFAULT_SERVICE
    """Class of service."""
    priority: int = 0
    due: float = math.inf
    """Monotonic time at which its first token is late by the class's target, in seconds; infinite without a target."""
    holder: int = 0
    """Digest of the tenant, as workers get it; 0 for none."""


NO_CLAIM = Claim()


class QueueFull(Exception):
    """The largest number of requests is waiting already."""


@dataclass(slots=True, eq=False)
class _Waiter:
    demand: Demand
    claim: Claim
    number: int
    first: bool
    called: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it may have a place, or has been displaced."""
    displaced: bool = False
    passed: int = 0
    """Tokens of requests that went before it while it had no place."""
    found: Placement | NoPlace | None = None
    """The latest decision about it."""
    found_at: int = -1
    """Number of changes of the workers' state before that decision."""

    @property
    def order(self) -> tuple[int, float, int]:
        return self.claim.priority, self.claim.due, self.number

    @property
    def held(self) -> bool:
        """Whether no other request may pass it any more."""
        return self.passed >= OVERTAKEN * self.demand.prompt_tokens


@dataclass(slots=True)
class _Tenant:
    """The waiting requests of one tenant and rank, by class."""

    shares: Shares[str] = field(default_factory=Shares)
    lines: defaultdict[str, list[_Waiter]] = field(default_factory=lambda: defaultdict(list))
    """Requests in order, by class; a class of which none waits is left out."""

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))


@dataclass(slots=True)
class _Rank:
    """The tenants that have waiting requests of one rank."""

    tenants: dict[str, _Tenant] = field(default_factory=dict)
    shares: Shares[str] = field(default_factory=Shares)

    def add(self, waiter: _Waiter) -> None:
        claim = waiter.claim
        if claim.tenant not in self.tenants:
            self.tenants[claim.tenant] = _Tenant()
            self.shares.join(claim.tenant)
        tenant = self.tenants[claim.tenant]
        if claim.service.name not in tenant.lines:
            tenant.shares.join(claim.service.name)
        insort(tenant.lines[claim.service.name], waiter, key=lambda other: other.order)

    def remove(self, waiter: _Waiter) -> None:
        claim = waiter.claim
        tenant = self.tenants[claim.tenant]
        line = tenant.lines[claim.service.name]
        line.remove(waiter)
        if not line:
            del tenant.lines[claim.service.name]
            tenant.shares.leave(claim.service.name)
        if not tenant.lines:
            del self.tenants[claim.tenant]
            self.shares.leave(claim.tenant)

    def in_turn(self, most: int) -> Iterator[_Waiter]:
        """The waiting requests in order: the first of each line, then the second of each.

        Args:
            most: tenants that matter; only the requests of so many are among them.
        """
        tenants = heapq.nsmallest(most, self.tenants, key=self.shares.__getitem__)
        lines = [
            tenant.lines[name]
            for tenant in map(self.tenants.__getitem__, tenants)
            for name in sorted(tenant.lines, key=tenant.shares.__getitem__)
        ]
        for row in itertools.zip_longest(*lines):
            yield from filter(None, row)


class PlacementQueue:
    """Fair between tenants, by the ranks of their requests' classes. Used on one event loop only."""

    def __init__(
        self,
        decide: Callable[[Demand], Placement | NoPlace],
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            decide: the placement of a request by the workers' state now.
            max_waiting: requests that may wait.
            clock: the router's.
        """
        self._decide, self._clock = decide, clock
        self._max_waiting = max_waiting
        self._numbers = itertools.count()
        self._again: list[_Waiter] = []
        """Requests that are placed again, the latest first."""
        self._ranks: dict[int, _Rank] = {}
        """The other requests by rank, the most urgent first. There are few ranks, and they stay with their shares."""
        self._next: _Waiter | None = None
        """Waiter that is called and has not tried yet."""
        self._passing: list[_Waiter] = []
        """Waiters that `_next` overtakes."""
        self._waiting = self._yielding = 0
        """Requests that wait, and those of them that yield to others."""
        self._changes = 0
        """Number of changes of the workers' state that were told."""

    def __len__(self) -> int:
        """Requests that wait."""
        return self._waiting

    def rivals(self, demand: Demand) -> int:
        """Requests that wait for what this one may get: all of them, or, for an urgent one, the urgent ones only."""
        return self._waiting if demand.yields else self._waiting - self._yielding

    def demands(self, rank: float = math.inf) -> list[Demand]:
        """The demands of the requests that wait, in turn; without those of ranks above `rank`."""
        return [waiter.demand for waiter in self._in_turn() if waiter.claim.service.rank <= rank]

    def ahead(self, claim: Claim) -> list[Demand]:
        """The demands of the requests that would go before one with this claim that came now."""
        newcomer = _Waiter(Demand(0, 0), claim, next(self._numbers), first=False)
        self._add(newcomer)
        try:
            return [each.demand for each in itertools.takewhile(lambda each: each is not newcomer, self._in_turn())]
        finally:
            self._remove(newcomer)

    async def place(
        self,
        demand: Demand,
        until: float,
        start: Callable[[Placement], T],
        claim: Claim = NO_CLAIM,
        *,
        first: bool = False,
        on_wait: Callable[[], object] | None = None,
    ) -> T | NoPlace:
        """Waits for a place and takes it: `start` is called at once, so that no other request gets the same capacity.

        Args:
            until: monotonic time at which to stop waiting.
            start: takes the place.
            first: goes before the requests that wait already, and is never refused because of their number.
            on_wait: called if it has no place at once.

        Returns:
            The result of `start`; or NO_WORKERS; or NO_CAPACITY if the time is up.

        Raises:
            QueueFull: too many requests wait, none of which has to give way to this one.
        """
        waiter = _Waiter(demand, claim, next(self._numbers), first)
        self._add(waiter)
        try:
            self._look()
            if not (first or waiter.called.is_set()) and len(self) > self._max_waiting:
                self._displace(waiter)
            if on_wait is not None and not waiter.called.is_set():
                on_wait()
            async with asyncio.timeout(until - self._clock()):
                while True:
                    if not waiter.called.is_set():
                        await waiter.called.wait()
                    waiter.called.clear()
                    if waiter.displaced:
                        raise QueueFull
                    passing, self._passing, self._next = self._passing, [], None
                    waiter.found, waiter.found_at = self._decide(demand), self._changes
                    place = waiter.found
                    if isinstance(place, Placement):
                        self._charge(waiter, passing)
                        return start(place)
                    if place is NoPlace.NO_WORKERS:
                        return place
                    self._look()
        except TimeoutError:
            return NoPlace.NO_CAPACITY
        finally:
            if not waiter.displaced:
                self._remove(waiter)
            self._look()

    def wake(self) -> None:
        """The workers' state has changed: a request may have a place now."""
        self._changes += 1
        self._look()

    def _look(self) -> None:
        """Calls the first request that has a place.

        What was decided since the latest change of the workers' state is not decided again, unless a request would
        pass others by it: the state may have changed without a word yet.
        """
        while self._next is None:
            passing: list[_Waiter] = []
            held = known = False
            for waiter in itertools.islice(self._in_turn(LOOK_AHEAD), LOOK_AHEAD):
                fresh = waiter.found_at != self._changes
                if fresh:
                    waiter.found, waiter.found_at = self._decide(waiter.demand), self._changes
                place = waiter.found
                passes = isinstance(place, Placement) and place.passes
                if passes or not (held or place is NoPlace.NO_CAPACITY):
                    break
                known = known or not fresh
                held = held or waiter.held
                passing.append(waiter)
            else:
                return
            if not known or passes:
                self._next, self._passing = waiter, [] if passes else passing
                waiter.called.set()
            else:
                self._changes += 1

    def used(self, claim: Claim, tokens: int) -> None:
        """A request has generated so many tokens more than was expected of it when it got its place, or less where this
        is negative. They count for its tenant as those of prompts do."""
        rank = self._rank(claim.service.rank)
        rank.shares.charge(claim.tenant, tokens / claim.weight)
        if claim.tenant in rank.tenants:
            rank.tenants[claim.tenant].shares.charge(claim.service.name, tokens / claim.service.weight)

    def _rank(self, number: int) -> _Rank:
        if number not in self._ranks:
            self._ranks = dict(sorted({**self._ranks, number: _Rank()}.items()))
        return self._ranks[number]

    def _in_turn(self, most: int | None = None) -> Iterator[_Waiter]:
        """The waiting requests in order.

        Args:
            most: requests that matter, in place of all; others may be left out, and out of order.
        """
        yield from self._again
        for rank in self._ranks.values():
            yield from rank.in_turn(most or len(rank.tenants))

    def _add(self, waiter: _Waiter) -> None:
        self._waiting += 1
        self._yielding += waiter.demand.yields
        if waiter.first:
            self._again.insert(0, waiter)
        else:
            self._rank(waiter.claim.service.rank).add(waiter)

    def _remove(self, waiter: _Waiter) -> None:
        if self._next is waiter:
            self._next, self._passing = None, []
        self._waiting -= 1
        self._yielding -= waiter.demand.yields
        if waiter.first:
            self._again.remove(waiter)
        else:
            self._rank(waiter.claim.service.rank).remove(waiter)

    def _charge(self, waiter: _Waiter, passing: list[_Waiter]) -> None:
        """A request has got its place."""
        for other in passing:
            other.passed += waiter.demand.prompt_tokens
        if not waiter.first:
            tokens = waiter.demand.prompt_tokens + waiter.demand.expected_tokens
            self.used(waiter.claim, max(LEAST_TOKENS, tokens))

    def _displace(self, newcomer: _Waiter) -> None:
        """Refuses a request of the least urgent rank: there, the last one of the tenant that has most of them.

        Raises:
            QueueFull: that is the tenant of the newcomer, which makes the queue too long.
        """
        worst = max(number for number, rank in self._ranks.items() if rank.tenants)
        tenants = self._ranks[worst].tenants
        most = max(tenants.values(), key=len)
        if newcomer.claim.service.rank == worst and len(most) <= len(tenants[newcomer.claim.tenant]):
            raise QueueFull
        last = max((line[-1] for line in most.lines.values()), key=lambda waiter: waiter.order)
        self._remove(last)
        last.displaced = True
        last.called.set()
