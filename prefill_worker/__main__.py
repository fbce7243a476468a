"""A prefill worker in the foreground: `python -m kvrelay.prefill_worker --config FILE`."""

import sys

from kvrelay.prefill_worker.server import prefill_server
from kvrelay.rpc.serve import main
from kvrelay.worker.config import WorkerConfig

if __name__ == "__main__":
    sys.exit(main(WorkerConfig, prefill_server, "A kvrelay prefill worker, in the foreground."))
