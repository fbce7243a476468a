"""A worker, of either role, whose steps last as long as on a GPU: the product's, on a model of the tests.

    python -m paced_worker --config FILE

With the environment variable PACE_SECONDS a step lasts so long, and computes nothing. Without it, a step lasts as long
as the cost table of `ratio_simulator.py` says, and computes the hash model: tokens depend on every byte of KV, so a
wrong one would show.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ratio_simulator import A100_OPT_66B, BLOCK

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

PACE = "PACE_SECONDS"
TABLE = A100_OPT_66B
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, block_size=BLOCK, dtype="float32")
"""Layout with 64 bytes a token, so that two cores can compute what eight workers have in their pools."""
MAX_CONTEXT = 4096
LETTER = 66
"""The token of all steps that compute nothing; it has a text of its own in the vocabulary of `pico`."""


class PacedRunner(HashRunner):
    """Computes a step, and waits until it has lasted as long as it would on the GPU."""

    def run(self, plan: StepPlan) -> StepOutput:
        began = time.monotonic()
        output = super().run(plan)
        rows = list(zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True))
        chunks = [(start, length) for start, length in rows if length > 1]
        seconds = TABLE.seconds(chunks, [start + 1 for start, length in rows if length == 1])
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        return output


class SteadyRunner(HashRunner):
    """Runner that takes a step every `pace` seconds, whatever else the worker does; late steps are made up."""

    pace = float(os.environ.get(PACE, "0"))
    due = 0.0

    def run(self, plan: StepPlan) -> StepOutput:
        self.due = max(self.due + self.pace, time.monotonic() - self.pace)
        time.sleep(max(0.0, self.due - time.monotonic()))
        return StepOutput(tuple(LETTER if sample else None for sample in plan.sample))


def build(folder: Path, dtype: Dtype, config: EngineConfig, loaded: Callable[[float], None]) -> tuple[Engine, Runner]:
    """Makes the paced engine, in place of a checkpoint's."""
    blocks = config.kv_memory_bytes // LAYOUT.block_bytes if config.kv_memory_bytes else TABLE.kv_tokens // BLOCK
    runner = (SteadyRunner if SteadyRunner.pace else PacedRunner)(blocks, LAYOUT, hash_spec(MAX_CONTEXT))
    loaded(1.0)
    return engine_on(runner, config.on("cpu")), runner


def server(config: WorkerConfig) -> WorkerServer:
    return WorkerServer(config, {"prefill": PrefillRole, "decode": DecodeRole}, build=build)


if __name__ == "__main__":
    sys.exit(main(WorkerConfig, server, "A worker whose steps last as long as on a GPU."))
