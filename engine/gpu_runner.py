"""The runner on a GPU: steps are launched and go on by themselves, one behind the other.

    host      plan N+1 -> inputs N+1 -> launch N+1 -> wait for N -> commit N -> plan N+2 ...
    device    ... step N ............................ | step N+1 .....................
                             sampled[row] of N stays there and feeds the rows of N+1 that ask for it

A step's tokens are sampled on the device into `sampled`, by row; what the next step computes of them it reads there.
Only a copy of them goes to the host, and nobody waits for it until the next step is launched. Steps of decode rows only
are captured graphs (`graphs.py`); anything with a chunk of a prompt is launched kernel by kernel.

On CPU tensors the same runner works under Triton's interpreter, without graphs: slow, and for tests.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.attention.triton import TritonAttention
from kvrelay.engine.batch import ForwardBatch
from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.engine.graphs import Capture, CudaCapture, DecodeGraphs, batch_sizes
from kvrelay.engine.kv.layout import KVDtype, KVLayout
from kvrelay.engine.kv.pool import TORCH_DTYPES, KVPool
from kvrelay.engine.models.checkpoint import Checkpoint
from kvrelay.engine.models.config import ModelConfig, read_config
from kvrelay.engine.models.decoder import Decoder, Weights
from kvrelay.engine.models.loader import Progress, load_weights
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.step_inputs import StepInputs
from kvrelay.kernels import gpu_ops
from kvrelay.kernels.ops import Linear
from kvrelay.kernels.sample import NONFINITE, Choices, sample

MAX_BANNED = 128
"""Token ids that a row may be forbidden at most: more than requests may name, and a model's own end-of-sequence ids."""


class GpuStep:
    """A step under way."""

    def __init__(self, plan: StepPlan, tokens: Tensor, done: torch.cuda.Event | None) -> None:
        self._plan = plan
        self._tokens = tokens
        self._done = done

    def result(self) -> StepOutput:
        """Waits until the step is done."""
        if self._done is not None:
            self._done.synchronize()
        plan = self._plan
        tokens = self._tokens[: plan.num_rows].tolist()
        sampled = plan.sample.tolist()
        nonfinite = [row for row, token in enumerate(tokens) if sampled[row] and token == NONFINITE]
        return StepOutput(
            tuple([token if yields else None for token, yields in zip(tokens, sampled, strict=True)]), tuple(nonfinite)
        )


