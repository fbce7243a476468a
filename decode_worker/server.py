"""A decode worker: `WorkerServer` with the decode role."""

from collections.abc import Callable

from kvrelay.decode_worker.role import DecodeRole
from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.server import WorkerServer


def decode_server(config: WorkerConfig, observer: Callable[[Load], None] | None = None) -> WorkerServer:
    """A server of one decode worker, not started yet; `observer` gets its load at every heartbeat."""
    return WorkerServer(config, DecodeRole, observer)
