"""A prefill worker in the foreground: `python -m kvrelay.prefill_worker --config FILE`."""

import sys

from kvrelay.prefill_worker.role import PrefillRole
from kvrelay.worker.server import run_worker

if __name__ == "__main__":
    sys.exit(run_worker({"prefill": PrefillRole}))
