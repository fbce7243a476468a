"""How a worker reaches the process around it."""

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.worker.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class WorkerHooks:
    """Calls by which a worker reaches the process around it. `failed` may be called on any thread."""

    load_changed: Callable[[], None]
    """Called when blocks were freed: sends a heartbeat now."""
    failed: Callable[[BaseException], None]
    """Called when the worker can't go on."""
    metrics: WorkerMetrics
