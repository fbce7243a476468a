"""The parts of a router that all of its sessions share."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvrelay.router.config import RouterConfig, Service
from kvrelay.router.errors import Exhausted
from kvrelay.router.placing.health import FleetHealth
from kvrelay.router.placing.placement import Demand, LeastWork, why_waiting
from kvrelay.router.placing.prospects import Prospects
from kvrelay.router.placing.queue import PlacementQueue
from kvrelay.router.placing.registry import WorkerRegistry
from kvrelay.router.placing.shares import Turns
from kvrelay.router.placing.usual import CompletionRate, UsualLengths
from kvrelay.router.records.metrics import RouterMetrics
from kvrelay.router.session.budget import RetryBudget
from kvrelay.router.session.pacer import Pacer
from kvrelay.router.text.detokenizer import TokenBytes


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The parts of a router that all of its sessions share."""

    config: RouterConfig
    services: Mapping[str, Service]
    """Classes of service by name."""
    registry: WorkerRegistry
    queue: PlacementQueue
    trials: PlacementQueue
    """Queue of suspects that wait for workers without another suspect (`router/session/suspects.py`)."""
    policy: LeastWork
    pacer: Pacer
    health: FleetHealth
    budget: RetryBudget
    token_bytes: TokenBytes
    metrics: RouterMetrics
    prospects: Prospects
    lengths: UsualLengths = field(default_factory=UsualLengths)
    """Usual lengths of completions."""
    rate: CompletionRate = field(default_factory=CompletionRate)
    turns: Turns = field(default_factory=Turns)
    """Turns of work that takes the event loop for long, by holder."""
    clock: Callable[[], float] = time.monotonic
    """The router's clock in seconds, that of all its parts. The event loop's timers run at the same rate."""

    def full(self, text: str, kind: type[Exhausted] = Exhausted) -> Exhausted:
        """The error of a request that found no room: it says when there may be some."""
        return kind(text, self.rate.retry_seconds(len(self.queue), self.prospects.room_seconds()))

    def why_waiting(self, demand: Demand) -> str:
        """The reason, in words, why a request can't be placed now."""
        return why_waiting(demand, self.registry.view(), self.config.prefill_ahead_tokens)
