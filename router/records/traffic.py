"""The figures about requests that a router tells the supervisor, so that it can fit the workers' roles to them.

Requests are looked at once a heartbeat, so nothing here costs anything per token.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from kvrelay.internal.v1.worker_pb2 import Traffic
from kvrelay.router.config import INTERACTIVE, Service
from kvrelay.router.placing.placement import Demand
from kvrelay.router.trace import Outcome, RequestTrace
from kvrelay.rpc.identity import WorkerRole

YOUNG_SECONDS = 4.0
"""Seconds since its first token for which a request shows how long new requests are."""
FAILURES: tuple[Outcome, ...] = ("exhausted", "unavailable", "deadline", "internal")
"""Outcomes by which a request without a first token has missed its target."""


class TrafficMeter:
    """Counts a router's requests of the classes that are as urgent as `interactive`, which scaling looks at. Those of a
    class without targets are compared with the targets of `interactive`. On the event loop."""

    def __init__(self, services: Mapping[str, Service], clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            services: all classes by name.
            clock: the router's.
        """
        self._services, self._clock = services, clock
        self._interactive = services[INTERACTIVE]
        self._totals = Traffic()
        self._waiting: dict[int, RequestTrace] = {}
        """Requests without a first token."""
        self._young: dict[int, RequestTrace] = {}
        """Requests whose first token was sent lately, in the order in which their first tokens were noticed."""
        self._reported = self._clock()

    def _targets(self, trace: RequestTrace) -> Service | None:
        """The class whose targets a request is compared with; None if it isn't counted."""
        service = self._services.get(trace.service, self._interactive)
        if service.rank > self._interactive.rank:
            return None
        return service if service.has_targets else self._interactive

    def begin(self, trace: RequestTrace) -> None:
        """Counts an accepted request. Call it before any other method with the same request."""
        if self._targets(trace) is None:
            return
        self._totals.requests += 1
        self._totals.prompt_tokens += trace.prompt_tokens
        self._waiting[id(trace)] = trace

    def end(self, trace: RequestTrace) -> None:
        """Counts an ended request, if `begin` has counted it."""
        totals, targets = self._totals, self._targets(trace)
        if targets is None:
            return
        if self._waiting.pop(id(trace), None) is not None:
            if trace.first_sent is not None:
                self._count_first(trace)
            elif trace.outcome in FAILURES:
                totals.first_tokens += 1
                return
        if trace.first_sent is None:
            return
        totals.completion_tokens += trace.generated_tokens
        if trace.decode is not None:
            totals.decode_queue_seconds += trace.decode.queue_seconds
        if (seconds := trace.tpot_seconds) is not None:
            totals.streams += 1
            totals.tpot_attained += seconds <= targets.tpot_seconds

    def report(self, queued: Sequence[Demand], waits_for: Callable[[Demand], WorkerRole]) -> Traffic:
        """The figures now.

        Args:
            queued: what the requests in the router's queue need, the next one first; without those that aren't counted.
            waits_for: the role whose workers such a request waits for.
        """
        now = self._clock()
        elapsed, self._reported = now - self._reported, now
        for trace in [trace for trace in self._waiting.values() if trace.first_sent is not None]:
            del self._waiting[id(trace)]
            self._count_first(trace)
        for trace in list(self._young.values()):
            if (trace.first_sent or 0.0) < now - YOUNG_SECONDS:
                del self._young[id(trace)]
        # All queued requests wait for the role that the next one waits for, because it goes first.
        for_decode = bool(queued) and waits_for(queued[0]) == "decode"
        prompts, streams = (0, len(queued)) if for_decode else (len(queued), 0)
        self._totals.prefill_queue_seconds += elapsed * prompts
        self._totals.decode_queue_seconds += elapsed * streams
        traffic = Traffic()
        traffic.CopyFrom(self._totals)
        traffic.young_tokens = sum(trace.generated_tokens for trace in self._young.values())
        traffic.young_ended = sum(trace.ended is not None for trace in self._young.values())
        traffic.queued_prompts, traffic.queued_streams = prompts, streams
        traffic.queued_tokens = sum(demand.prompt_tokens for demand in queued)
        return traffic

    def _count_first(self, trace: RequestTrace) -> None:
        targets = self._targets(trace)
        if targets is None or trace.first_sent is None or trace.resumed_tokens:
            return
        self._young[id(trace)] = trace
        totals, prefill = self._totals, trace.prefill
        seconds = trace.first_sent - trace.received
        on_worker = 0.0 if prefill is None else prefill.queue_seconds
        totals.first_tokens += 1
        totals.ttft_attained += seconds <= targets.ttft_seconds
        totals.unqueued_seconds += max(0.0, seconds - trace.router_queue_seconds - on_worker)
        totals.prefill_queue_seconds += on_worker
        if prefill is not None:
            totals.cached_tokens += min(prefill.cached_tokens, trace.prompt_tokens)
