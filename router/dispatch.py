"""What all sessions of a router share."""

from dataclasses import dataclass, field

from kvrelay.router.budget import RetryBudget
from kvrelay.router.config import RouterConfig
from kvrelay.router.detokenizer import TokenBytes
from kvrelay.router.errors import Exhausted
from kvrelay.router.health import FleetHealth
from kvrelay.router.metrics import RouterMetrics
from kvrelay.router.pacer import Pacer
from kvrelay.router.placement import Demand, LeastWork
from kvrelay.router.queue import PlacementQueue
from kvrelay.router.registry import WorkerRegistry
from kvrelay.router.usual import CompletionRate, UsualLengths
from kvrelay.router.waiting import reason


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The parts of a router that all of its sessions share."""

    config: RouterConfig
    registry: WorkerRegistry
    queue: PlacementQueue
    trials: PlacementQueue
    """Of suspects that wait for workers without another one (`router/suspects.py`)."""
    policy: LeastWork
    pacer: Pacer
    health: FleetHealth
    budget: RetryBudget
    token_bytes: TokenBytes
    metrics: RouterMetrics
    lengths: UsualLengths = field(default_factory=UsualLengths)
    """How long completions usually are."""
    rate: CompletionRate = field(default_factory=CompletionRate)

    def full(self, text: str, kind: type[Exhausted] = Exhausted) -> Exhausted:
        """The error of a request that found no room: it says when there may be some."""
        return kind(text, self.rate.retry_seconds(len(self.queue)))

    def why_waiting(self, demand: Demand) -> str:
        """What keeps a request from being placed now, in words."""
        return reason(demand, self.registry.view(), self.config.prefill_ahead_tokens)
