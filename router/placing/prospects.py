"""When a request that comes now would be served: by what the policy predicts of it, and of those that go before it.

    receipt |-- queue --|-- wait --|-- compute --| first token
             those before it in the router's queue
                        prompts that its worker has yet to compute
                                    its own prompt

The policy predicts for a request that is placed now, hence `wait` and `compute`. Those in the queue are computed side
by side by all workers that compute prompts, each as long as the policy predicts for one of their length of which
nothing is cached. Prefix caches, other routers, and requests that come later and go first make the real queue shorter
or longer: a factor follows the latest waits. If decode workers have no room, the queue moves as fast as requests end.

A refused request is told the time in which what is before it is done. While as much comes as is served, that doesn't
shrink: then an equal request is thought to be in time after about as long as none has been until now. So a client that
follows these delays asks less and less often.
"""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvrelay.costs.predict import Predicted
from kvrelay.router.config import Service
from kvrelay.router.placing.placement import Demand, WorkerView
from kvrelay.router.placing.queue import Claim, PlacementQueue
from kvrelay.router.placing.usual import MOST_RETRY_SECONDS, CompletionRate
from kvrelay.rpc.identity import WorkerRole

FOLLOW_SECONDS = 10.0
"""Predicted seconds of waits after which an older wait counts 1/e in the factor."""
MOST_FACTOR = 10.0
"""Largest factor between a predicted wait and the real one; the smallest is 1 divided by it."""
LEAST_DELAY_SECONDS = 0.1
"""Shortest delay that a refused request is told: some steps of its workers, which report as often."""
TICK_SECONDS = 0.1
"""Seconds of which the shortest time before a request is remembered."""
TREND_TICKS, SHRUNK = 30, 0.8
"""Ticks within which the time before requests must have become less than this share of what it was if it is thought to
go on shrinking."""


class Predictor(Protocol):
    """The part of a policy that is used here."""

    def predict(self, demand: Demand, workers: Sequence[WorkerView]) -> Predicted | None:
        """Latencies of a request that is placed now; None if they aren't known."""

    def waits_for(self, demand: Demand, workers: Sequence[WorkerView]) -> WorkerRole:
        """The role whose workers a request waits for that finds no capacity now."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """Prospects of a request that comes now. Times are in seconds."""

    queue: float
    """Time in the router's queue."""
    wait: float
    """Time at its worker before its prompt is computed."""
    compute: float
    """Time of computing its prompt."""
    tpot: float
    """Mean time between two of its tokens."""
    decoding: int = 0
    """Requests of this router that are at workers which decode."""
    end: float = math.inf
    """Mean time between the ends of two requests."""
    alone: bool = False
    """Whether there is no other request in the cluster. It has no better prospect later."""
    crowded: float = 0.0
    """Time for which no equal request would have been in time; 0 while what is before it shrinks."""
    unscaled: float = 0.0
    """The part of `queue` that is predicted, without the factor that follows real waits."""

    def late(self, service: Service, elapsed: float) -> bool:
        """Whether it will miss a target of its class; never if it is alone.

        Args:
            elapsed: seconds since its receipt.
        """
        first = elapsed + self.queue + self.wait + self.compute
        return not self.alone and (first > service.ttft_seconds or self.tpot > service.tpot_seconds)

    def delay(self, service: Service) -> float:
        """Seconds after which an equal request would meet the targets of its class, or would have nothing before it."""
        before = self.queue + self.wait
        late = before + self.compute - service.ttft_seconds
        delay = max(min(before, late), self.crowded if late > 0.0 else 0.0)
        if self.tpot > service.tpot_seconds and self.end < math.inf:
            # A step's time falls with the number of requests that decode, at most in proportion.
            delay = max(delay, (1 - service.tpot_seconds / self.tpot) * self.decoding * self.end)
        return max(LEAST_DELAY_SECONDS, delay)


