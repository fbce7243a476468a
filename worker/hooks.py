"""How a worker reaches the process around it."""

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.worker.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class WorkerHooks:
    """`failed` may be called on any thread."""

    load_changed: Callable[[], None]
    """Blocks were freed: send a heartbeat now."""
    failed: Callable[[BaseException], None]
    """The worker can't go on."""
    metrics: WorkerMetrics
