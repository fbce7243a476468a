"""The requests that a router has, the latest that it had, and the KV that they have sent over each link."""

import itertools
from collections import deque
from dataclasses import dataclass
from functools import cached_property

from pydantic_core import to_json

from kvrelay.router.records.life import Life, life
from kvrelay.router.request.validation import WIRE_NAME_CHARACTERS
from kvrelay.router.trace import RequestTrace

RECENT = 200
"""Ended requests that are kept."""


@dataclass(frozen=True)
class EndedRequest:
    """A request that has ended."""

    number: int
    """Increases by one with each."""
    trace: RequestTrace

    @cached_property
    def life(self) -> Life:
        """Life of the request, computed on demand: it takes longer than everything else at a request's end, and is
        rarely asked for."""
        return life(self.trace)

    @cached_property
    def json(self) -> bytes:
        """The life as JSON, made once for all viewers."""
        return to_json(self.life)


@dataclass(slots=True)
class LinkUse:
    """The KV that one worker has sent to another since the router started."""

    nbytes: int = 0
    transfers: int = 0


class Requests:
    """Keeps figures only, never a prompt or a completion. On the event loop."""

    def __init__(self) -> None:
        self._running: dict[int, RequestTrace] = {}
        self._recent: deque[EndedRequest] = deque(maxlen=RECENT)
        self._numbers = itertools.count(1)
        self._links: dict[tuple[str, str], LinkUse] = {}

    def begin(self, trace: RequestTrace) -> None:
        """Adds a checked request, which runs from now on."""
        self._running[id(trace)] = trace

    def end(self, trace: RequestTrace) -> None:
        """Moves a request to the ended ones; ignores one that `begin` has not added."""
        if self._running.pop(id(trace), None) is None:
            return
        self._recent.append(EndedRequest(next(self._numbers), trace))
        self._add(self._links, trace)

    def running(self, tenant: str, most: int) -> list[RequestTrace]:
        """A tenant's running requests, the latest last, up to `most` of them."""
        return [trace for trace in self._running.values() if trace.tenant == tenant][-most:]

    def recent(self, tenant: str, after: int = 0) -> list[EndedRequest]:
        """A tenant's requests that have ended, the latest last, with a number above `after`."""
        return [ended for ended in self._recent if ended.trace.tenant == tenant and ended.number > after]

    def lives(self, tenant: str, request_id: str, now: float) -> list[Life]:
        """A tenant's running or kept requests of this name, the client's or the router's; one for each completion.

        Args:
            now: on the monotonic clock.
        """
        # The router makes a client's name unique by what it adds behind a slash, after a cut.
        start = f"{request_id[:WIRE_NAME_CHARACTERS]}/"

        def named(wire_id: str) -> bool:
            return wire_id == request_id or wire_id.startswith((start, f"{request_id}/"))

        ended = [each.life for each in self.recent(tenant) if named(each.trace.wire_id)]
        running = [trace for trace in self._running.values() if trace.tenant == tenant and named(trace.wire_id)]
        return ended + [life(trace, now) for trace in running]

    def links(self) -> dict[tuple[str, str], LinkUse]:
        """The KV that each prefill worker has sent to each decode worker, by their names, running requests included."""
        links = {pair: LinkUse(use.nbytes, use.transfers) for pair, use in self._links.items()}
        for trace in self._running.values():
            self._add(links, trace)
        return links

    def sending(self) -> dict[tuple[str, str], int]:
        """The number of requests that have KV on the way between each two workers now."""
        count: dict[tuple[str, str], int] = {}
        for trace in self._running.values():
            whole = trace.whole
            pair = whole.prefill_worker, whole.decode_worker
            begun = whole.chunks or whole.prefill_at is not None
            if pair[1] and pair[0] != pair[1] and begun and whole.transfer_at is None and whole.decode_at is None:
                count[pair] = count.get(pair, 0) + 1
        return count

    @staticmethod
    def _add(links: dict[tuple[str, str], LinkUse], trace: RequestTrace) -> None:
        for handoff in trace.handoffs:
            use = links.setdefault((handoff.prefill, handoff.decode), LinkUse())
            use.nbytes += handoff.nbytes
            use.transfers += 1
