"""The connections of a router's clients: how long each may keep the router waiting, and how many there may be.

    new       until its first request has begun (HTTP: TLS and all headers) or has arrived (gRPC); `Deadlines.first`
    arriving  the headers of a request are there, its body isn't; `Deadlines.request`
    busy      its request has arrived and is not yet answered: no deadline here, and never closed for others
    heading   it has served a request and has sent a part of the next one's headers; `Deadlines.header`
    idle      it has served a request and sends nothing; `Deadlines.idle`

One address has a limit of connections, from which trusted proxies are exempt. For a newcomer, a full face, or a face
that is full for the newcomer's address, closes connections that are not busy, first those that have never served a
request, the oldest first. If all are busy, the newcomer is refused.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvrelay.router.addresses import Addresses, parse

logger = logging.getLogger(__name__)

LOG_SECONDS = 1.0
"""Least seconds between two log lines about closed connections."""
ROOM_SHARE = 16
"""A full face closes 1 / ROOM_SHARE of the connections that it may have at once, as far as they are not busy."""

Face = Literal["http", "grpc"]
Reason = Literal["first", "header", "request", "idle", "address", "descriptors"]
Peer = tuple[str, int]
"""Address and port of a connection's other end."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Longest time in seconds that a connection may stay in each state; infinite for no limit."""

    first: float
    header: float = math.inf
    request: float = math.inf
    idle: float = math.inf


@dataclass(slots=True, eq=False)
class Connection:
    """One connection of a client."""

    address: str
    """Client's address, as limits by address count it."""
    exempt: bool
    """Whether it is a trusted proxy's."""
    close: Callable[[], object] | None
    """Ends it; None while it isn't known how."""
    since: float = field(default_factory=time.monotonic)
    """Monotonic time at which its state began."""
    served: bool = False
    """Whether it has ever sent a whole request."""
    heading: bool = False
    calls: int = 0
    arrived: Callable[[], bool] | None = None
    """Whether the body of the latest request is there; None if nothing is missing."""
    closing: bool = False

    @property
    def arriving(self) -> bool:
        if self.arrived is not None and self.arrived():
            self.arrived = None
        return self.arrived is not None

    @property
    def busy(self) -> bool:
        return self.calls > 0 and not self.arriving

    def received(self) -> None:
        """Notes that bytes have arrived."""
        if self.served and not self.calls and not self.heading:
            self.heading, self.since = True, time.monotonic()

    def begin(self, arrived: Callable[[], bool] | None = None) -> None:
        """Notes the begin of a request; `end` must follow.

        Args:
            arrived: whether its body is there; None if it is.
        """
        self.calls += 1
        self.heading, self.arrived, self.since = False, arrived, time.monotonic()
        self.served |= not self.arriving

    def end(self) -> None:
        """Notes the end of a request, answered or given up."""
        self.calls -= 1
        if not self.arriving:
            self.served, self.since = True, time.monotonic()

    def state(self, deadlines: Deadlines) -> tuple[Reason, float]:
        """The reason for which it is to be closed, and when."""
        if self.arriving:
            return "request", self.since + deadlines.request
        if self.calls:
            return "idle", math.inf
        if self.heading:
            return "header", self.since + deadlines.header
        return ("idle", self.since + deadlines.idle) if self.served else ("first", self.since + deadlines.first)


class Connections:
    """The connections of one face. Used on the event loop only."""

    def __init__(
        self,
        face: Face,
        deadlines: Deadlines,
        most_per_address: int,
        addresses: Addresses,
        closed: Callable[[Face, Reason], object] = lambda face, reason: None,
    ) -> None:
        """
        Args:
            closed: called for each connection that is closed, or refused.
        """
        self.most = 2**31 - 1
        """Connections that there may be; set by whoever knows the descriptors."""
        self.stranger: Callable[[], object] = lambda: None
        """Called for each request on a connection that isn't known yet."""
        self._face: Face = face
        self._deadlines = deadlines
        self._most_per_address = most_per_address
        self._addresses = addresses
        self._closed = closed
        self._connections: dict[Peer, Connection] = {}
        self._counts: Counter[str] = Counter()
        """Number of connections by address, without those of trusted proxies."""
        self._live = 0
        """Connections that are not being closed."""
        self._unlogged: Counter[Reason] = Counter()
        self._logged_at = -LOG_SECONDS

    def __len__(self) -> int:
        return self._live

    def of(self, peer: Peer) -> Connection | None:
        """The connection with another end."""
        return self._connections.get(peer)

    def check(self, peer: Peer) -> None:
        """Notes that a request begins on the connection with this peer."""
        if peer not in self._connections:
            self.stranger()

    def peers(self) -> list[Peer]:
        return list(self._connections)

    def add(self, peer: Peer, close: Callable[[], object] | None) -> Connection | None:
        """Notes a new connection, before which room is made for it.

        Returns:
            None if there may be none more, of this address or at all; the caller closes it.
        """
        exempt, address = self._addresses.trusted(peer[0]), self._addresses.client(peer[0])
        full = not exempt and self._counts[address] >= self._most_per_address
        if full and not self._close_idle("address", self._most_per_address, address):
            self._note("address")
            return None
        if len(self) >= self.most and not self.make_room():
            self._note("descriptors")
            return None
        if (before := self._connections.get(peer)) is not None:
            self.remove(peer, before)
        connection = self._connections[peer] = Connection(address, exempt, close)
        self._live += 1
        if not exempt:
            self._counts[address] += 1
        return connection

    def remove(self, peer: Peer, connection: Connection) -> None:
        """Forgets an ended connection. Its client may already have another one with the same address and port."""
        if self._connections.get(peer) is connection:
            del self._connections[peer]
        if not connection.closing:
            connection.closing = True
            self._uncount(connection)

    def sweep(self) -> None:
        """Closes the connections whose time is over."""
        now = time.monotonic()
        for connection in list(self._connections.values()):
            reason, at = connection.state(self._deadlines)
            if at <= now:
                self._close(connection, reason)
        self._log(now)

    def make_room(self) -> int:
        """Closes some connections that are not busy; returns how many."""
        return self._close_idle("descriptors", min(len(self), self.most))

    def _close_idle(self, reason: Reason, most: int, address: str | None = None) -> int:
        """Closes 1 / ROOM_SHARE of `most` connections, as far as they are not busy; returns how many.

        Args:
            address: closes only those of this address, as limits count it.
        """
        known = (each for each in self._connections.values() if address is None or each.address == address)
        idle = [each for each in known if not each.busy and not each.closing and each.close]
        idle.sort(key=lambda each: (each.exempt, each.served, each.since))
        chosen = idle[: max(1, most // ROOM_SHARE)]
        for connection in chosen:
            self._close(connection, reason)
        return len(chosen)

    def _close(self, connection: Connection, reason: Reason) -> None:
        if connection.close is None or connection.closing:
            return
        connection.closing = True
        self._uncount(connection)
        self._note(reason)
        connection.close()

    def _uncount(self, connection: Connection) -> None:
        self._live -= 1
        if not connection.exempt:
            self._counts[connection.address] -= 1
            if not self._counts[connection.address]:
                del self._counts[connection.address]

    def _note(self, reason: Reason) -> None:
        self._closed(self._face, reason)
        if reason != "idle":
            self._unlogged[reason] += 1

    def _log(self, now: float) -> None:
        if self._unlogged and now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            logger.warning("connections closed", extra={"face": self._face, "reasons": dict(self._unlogged)})
            self._unlogged.clear()


def peer_of(host: str, port: int) -> Peer:
    """A connection's other end, however its address is written."""
    return str(parse(host) or host), port