class GpuRunner:
    """Implements `Runner`, and `AsyncRunner` of the engine. Not thread-safe."""

    def __init__(
        self,
        spec: ModelSpec,
        model: Decoder,
        pool: KVPool,
        config: EngineConfig,
        capture: Capture | None = None,
    ) -> None:
        """
        Args:
            model: on the pool's device.
            capture: makes graphs in `warm_up`; CUDA's own if None and the pool is on a GPU.
        """
        self.spec = spec
        self.pool = pool
        self.model = model
        self.device = pool.tensor.device
        self._cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self._cuda else None
        rows = min(config.max_sequences, config.max_batch_tokens)
        width = min(self.layout.blocks_for(spec.max_context), pool.num_blocks)
        size = self.layout.block_size
        # A graph's inputs have room for its rows only; a step with chunks has as many tokens as the budget.
        self._decode = StepInputs(rows, rows, width, size, MAX_BANNED, self.device)
        self._mixed = StepInputs(rows, config.max_batch_tokens, width, size, MAX_BANNED, self.device)
        windows = tuple(window if window < spec.max_context else 0 for window in model.config.traits.windows)
        self.attention = TritonAttention(pool, windows, model.config.heads, rows, spec.max_context)
        self._scratch = torch.empty(rows, spec.vocab_size, dtype=torch.int32, device=self.device)
        self._sampled = torch.full((rows,), NONFINITE, dtype=torch.int64, device=self.device)
        self._host_tokens = [torch.zeros(rows, dtype=torch.int64, pin_memory=self._cuda) for _ in range(2)]
        self._capture = capture
        self._sizes = batch_sizes(rows)
        self._graphs: DecodeGraphs | None = None
        if self._cuda:
            # All of the above, the weights and the pool were made on other streams than the runner's own.
            torch.cuda.synchronize(self.device)

    @property
    def layout(self) -> KVLayout:
        return self.pool.layout

    def run(self, plan: StepPlan) -> StepOutput:
        """See `Runner.run`."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> GpuStep:
        """See `AsyncRunner.launch`."""
        with self._on_stream():
            sampled = np.flatnonzero(plan.sample)
            if plan.num_tokens == plan.num_rows == len(sampled):
                self._launch_decode(plan, sampled)
            else:
                self._launch_mixed(plan, sampled)
            self._host_tokens.reverse()
            tokens = self._host_tokens[0]
            tokens[: plan.num_rows].copy_(self._sampled[: plan.num_rows], non_blocking=True)
            done = None
            if self._stream is not None:
                done = torch.cuda.Event()
                done.record(self._stream)
            return GpuStep(plan, tokens, done)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles the kernels and captures the graphs; nothing is written to the pool."""
        capture = self._capture
        if capture is None and self._stream is not None:
            capture = CudaCapture(self._stream)
        with self._on_stream():
            self._prefill_once()
            if capture is not None:
                self._graphs = DecodeGraphs(self._sizes, self._decode_step, capture)
        if self._stream is not None:
            self._stream.synchronize()

    def _launch_decode(self, plan: StepPlan, sampled: NDArray[np.int64]) -> None:
        rows = plan.num_rows
        size = self._graphs.size_for(rows) if self._graphs is not None else rows
        if self._graphs is None or size is None:
            self._load_decode(plan, sampled, rows)
            self._decode_step(rows)
        else:
            self._load_decode(plan, sampled, size)
            self._graphs.replay(size)

    def _load_decode(self, plan: StepPlan, sampled: NDArray[np.int64], size: int) -> None:
        self._decode.load(plan, sampled, size)
        self.attention.load_spans((plan.starts + 1).tolist(), size)

    def _decode_step(self, rows: int) -> None:
        """A token of each of so many rows, from static inputs to `_sampled`; what a graph captures."""
        inputs = self._decode
        self.attention.plan_decodes(inputs.slots[:rows], inputs.tables[:rows], inputs.contexts[:rows])
        logits = self.model.logits(self._forward(inputs, rows))
        sample(logits, inputs.choices.first(rows), self._scratch[:rows], self._sampled[:rows])

    def _launch_mixed(self, plan: StepPlan, sampled: NDArray[np.int64]) -> None:
        inputs, rows, tokens = self._mixed, plan.num_rows, plan.num_tokens
        inputs.load(plan, sampled, 0)
        self.attention.plan_rows(
            plan.starts, plan.lengths, inputs.slots[:tokens], inputs.tables[:rows], inputs.contexts[:rows]
        )
        hidden = self._forward(inputs, tokens)
        count = len(sampled)
        if count:
            last = torch.from_numpy((np.cumsum(plan.lengths) - 1)[sampled].astype(np.int64))
            which = torch.from_numpy(sampled.astype(np.int64))
            if self._cuda:
                last, which = last.pin_memory(), which.pin_memory()
            last, which = (index.to(self.device, non_blocking=True) for index in (last, which))
            chosen = torch.empty(count, dtype=torch.int64, device=self.device)
            logits = self.model.logits(hidden.index_select(0, last))
            sample(logits, inputs.choices.first(count), self._scratch[:count], chosen)
            self._sampled.index_copy_(0, which, chosen)

    def _forward(self, inputs: StepInputs, tokens: int) -> Tensor:
        """[T, hidden] of the step's first tokens, some of which the step before has sampled."""
        feeds = inputs.feeds[:tokens]
        # A row that isn't sound sampled no token: its sequence has failed, and any token will do.
        fed = self._sampled.index_select(0, feeds.clamp(min=0)).clamp_(min=0)
        known = torch.where(feeds < 0, inputs.tokens[:tokens], fed)
        empty = np.empty(0, np.int64)
        batch = ForwardBatch(known, inputs.positions[:tokens], empty, empty, empty, empty)
        return self.model.forward(batch, self.attention)

    def _prefill_once(self) -> None:
        """A step of the largest size, of tokens whose KV isn't kept."""
        inputs = self._mixed
        tokens = min(len(inputs.tokens), self.spec.max_context, self.pool.num_blocks * self.layout.block_size)
        inputs.contexts[0] = tokens
        starts, lengths = np.zeros(1, np.int64), np.array([tokens])
        self.attention.plan_rows(starts, lengths, inputs.slots[:tokens], inputs.tables[:1], inputs.contexts[:1])
        hidden = self._forward(inputs, tokens)
        choices = Choices.empty(1, MAX_BANNED, self.device)
        sample(self.model.logits(hidden[-1:]), choices, self._scratch[:1], self._sampled[:1])

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def build_gpu_runner(
    model_path: Path,
    dtype: Dtype,
    config: EngineConfig,
    progress: Progress | None = None,
    device: torch.device | str = "cuda",
) -> GpuRunner:
    """Loads the checkpoint in folder `model_path` onto a device and allocates its KV pool there.

    Args:
        dtype: of weights and KV; auto takes the checkpoint's.
        progress: told the share of the weights that is loaded, 0 to 1.

    Raises:
        ValueError: the checkpoint or an option can't be used; the text says which and why.
    """
    model_config = read_config(model_path)
    checkpoint = Checkpoint(model_path)
    kv_dtype: KVDtype = model_config.dtype if dtype == "auto" else dtype
    pool, max_context = allocate(model_config, kv_dtype, config, device)

    def linear(weight: Tensor, bias: Tensor | None) -> Linear:
        return gpu_ops.linear(weight.to(device), None if bias is None else bias.to(device))

    with torch.inference_mode():
        weights = load_weights(checkpoint, model_config, TORCH_DTYPES[kv_dtype], linear, progress)
        model = Decoder(model_config, weights_on(weights, model_config, device), gpu_ops)
    spec = ModelSpec(
        name=model_path.resolve().name,
        architecture=model_config.architecture,
        vocab_size=model_config.vocab_size,
        max_context=max_context,
        eos_token_ids=model_config.eos_token_ids,
        dtype=kv_dtype,
        fingerprint=checkpoint.fingerprint(),
    )
    return GpuRunner(spec, model, pool, config)


