"""A decode worker in the foreground: `python -m kvrelay.decode_worker --config FILE`."""

import sys

from kvrelay.decode_worker.role import DecodeRole
from kvrelay.worker.server import run_worker

if __name__ == "__main__":
    sys.exit(run_worker({"decode": DecodeRole}))
