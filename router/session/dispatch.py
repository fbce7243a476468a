"""The parts of a router that all of its sessions share."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvrelay.router.config import RouterConfig, Service
from kvrelay.router.placing.placing import Placing
from kvrelay.router.records.metrics import RouterMetrics
from kvrelay.router.session.budget import RetryBudget
from kvrelay.router.session.pacer import Pacer
from kvrelay.router.shares import Turns
from kvrelay.router.text.detokenizer import TokenBytes


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The parts of a router that all of its sessions share."""

    config: RouterConfig
    services: Mapping[str, Service]
    """Classes of service by name."""
    placing: Placing
    pacer: Pacer
    budget: RetryBudget
    token_bytes: TokenBytes
    metrics: RouterMetrics
    turns: Turns = field(default_factory=Turns)
    """Turns of work that takes the event loop for long, by holder."""
    clock: Callable[[], float] = time.monotonic
    """The router's clock in seconds, that of all its parts. The event loop's timers run at the same rate."""