def allocate(
    model: ModelConfig, dtype: KVDtype, config: EngineConfig, device: torch.device | str
) -> tuple[KVPool, int]:
    """A KV pool on the device, and the longest context that model, options and pool allow.

    Raises:
        ValueError: the pool's memory holds no block, or the device hasn't got it.
    """
    layout = KVLayout(
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        dtype=dtype,
        order="HND",
    )
    num_blocks = layout.blocks_in(config.kv_memory_bytes)
    try:
        pool = KVPool(layout, num_blocks, device)
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ValueError(
            f"kv_memory_bytes is {config.kv_memory_bytes}; {free} of {total} bytes are free on {device}"
        ) from error
    positions = config.max_context or model.max_positions
    return pool, min(model.max_positions, positions, num_blocks * config.block_size)


def weights_on(weights: Weights, config: ModelConfig, device: torch.device | str) -> Weights:
    """The weights with what isn't inside a `Linear` moved to the device; a tied embedding is there once."""

    def norm_on(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    layers = tuple(
        replace(
            layer,
            input_norm=norm_on(layer.input_norm),
            mlp_norm=norm_on(layer.mlp_norm),
            qk_norm=None if layer.qk_norm is None else layer.qk_norm._replace(weight=norm_on(layer.qk_norm.weight)),
        )
        for layer in weights.layers
    )
    embedding = weights.embedding.to(device)
    return Weights(
        embedding=embedding,
        layers=layers,
        norm=weights.norm.to(device),
        head=gpu_ops.linear(embedding, None) if config.tie_embeddings else weights.head,
        frequencies=weights.frequencies.to(device),
    )