@dataclass(slots=True)
class _Before:
    """Times that were before requests of one rank, whoever sent them."""

    ticks: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=int(MOST_RETRY_SECONDS / TICK_SECONDS))
    )
    """(begin, shortest time before a request) of the latest TICK_SECONDS in which there was one, in seconds."""

    def note(self, seconds: float, now: float) -> None:
        """A request has so many seconds before it."""
        if self.ticks and now < self.ticks[-1][0] + TICK_SECONDS:
            began, least = self.ticks.pop()
            self.ticks.append((began, min(least, seconds)))
        else:
            self.ticks.append((now, seconds))

    def crowded(self, most: float, now: float) -> float:
        """Seconds for which there were always more than `most` before requests; 0 while they become less."""
        latest, earlier = self.ticks[-1][1], self.ticks[max(0, len(self.ticks) - TREND_TICKS)][1]
        if latest <= SHRUNK * earlier:
            return 0.0
        since = next((began for began, seconds in reversed(self.ticks) if seconds <= most), self.ticks[0][0])
        return min(MOST_RETRY_SECONDS, now - since)


class Prospects:
    """Tells prospects, by the workers' state now. On the event loop."""

    def __init__(
        self,
        queue: PlacementQueue,
        policy: Predictor,
        workers: Callable[[], Sequence[WorkerView]],
        rate: CompletionRate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            workers: their state now.
            clock: the router's.
        """
        self._clock = clock
        self._before: defaultdict[int, _Before] = defaultdict(_Before)
        """By the rank of a class."""
        self._queue, self._policy, self._workers, self._rate = queue, policy, workers, rate
        self._predicted = self._waited = 1.0
        """Seconds of the latest waits, as predicted and as they were; older ones count less."""

    def of(self, demand: Demand, claim: Claim) -> Prospect | None:
        """The prospect of a request; None if the policy doesn't know."""
        workers = self._workers()
        whole = self._policy.predict(demand, workers)
        least = self._policy.predict(replace(demand, prompt_tokens=1, chain=()), workers)
        if whole is None or least is None:
            return None
        ahead = self._queue.ahead(claim)
        queue, unscaled = self._queue_seconds(ahead, demand, workers, least)
        wait = min(whole.ttft, least.ttft)
        compute, service, now = whole.ttft - wait, claim.service, self._clock()
        before, most = self._before[service.rank], service.ttft_seconds - compute
        before.note(queue + wait, now)
        return Prospect(
            queue,
            wait,
            compute,
            whole.tpot,
            sum(worker.requests for worker in workers if worker.role != "prefill"),
            self._rate.seconds(1) or math.inf,
            not ahead and not any(worker.running or worker.requests or worker.pending_tokens for worker in workers),
            before.crowded(most, now) if queue + wait > most else 0.0,
            unscaled,
        )

    def room_seconds(self) -> float | None:
        """Seconds until those that wait now have their places; None if the policy doesn't know, or nobody waits."""
        ahead, workers = self._queue.demands(), self._workers()
        least = self._policy.predict(replace(ahead[0], prompt_tokens=1, chain=()), workers) if ahead else None
        return None if least is None else self._queue_seconds(ahead, ahead[0], workers, least)[0]

    def learn(self, prospect: Prospect, waited: float) -> None:
        """A request with this prospect has got its place after so many seconds in the queue."""
        if prospect.unscaled > 0.0:
            keep = math.exp(-prospect.unscaled / FOLLOW_SECONDS)
            self._predicted = keep * self._predicted + prospect.unscaled
            self._waited = keep * self._waited + waited

    @property
    def factor(self) -> float:
        """Real waits divided by the predicted ones."""
        return min(MOST_FACTOR, max(1 / MOST_FACTOR, self._waited / self._predicted))

    def _queue_seconds(
        self, ahead: Sequence[Demand], demand: Demand, workers: Sequence[WorkerView], least: Predicted
    ) -> tuple[float, float]:
        """Seconds until those in `ahead` have their places, and the part that is predicted, without the factor.

        Args:
            demand: of the request behind them.
            least: prediction for a prompt of one token.
        """
        unscaled = 0.0
        if ahead:
            mean = sum(each.prompt_tokens for each in ahead) // len(ahead)
            usual = self._policy.predict(replace(ahead[0], prompt_tokens=mean, chain=(), key=0), workers)
            ready = [worker for worker in workers if worker.ready]
            computing = [worker for worker in ready if worker.role != "decode"] or ready
            if usual is not None and computing:
                unscaled = len(ahead) * max(0.0, usual.ttft - least.ttft) / len(computing)
        seconds = self.factor * unscaled
        if self._policy.waits_for(ahead[0] if ahead else demand, workers) == "decode":
            seconds = max(seconds, self._rate.seconds(len(ahead) + 1) or 0.0)
        return seconds, unscaled
