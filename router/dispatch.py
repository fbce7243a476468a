"""What all sessions of a router share."""

from dataclasses import dataclass

from kvrelay.router.budget import RetryBudget
from kvrelay.router.config import RouterConfig
from kvrelay.router.detokenizer import TokenBytes
from kvrelay.router.health import FleetHealth
from kvrelay.router.pacer import Pacer
from kvrelay.router.placement import LeastWork
from kvrelay.router.queue import PlacementQueue
from kvrelay.router.registry import WorkerRegistry


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The parts of a router that all of its sessions share."""

    config: RouterConfig
    registry: WorkerRegistry
    queue: PlacementQueue
    trials: PlacementQueue
    """Of requests that wait for workers without another suspect on trial (`router/suspects.py`)."""
    policy: LeastWork
    pacer: Pacer
    health: FleetHealth
    budget: RetryBudget
    token_bytes: TokenBytes
