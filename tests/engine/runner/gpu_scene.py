"""The GPU's runner on CPU tensors, its kernels interpreted, and requests with drawn prompts."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.runner.gpu import GpuRunner, build_gpu_runner
from support.checkpoints import VOCAB_SIZE
from support.launches import Launches, RecordedGraphs

OPTIONS = EngineConfig(
    block_size=16, kv_memory_bytes=2**20, max_batch_tokens=48, max_sequences=3, graph_tokens=0, threads=1
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU")


def gpu_runner(
    folder: Path, options: EngineConfig = OPTIONS, dtype: Dtype = "float32", graphs: RecordedGraphs | None = None
) -> GpuRunner:
    """A runner on CPU tensors. What lies in unused slots must change nothing, so its pool is full of NaN."""
    plain = build_gpu_runner(folder, dtype, options, device="cpu")
    for pool in plain.pools:
        (pool.tensor if pool.scales is None else pool.scales).fill_(torch.nan)
    return (
        plain
        if graphs is None
        else GpuRunner(plain.spec, plain.model, plain.cache_layout, plain.pools, options, capture=graphs)
    )


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB_SIZE), k=length))


def requests_of(*asked: tuple[int, SamplingParams]) -> list[Request]:
    """Requests with prompts of these lengths, each of other tokens."""
    return [Request(str(seed), 1, prompt(length, seed), length, params) for seed, (length, params) in enumerate(asked)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def names_of(launches: Launches) -> Sequence[str]:
    """Names of the operations that a device is given, in order."""
    return [launch.name for launch in launches.all if launch.on_device]
