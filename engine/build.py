"""Puts an engine together from a checkpoint."""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from kvrelay.engine.config import Device, Dtype, EngineConfig
from kvrelay.engine.engine import AsyncRunner, Engine
from kvrelay.engine.kv.blocks import BlockPool
from kvrelay.engine.kv.prefix import PrefixIndex
from kvrelay.engine.runner import Runner, build_runner
from kvrelay.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)


def build_engine(
    model: Path, dtype: Dtype, config: EngineConfig, progress: Callable[[float], None] | None = None
) -> tuple[Engine, Runner]:
    """An engine on the checkpoint in folder `model`, and its runner, on the device that `config` asks for.

    Args:
        progress: gets the loaded share of the weights, 0 to 1.

    Raises:
        ValueError: the checkpoint or an option can't be used; the text says which and why.
    """
    runner: Runner
    if device_of(config.device) == "cuda":
        # Needs Triton, which isn't there on every platform that the CPU's runner works on.
        from kvrelay.engine.gpu_runner import build_gpu_runner

        runner = build_gpu_runner(model, dtype, config, progress)
        logger.info("the engine computes on %s", torch.cuda.get_device_name())
    else:
        runner = build_runner(model, dtype, config, progress)
    return engine_on(runner, config), runner


def device_of(device: Device) -> Device:
    """Of "cpu" and "cuda" what is asked for, or, for auto, a GPU if this process sees one.

    Raises:
        ValueError: a GPU is asked for, and there is none that can be used.
    """
    if device == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if major >= 8:
            return "cuda"
        problem = f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}, and the kernels need 8.0"
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        problem = f"torch {torch.__version__} finds no GPU (CUDA_VISIBLE_DEVICES is {visible!r})"
    if device == "cuda":
        raise ValueError(f"device is 'cuda', but {problem}; allowed: auto, cpu")
    if torch.cuda.is_available():
        logger.warning("the engine computes on the CPU: %s", problem)
    return "cpu"


def engine_on(runner: Runner, config: EngineConfig) -> Engine:
    """An engine whose steps `runner` runs."""
    pool = BlockPool(runner.pool.num_blocks)
    prefix = None
    if config.prefix_cache:
        namespace = hashlib.sha256(f"{runner.spec.fingerprint} {runner.layout}".encode()).digest()
        prefix = PrefixIndex(pool, config.block_size, namespace)
    lag = int(isinstance(runner, AsyncRunner))
    return Engine(Scheduler(config, pool, prefix, runner.spec.max_context, lag), runner)
