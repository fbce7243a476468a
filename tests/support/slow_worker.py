"""A co-located worker whose model never finishes loading: `python -m support.slow_worker --config FILE`."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.runner.base import Runner
from kvrelay.rpc.serve import main
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.server import WorkerServer


def build(folder: Path, dtype: Dtype, config: EngineConfig, loaded: Callable[[float], None]) -> tuple[Engine, Runner]:
    """Replaces `build_engine`."""
    loaded(0.5)
    print("loading", file=sys.stderr, flush=True)
    time.sleep(600)
    raise RuntimeError("loaded after all")


if __name__ == "__main__":
    sys.exit(main(WorkerConfig, lambda config: WorkerServer(config, build=build), "A worker that never gets ready."))
