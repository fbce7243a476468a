"""A prefill worker: `WorkerServer` with the prefill role."""

from collections.abc import Callable

from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.prefill_worker.role import PrefillRole
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.server import WorkerServer


def prefill_server(config: WorkerConfig, observer: Callable[[Load], None] | None = None) -> WorkerServer:
    """A server of one prefill worker, not started yet; `observer` gets its load at every heartbeat."""
    return WorkerServer(config, PrefillRole, observer)
