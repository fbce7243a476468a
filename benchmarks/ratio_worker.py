"""A worker of `ratio.py`: the hash model of the tests, whose steps last as long as the cost table says.

    python -m ratio_worker --config FILE

It can have either role. Tokens depend on every byte of KV, so a wrong one would show.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from ratio_simulator import A100_OPT_66B, BLOCK, CostTable

from kvrelay.decode_worker.role import DecodeRole
from kvrelay.engine.build import engine_on
from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.runner.base import Runner
from kvrelay.prefill_worker.role import PrefillRole
from kvrelay.rpc.serve import main
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.server import WorkerServer
from support.hash_runner import HashRunner, hash_spec

TABLE = A100_OPT_66B
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, block_size=BLOCK, dtype="float32")
"""Layout with 64 bytes a token, so that two cores can compute what eight workers have in their pools."""
MAX_CONTEXT = 4096


class PacedRunner(HashRunner):
    """Computes a step, and waits until it has lasted as long as it would on the GPU."""

    def __init__(self, table: CostTable) -> None:
        super().__init__(table.kv_tokens // BLOCK, LAYOUT, hash_spec(MAX_CONTEXT))
        self._table = table

    def run(self, plan: StepPlan) -> StepOutput:
        began = time.monotonic()
        output = super().run(plan)
        time.sleep(max(0.0, began + self._seconds(plan) - time.monotonic()))
        return output

    def _seconds(self, plan: StepPlan) -> float:
        chunks = plan.lengths[plan.lengths > 1].tolist()
        rows = plan.lengths == 1
        seconds = self._table.prefill(chunks) if chunks else 0.0
        if rows.any():
            seconds += self._table.decode(int(rows.sum()), int((plan.starts + 1)[rows].sum()))
        return seconds


def build(folder: Path, dtype: Dtype, config: EngineConfig, loaded: Callable[[float], None]) -> tuple[Engine, Runner]:
    """Takes the place of the engine that a checkpoint would have."""
    runner = PacedRunner(TABLE)
    loaded(1.0)
    return engine_on(runner, config.on("cpu")), runner


def server(config: WorkerConfig) -> WorkerServer:
    return WorkerServer(config, {"prefill": PrefillRole, "decode": DecodeRole}, build=build)


if __name__ == "__main__":
    sys.exit(main(WorkerConfig, server, "A worker whose steps last as long as a cost table says."))
