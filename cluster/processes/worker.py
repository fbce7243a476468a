"""A worker of any role, which can take another one while it runs.

python -m kvrelay.cluster.processes.worker --config FILE
"""

import sys

from kvrelay.decode_worker.role import DecodeRole
from kvrelay.prefill_worker.role import PrefillRole
from kvrelay.rpc.names import WorkerRole
from kvrelay.rpc.serve import main
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.role import Role
from kvrelay.worker.server import RoleFactory, WorkerServer

ROLES: dict[WorkerRole, RoleFactory] = {"prefill": PrefillRole, "decode": DecodeRole, "colocated": Role}


def worker_server(config: WorkerConfig) -> WorkerServer:
    """A server of one worker, not started yet.

    Raises:
        ValueError: there is no join token, or a certificate can't be used.
    """
    return WorkerServer(config, ROLES)


if __name__ == "__main__":
    sys.exit(main(WorkerConfig, worker_server, "A kvrelay worker of any role, in the foreground."))
