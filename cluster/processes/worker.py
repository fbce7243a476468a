"""A worker of any role, which can take another one while it runs.

python -m kvrelay.cluster.processes.worker --config FILE
"""

import sys

from kvrelay.decode_worker.role import DecodeRole
from kvrelay.prefill_worker.role import PrefillRole
from kvrelay.rpc.identity import WorkerRole
from kvrelay.worker.server import RoleFactory, run_worker
from kvrelay.worker.worker import ColocatedRole

FACTORIES: dict[WorkerRole, RoleFactory] = {"prefill": PrefillRole, "decode": DecodeRole, "colocated": ColocatedRole}

if __name__ == "__main__":
    sys.exit(run_worker(FACTORIES))
