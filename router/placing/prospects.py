"""When a request that comes now would be served: by what the policy predicts of it, and of those that go before it.

    receipt |-- queue --|-- wait --|-- compute --| first token
             those before it in the router's queue
                        prompts that its worker has yet to compute
                                    its own prompt

The policy predicts for a request that is placed now, hence `wait` and `compute`. Those in the queue are computed side
by side by all workers that compute prompts, each as long as the policy predicts for one of their length of which
nothing is cached. Prefix caches, other routers, and requests that come later and go first make the real queue shorter
or longer: a factor follows the latest waits. If decode workers have no room, the queue moves as fast as requests end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvrelay.costs.predict import Predicted
from kvrelay.router.config import Service
from kvrelay.router.placing.placement import Demand, WorkerView
from kvrelay.router.placing.queue import Claim, PlacementQueue
from kvrelay.router.placing.usual import CompletionRate
from kvrelay.rpc.identity import WorkerRole

FOLLOW_SECONDS = 10.0
"""Predicted seconds of waits after which an older wait counts 1/e in the factor."""
MOST_FACTOR = 10.0
"""Largest factor between a predicted wait and the real one; the smallest is 1 divided by it."""
LEAST_DELAY_SECONDS = 0.001
"""Shortest delay that a refused request is told."""


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
        delay = min(before, before + self.compute - service.ttft_seconds)
        if self.tpot > service.tpot_seconds and self.end < math.inf:
            # A step's time falls with the number of requests that decode, at most in proportion.
            delay = max(delay, (1 - service.tpot_seconds / self.tpot) * self.decoding * self.end)
        return max(LEAST_DELAY_SECONDS, delay)


class Prospects:
    """Tells prospects, by the workers' state now. On the event loop."""

    def __init__(
        self,
        queue: PlacementQueue,
        policy: Predictor,
        workers: Callable[[], Sequence[WorkerView]],
        rate: CompletionRate,
    ) -> None:
        """`workers`: their state now."""
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
        return Prospect(
            queue,
            wait,
            whole.ttft - wait,
            whole.tpot,
            sum(worker.requests for worker in workers if worker.role != "prefill"),
            self._rate.seconds(1) or math.inf,
            not ahead and not any(worker.running or worker.requests or worker.pending_tokens for worker in workers),
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
