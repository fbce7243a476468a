"""A decode worker: `WorkerServer` with the decode role."""

from kvrelay.decode_worker.role import DecodeRole
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.server import WorkerServer


def decode_server(config: WorkerConfig) -> WorkerServer:
    """A server of one decode worker, not started yet."""
    return WorkerServer(config, DecodeRole)
