"""Puts an engine together from a checkpoint."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv.blocks import BlockPool
from kvrelay.engine.kv.prefix import PrefixIndex
from kvrelay.engine.runner import ModelRunner, Runner, build_runner
from kvrelay.engine.scheduler import Scheduler


def build_engine(
    model: Path, dtype: Dtype, config: EngineConfig, progress: Callable[[float], None] | None = None
) -> tuple[Engine, ModelRunner]:
    """An engine on the checkpoint in folder `model`, and its runner. `progress` gets the loaded share, 0 to 1.

    Raises:
        ValueError: the checkpoint or an option can't be used; the text says which and why.
    """
    runner = build_runner(model, dtype, config, progress)
    return engine_on(runner, config), runner


def engine_on(runner: Runner, config: EngineConfig) -> Engine:
    """An engine whose steps `runner` runs."""
    pool = BlockPool(runner.pool.num_blocks)
    prefix = None
    if config.prefix_cache:
        namespace = hashlib.sha256(f"{runner.spec.fingerprint} {runner.layout}".encode()).digest()
        prefix = PrefixIndex(pool, config.block_size, namespace)
    return Engine(Scheduler(config, pool, prefix, runner.spec.max_context), runner)
