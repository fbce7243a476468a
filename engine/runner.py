"""The runner: one step's plan in, one step's tokens out. Owns the model, the KV pool and the attention backend."""

import os
import threading
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.attention.cpu import CpuAttention
from kvrelay.engine.attention.cpu_native import NativeAttention, supports
from kvrelay.engine.attention.protocol import Attention
from kvrelay.engine.attention.watched import WatchedAttention
from kvrelay.engine.batch import ForwardBatch
from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.engine.kv.layout import KVDtype, KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.layers import LayerWatch
from kvrelay.engine.models.checkpoint import Checkpoint
from kvrelay.engine.models.config import ModelConfig, read_config
from kvrelay.engine.models.loader import Progress, load_model, load_weights
from kvrelay.engine.models.native import NativeDecoder, fits
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampling.sampler import Draw, sample
from kvrelay.kernels.cpu import ops
from kvrelay.kernels.cpu.library import library
from kvrelay.kernels.cpu.packed import packer
from kvrelay.kernels.cpu.program import Team

__all__ = ["CpuRunner", "ForwardBatch", "Runner", "build_runner"]


class Runner(Protocol):
    """What an engine needs to know of a model on a device."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def layout(self) -> KVLayout: ...

    @property
    def pool(self) -> KVPool: ...

    def warm_up(self) -> None:
        """Runs what makes first steps slow, before there are sequences."""

    def run(self, plan: StepPlan) -> StepOutput:
        """Computes the plan's tokens, writes their KV and samples where asked."""
        ...


class Model(Protocol):
    """What a runner needs of a model; `Decoder` has the docstrings."""

    def forward(self, batch: ForwardBatch, attention: Attention) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]: ...


class CpuRunner:
    """Implements `Runner` with a decoder. Not thread-safe."""

    def __init__(self, spec: ModelSpec, model: Model, pool: KVPool, attention: Attention, threads: int) -> None:
        """
        Args:
            threads: of torch's, for a step.
        """
        self.spec = spec
        self.pool = pool
        self.model = model
        self.attention = attention
        self.watch: LayerWatch | None = None
        """Told of layers whose KV is written while a step runs."""
        self._threads = threads
        self._thread: int | None = None

    @property
    def layout(self) -> KVLayout:
        return self.pool.layout

    def run(self, plan: StepPlan) -> StepOutput:
        """See `Runner.run`."""
        self._set_threads()
        rows = np.flatnonzero(plan.sample)
        with torch.inference_mode():
            batch = ForwardBatch.from_plan(plan)
            self.attention.plan(batch)
            hidden = self.model.forward(batch, self._watched(plan))
            if not len(rows):
                return StepOutput((None,) * plan.num_rows)
            logits = self.model.logits(hidden[torch.from_numpy(batch.last[rows])])
            ends = plan.starts + plan.lengths
            draws = [Draw(plan.sampling[row], int(ends[row]), int(plan.generated[row])) for row in rows]
            chosen, nonfinite = sample(logits, draws, self.model.largest)
        tokens: list[int | None] = [None] * plan.num_rows
        for row, token in zip(rows, chosen, strict=True):
            tokens[row] = token
        return StepOutput(tuple(tokens), tuple([int(rows[index]) for index in nonfinite]))

    def _watched(self, plan: StepPlan) -> Attention:
        borders = () if self.watch is None else self.watch.borders(plan)
        if self.watch is None or not borders:
            return self.attention
        return WatchedAttention(self.attention, borders, partial(self.watch.passed, plan))

    def warm_up(self) -> None:
        """Runs a few shapes, so that the first request finds code and buffers ready. Overwrites KV blocks."""
        capacity = min(self.pool.num_blocks * self.layout.block_size, self.spec.max_context)
        for step, length in enumerate((1, 8, 64, 256)):
            if length < capacity:
                self.run(self._warm_up_plan(2 * step, 0, length))
                self.run(self._warm_up_plan(2 * step + 1, length, 1))

    def _warm_up_plan(self, step: int, start: int, length: int) -> StepPlan:
        blocks = self.layout.blocks_for(start + length)
        return StepPlan(
            step=step,
            handles=(0,),
            tokens=np.zeros(length, np.int32),
            starts=np.array([start], np.int32),
            lengths=np.array([length], np.int32),
            block_tables=np.arange(blocks, dtype=np.int32)[None],
            sample=np.array([True]),
            sampling=(SamplingParams(temperature=float(step % 2)),),
            generated=np.zeros(1, np.int32),
        )

    def _set_threads(self) -> None:
        """torch keeps the number of threads per calling thread, so whichever thread runs steps must set its own."""
        if self._thread != threading.get_ident():
            torch.set_num_threads(self._threads)
            self._thread = threading.get_ident()


def build_runner(model_path: Path, dtype: Dtype, config: EngineConfig, progress: Progress | None = None) -> CpuRunner:
    """Loads the checkpoint in folder `model_path` and allocates its KV pool, on CPU.

    Args:
        dtype: of weights and KV; auto takes the checkpoint's, unless that is float16, which is slow on CPU.
        progress: told the share of the weights that is loaded, 0 to 1.

    Raises:
        ValueError: the checkpoint or an option can't be used; the text says which and why.
    """
    model_config = read_config(model_path)
    checkpoint = Checkpoint(model_path)
    kv_dtype = _run_dtype(dtype, model_config)
    layout = KVLayout(
        layers=model_config.layers,
        kv_heads=model_config.kv_heads,
        head_dim=model_config.head_dim,
        block_size=config.block_size,
        dtype=kv_dtype,
    )
    num_blocks = layout.blocks_in(config.kv_memory_bytes)
    max_context = min(
        model_config.max_positions,
        config.max_context or model_config.max_positions,
        num_blocks * config.block_size,
    )
    pool = KVPool(layout, num_blocks)
    windows = tuple(window if window < max_context else 0 for window in model_config.traits.windows)
    threads = config.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    model, attention = _load(checkpoint, model_config, pool, windows, threads, progress)
    if isinstance(model, NativeDecoder):
        # torch has little left to do, and its threads, which spin for a while after each bit of it, would keep the
        # cores from the kernels' own.
        threads = 1
        torch.set_num_threads(threads)
    spec = ModelSpec(
        name=model_path.resolve().name,
        architecture=model_config.architecture,
        vocab_size=model_config.vocab_size,
        max_context=max_context,
        eos_token_ids=model_config.eos_token_ids,
        dtype=kv_dtype,
        fingerprint=checkpoint.fingerprint(),
    )
    return CpuRunner(spec, model, pool, attention, threads)


@torch.inference_mode()
def _load(
    checkpoint: Checkpoint,
    config: ModelConfig,
    pool: KVPool,
    windows: tuple[int, ...],
    threads: int,
    progress: Progress | None,
) -> tuple[Model, Attention]:
    """On the native kernels where they can be had for this model, else on torch's."""
    dtype = pool.tensor.dtype
    kernels = library() if supports(dtype) and fits(config) else None
    if kernels is None:
        return load_model(checkpoint, config, dtype, ops, progress), CpuAttention(pool, windows)
    team = Team(kernels, threads)
    weights = load_weights(checkpoint, config, dtype, packer(team), progress)
    attention = NativeAttention(pool, windows, config.heads, team)
    return NativeDecoder(config, weights, attention, team), attention


def _run_dtype(dtype: Dtype, config: ModelConfig) -> KVDtype:
    if dtype != "auto":
        return dtype
    return "float32" if config.dtype == "float16" else config.dtype
