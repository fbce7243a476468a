"""A worker that runs the hash model: `python -m support.hash_worker --config FILE`, of either role.

The environment variable HASH_STEP_SECONDS makes each step of the engine take at least that long, so that a fault can
hit while something is under way.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvrelay.decode_worker.role import DecodeRole
from kvrelay.engine.build import engine_on
from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.runner import Runner
from kvrelay.prefill_worker.role import PrefillRole
from kvrelay.rpc.serve import main
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.server import WorkerServer
from support.hash_runner import HashRunner, hash_spec

MODULE = "support.hash_worker"
STEP_SECONDS = "HASH_STEP_SECONDS"
MAX_CONTEXT = 4096
# 1 KiB a token, so that a chunk's frame has a size that a link takes time for.
WORKER_LAYOUT = KVLayout(layers=2, kv_heads=4, head_dim=16, block_size=8, dtype="float32")
ROLES = {"prefill": PrefillRole, "decode": DecodeRole}


class SlowHashRunner(HashRunner):
    """A hash runner whose steps take a while."""

    step_seconds = 0.0

    def run(self, plan: StepPlan) -> StepOutput:
        time.sleep(self.step_seconds)
        return super().run(plan)


def build(folder: Path, dtype: Dtype, config: EngineConfig, loaded: Callable[[float], None]) -> tuple[Engine, Runner]:
    """As `build_engine`, of the hash model; its block size is the config's."""
    runner = SlowHashRunner(config.kv_memory_bytes // WORKER_LAYOUT.block_bytes, WORKER_LAYOUT, hash_spec(MAX_CONTEXT))
    runner.step_seconds = float(os.environ.get(STEP_SECONDS, "0"))
    loaded(1.0)
    return engine_on(runner, config), runner


def hash_server(config: WorkerConfig) -> WorkerServer:
    return WorkerServer(config, ROLES[config.role], build=build)


if __name__ == "__main__":
    sys.exit(main(WorkerConfig, hash_server, "A kvrelay worker that runs the hash model."))
