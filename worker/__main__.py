"""A co-located worker in the foreground: `python -m kvrelay.worker --config FILE`."""

import sys

from kvrelay.rpc.serve import main
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.server import WorkerServer

if __name__ == "__main__":
    sys.exit(
        main(WorkerConfig, WorkerServer, "A kvrelay worker that computes prompts and completions, in the foreground.")
    )
