"""A worker of any role, which can take another one while it runs.

python -m kvrelay.cluster.processes.worker --config FILE
"""

import sys

from kvrelay.decode_worker.role import DecodeRole
from kvrelay.prefill_worker.role import PrefillRole
from kvrelay.rpc.identity import WorkerRole
from kvrelay.worker.role import Role
from kvrelay.worker.server import RoleFactory, run_worker

FACTORIES: dict[WorkerRole, RoleFactory] = {"prefill": PrefillRole, "decode": DecodeRole, "colocated": Role}

if __name__ == "__main__":
    sys.exit(run_worker(FACTORIES))
