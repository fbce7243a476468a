"""A decode worker in the foreground: `python -m kvrelay.decode_worker --config FILE`."""

import sys

from kvrelay.decode_worker.server import decode_server
from kvrelay.rpc.serve import main
from kvrelay.worker.config import WorkerConfig

if __name__ == "__main__":
    sys.exit(main(WorkerConfig, decode_server, "A kvrelay decode worker, in the foreground."))
