"""Runs the supervisor in the foreground: `python -m kvrelay.cluster.supervisor --config FILE`."""

import sys

from kvrelay.cluster.supervisor.supervisor import ALL_STOP_SECONDS, SupervisorConfig, SupervisorServer
from kvrelay.rpc.serve import main

if __name__ == "__main__":
    sys.exit(main(SupervisorConfig, SupervisorServer, "A kvrelay supervisor, in the foreground.", ALL_STOP_SECONDS))
