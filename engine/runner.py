"""The runner: one step's plan in, one step's tokens out. Owns the model, the KV pool and the attention backend."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from kvrelay.engine.attention.cpu import CpuAttention
from kvrelay.engine.attention.protocol import Attention
from kvrelay.engine.batch import ForwardBatch
from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.engine.kv.layout import KVDtype, KVLayout
from kvrelay.engine.kv.pool import TORCH_DTYPES, KVPool
from kvrelay.engine.models.checkpoint import Checkpoint
from kvrelay.engine.models.config import ModelConfig, read_config
from kvrelay.engine.models.decoder import Decoder
from kvrelay.engine.models.loader import load_model
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.plan import RowFailure, StepOutput, StepPlan
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampling.sampler import Draw, sample
from kvrelay.kernels.cpu import ops

__all__ = ["ForwardBatch", "ModelRunner", "Runner", "build_runner"]


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
        """Computes the plan's tokens, writes their KV and samples where asked.

        Raises:
            RowFailure: rows whose logits aren't finite.
        """
        ...


class ModelRunner:
    """Implements `Runner` with a decoder. Not thread-safe."""

    def __init__(self, spec: ModelSpec, model: Decoder, pool: KVPool, attention: Attention, threads: int) -> None:
        """
        Args:
            threads: CPU threads of a step.
        """
        self.spec = spec
        self.pool = pool
        self.model = model
        self.attention = attention
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
            hidden = self.model.forward(batch, self.attention)
            if not len(rows):
                return StepOutput((None,) * plan.num_rows)
            logits = self.model.logits(hidden[torch.from_numpy(batch.last[rows])])
            ends = plan.starts + plan.lengths
            draws = [Draw(plan.sampling[row], int(ends[row]), int(plan.generated[row])) for row in rows]
            chosen, unsound = sample(logits, draws)
        if unsound:
            handles = [plan.handles[rows[index]] for index in unsound]
            raise RowFailure(handles, "the model's logits are not finite")
        tokens: list[int | None] = [None] * plan.num_rows
        for row, token in zip(rows, chosen, strict=True):
            tokens[row] = token
        return StepOutput(tuple(tokens))

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


def build_runner(
    model_path: Path, dtype: Dtype, config: EngineConfig, progress: Callable[[float], None] | None = None
) -> ModelRunner:
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
    threads = config.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    with torch.inference_mode():
        model = load_model(checkpoint, model_config, TORCH_DTYPES[kv_dtype], ops, progress)
    spec = ModelSpec(
        name=model_path.resolve().name,
        architecture=model_config.architecture,
        vocab_size=model_config.vocab_size,
        max_context=max_context,
        eos_token_ids=model_config.eos_token_ids,
        dtype=kv_dtype,
        fingerprint=checkpoint.fingerprint(),
    )
    pool = KVPool(layout, num_blocks)
    windows = tuple(window if window < max_context else 0 for window in model_config.traits.windows)
    return ModelRunner(spec, model, pool, CpuAttention(pool, windows), threads)


def _run_dtype(dtype: Dtype, config: ModelConfig) -> KVDtype:
    if dtype != "auto":
        return dtype
    return "float32" if config.dtype == "float16" else config.dtype
