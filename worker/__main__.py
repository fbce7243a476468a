"""A co-located worker in the foreground: `python -m kvrelay.worker --config FILE`."""

import sys

from kvrelay.worker.server import run_worker

if __name__ == "__main__":
    sys.exit(run_worker())
