"""A prefill worker: `WorkerServer` with the prefill role."""

from kvrelay.prefill_worker.role import PrefillRole
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.server import WorkerServer


def prefill_server(config: WorkerConfig) -> WorkerServer:
    """A server of one prefill worker, not started yet."""
    return WorkerServer(config, PrefillRole)
