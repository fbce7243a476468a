"""The runner on a GPU: a launched step runs by itself, behind the one launched before it.

    host      plan N+1 -> inputs N+1 -> launch N+1 -> wait for N -> commit N -> plan N+2 ...
    device    ... step N ............................ | step N+1 .....................
                             sampled[row] of N stays there and feeds the rows of N+1 that ask for it

A step samples its tokens on the device into `sampled`, by row, and the next step reads from there what it computes of
them. Only a copy goes to the host, and the host waits for it after it has launched the next step. Steps that consist of
decode rows are captured graphs (`graphs.py`). Small steps with a chunk of a prompt are, too, in pieces with attention
between them; those of more tokens are launched kernel by kernel.

Several ranks launch the same steps. Each gathers the logits of all tokens and chooses by them, so that all of them have
the same `sampled`; but rows that something shapes are chosen by rank 0, which alone knows what, for all of them. Sums
and gathers are in the captured graphs.

On CPU tensors the same runner works under Triton's interpreter, without graphs. That is slow, and for tests.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.attention.base import Attention, LayerKV, layers_of
from kvrelay.engine.attention.choice import fastest
from kvrelay.engine.attention.prefill import Prefill
from kvrelay.engine.attention.triton import TritonAttention, architecture_of
from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.engine.kv.layout import CacheLayout, FloatDtype
from kvrelay.engine.kv.memory import DeviceMemory, asking, make_pools, memory_of, tokens_within
from kvrelay.engine.kv.pool import TORCH_DTYPES, KVPool
from kvrelay.engine.kv.writes import WRITTEN, EventWaiter, KVWrites
from kvrelay.engine.models.fast.decoder import NO_TAPS, Decoder, Taps, taps_into
from kvrelay.engine.models.fast.loader import MakeLinear, Making, OnLoaded, load_weights
from kvrelay.engine.models.fast.parts import Parts
from kvrelay.engine.models.fast.slices import Slices, share_hashes
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.models.reading.config import check_degree, read_config
from kvrelay.engine.models.reading.stored import check_stored
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.quant.schemes import HEAD, LAYERS, dequantizing, quantizing, quantizing_columns
from kvrelay.engine.ranks.collective import ALONE, Place
from kvrelay.engine.ranks.device import GpuCollective, on_gpus
from kvrelay.engine.runner.base import chain_of_steps
from kvrelay.engine.runner.fetches import Fetches
from kvrelay.engine.runner.gpu_step import Extras, GpuStep, KeptStates, SpecialRows, StreamWrites
from kvrelay.engine.runner.graphs import (
    Capture,
    DecodeGraphs,
    Forward,
    StepPieces,
    batch_sizes,
    cuda_capture,
    fitting,
    step_sizes,
)
from kvrelay.engine.runner.inputs import InputBuffers
from kvrelay.engine.sampling.guesses import GpuGuesses
from kvrelay.engine.sampling.logprobs import score_prompts
from kvrelay.engine.states import StatesShape
from kvrelay.kernels.codes import CodedWeight
from kvrelay.kernels.ops import NONFINITE, Feeds, Linear
from kvrelay.kernels.triton import gpu_ops
from kvrelay.kernels.triton.quant_linear import quant_linear
from kvrelay.kernels.triton.sample import Sampler, Workspace
from kvrelay.machine.options import require

MAX_BANNED = 128
"""Token ids that may be forbidden to one row: more than a request's stop ids plus a model's end-of-sequence ids."""
FP8_ARCHITECTURE = 89
"""Compute capability, times ten, from which on GPUs convert to and from E4M3."""
Makers = tuple[MakeLinear, MakeLinear]
"""`linear` and `head` of `Parts`."""


def dense(weight: Tensor | CodedWeight, bias: Tensor | None) -> Linear:
    """Lays out weights as dense ones, after decoding those that are codes."""
    return gpu_ops.linear(weight.dequantize() if isinstance(weight, CodedWeight) else weight, bias)


DENSE: Makers = dense, dense


class GpuRunner:
    """Implements `Runner`."""

    lag = 1
    expert_loads = None
    chain = chain_of_steps

    def __init__(
        self,
        spec: ModelSpec,
        model: Decoder,
        cache_layout: CacheLayout,
        pools: tuple[KVPool, ...],
        options: EngineConfig,
        capture: Capture | None = None,
        make: Makers = DENSE,
    ) -> None:
        """
        Args:
            model: on the pools' device.
            capture: makes graphs in `warm_up`; CUDA's own if None and the pools are on a GPU.
            make: layers of a proposer that guesses from hidden states.
        """
        self.spec = spec
        self.cache_layout = cache_layout
        self.pools, self.pool, self.layout = pools, pools[0], pools[0].layout
        self.model = model
        self.device = pools[0].tensor.device
        kv_bytes = sum([pool.nbytes for pool in pools])
        self._purpose = (
            f"steps of max_batch_tokens {options.max_batch_tokens} and max_sequences {options.max_sequences} beside"
            f" {kv_bytes} bytes of KV (kv_memory_bytes)"
        )
        self._cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self._cuda else None
        self._waiter = EventWaiter("kv writes")
        self._written: KVWrites = WRITTEN
        """KV writes of the step that is being launched."""
        rows = min(options.max_sequences, options.max_batch_tokens)
        # A decode step has one token per row; a step with chunks may use the whole token budget.
        self._decode = InputBuffers(rows, rows, cache_layout, spec.max_context, MAX_BANNED, self.device)
        self._mixed = InputBuffers(
            rows, options.max_batch_tokens, cache_layout, spec.max_context, MAX_BANNED, self.device
        )
        own = {group.window for group in cache_layout.side_groups}
        windows = [
            window if window in own or window < spec.max_context else 0 for window in model.config.traits.windows
        ]
        self.attention = TritonAttention(
            layers_of(pools, windows), TORCH_DTYPES[spec.dtype], model.config.heads, rows, options.prefill_attention
        )
        self._scratch = Workspace.empty(rows, spec.vocab_size, self.device)
        dtype = TORCH_DTYPES[spec.dtype]
        self.parts = Parts(
            *make,
            gpu_ops.GpuOps(),
            lambda pool, heads, plans: TritonAttention([LayerKV(pool, 0, 0)], dtype, heads, rows, plans=plans),
            GpuGuesses(rows, self._scratch),
            dtype,
            dtype,
            self.device,
            self._running,
        )
        self._fetches = Fetches(self.device)
        self._kept = KeptStates(model.config.hidden_size, dtype, self.device)
        self._sample_decode = Sampler(self._decode.choices, self._scratch)
        self._sample_mixed = Sampler(self._mixed.choices, self._scratch)
        self._sampled = torch.full((rows,), NONFINITE, dtype=torch.int64, device=self.device)
        self._host_tokens = [torch.zeros(rows, dtype=torch.int64, pin_memory=self._cuda) for _ in range(2)]
        self._capture = capture
        self._sizes = batch_sizes(rows)
        self._decode_logits: dict[int, Tensor] = {}
        """Logits that decode steps have computed, by number of rows; those of a graph are where its replay writes
        them."""
        self._graphs: DecodeGraphs | None = None
        self._step_sizes = step_sizes(min(options.graph_tokens, options.max_batch_tokens))
        self._pieces: StepPieces | None = None
        if self._cuda:
            # The buffers above, the weights and the pool were made on other streams than the runner's own.
            torch.cuda.synchronize(self.device)

    @property
    def whole_cache_layout(self) -> CacheLayout:
        """See `Runner.whole_cache_layout`."""
        return self.model.config.whole_cache_layout(self.cache_layout, self.spec.max_context)

    @property
    def states_shape(self) -> StatesShape:
        return StatesShape(self.model.config.layers, self.model.config.hidden_size)

    @property
    def prefill_attention(self) -> str:
        """See `Runner.prefill_attention`."""
        return self.attention.prefill.name

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> GpuStep:
        """See `Runner.launch`."""
        with self._on_stream():
            sampled = np.flatnonzero(plan.sample)
            if plan.num_tokens == plan.num_rows == len(sampled):
                extras = self._launch_decode(plan, sampled)
            else:
                extras = self._launch_mixed(plan, sampled)
            self._host_tokens.reverse()
            tokens = self._host_tokens[0]
            tokens[: plan.num_rows].copy_(self._sampled[: plan.num_rows], non_blocking=True)
            return GpuStep(plan, tokens, extras, self._written, self._end())

    def fetch(
        self, states: Tensor, places: tuple[int, ...], dtype: FloatDtype, then: Callable[[Tensor], object]
    ) -> None:
        """See `Runner.fetch`."""
        self._fetches.fetch(states, places, TORCH_DTYPES[dtype], then)

    @torch.inference_mode()
    def warm_up(self, keep: tuple[int, ...] = ()) -> None:
        """Compiles the kernels, also those of the hand-off, and captures the graphs; changes nothing in the pools.

        Args:
            keep: what the graphs keep. A step that keeps anything else runs without them.

        Raises:
            ValueError: the device doesn't have the memory.
        """
        for pool in self.pools:
            pool.warm_up()
        capture = self._capture
        if capture is None and self._stream is not None:
            capture = cuda_capture(self._stream)
        with asking(self._purpose, memory_of(self.device)), self._on_stream():
            self._prefill_once()
            if len(self.attention.candidates) > 1:
                chosen = fastest(self.attention.candidates, self._time_prefill)
                # The others may have workspaces on the device.
                self.attention.prefill, self.attention.candidates = chosen, [chosen]
            if capture is not None:
                self._kept.capture(keep, max(self._sizes + self._step_sizes))
                self._graphs = DecodeGraphs(self._sizes, self._prepare_decode, capture)
                self._pieces = self._capture_pieces(capture)
        self._end()()

    def _launch_decode(self, plan: StepPlan, sampled: NDArray[np.int64]) -> Extras:
        graphs = self._graphs if self._kept.suits(plan.keep) else None
        size = None if graphs is None else fitting(graphs.sizes, plan.num_rows)
        self.attention.plan(self._decode.load(plan, sampled, size or 0, size or 0))
        if graphs is None or size is None:
            states = self._kept.make(plan.num_tokens, plan.keep)
            logits = self._decode_logits_of(plan.num_rows, taps_into(states, plan.keep))
        else:
            graphs.replay(size)
            states, logits = self._kept.copy(plan), self._decode_logits[size]
        self._written = self._mark()
        special = self._choose_special(plan, sampled, logits, self._decode, self._sampled)
        return Extras(special, states=states, graph=size is not None)

    def _prepare_decode(self, rows: int) -> Callable[[], None]:
        """Plans a decode step of padding rows only; returns what launches it."""
        self.attention.plan(self._decode.view(np.full(rows, -1), np.ones(rows, np.int64), rows))
        return partial(self._decode_step, rows)

    def _decode_step(self, rows: int) -> None:
        """A step that a graph captures."""
        self._decode_logits[rows] = self._decode_logits_of(rows, self._kept.taps(rows))

    def _decode_logits_of(self, rows: int, taps: Taps) -> Tensor:
        """Computes one token for each of `rows` rows, from the input buffers to `_sampled`; returns the logits."""
        inputs = self._decode
        given = inputs.tokens[:rows], inputs.positions[:rows], self.attention, Feeds(inputs.feeds[:rows], self._sampled)
        logits = self.model.forward_logits(*given, taps)
        self._sample_decode(logits, self._sampled[:rows])
        return logits

    def _choose_special(
        self, plan: StepPlan, sampled: NDArray[np.int64], logits: Tensor, inputs: InputBuffers, tokens: Tensor
    ) -> SpecialRows | None:
        """See `SpecialRows`; None if the plan, which `inputs` have, has none."""
        if not inputs.scored and plan.shapings is None:
            return None
        if not any(map(plan.is_special, sampled.tolist())):
            return None
        special = SpecialRows(plan, sampled, logits, inputs.choices, tokens)
        group = self.model.place.group
        if group.size > 1 and plan.shapings is not None:
            tokens.copy_(group.gather(tokens)[0])
        return special

    def _launch_mixed(self, plan: StepPlan, sampled: NDArray[np.int64]) -> Extras:
        inputs, tokens = self._mixed, plan.num_tokens
        pieces = self._pieces if self._kept.suits(plan.keep) else None
        size = None if pieces is None else fitting(pieces.sizes, tokens)
        self.attention.plan(inputs.load(plan, sampled, fill_tokens=size or 0))
        if pieces is None or size is None:
            states = self._kept.make(tokens, plan.keep)
            hidden = self._forward(inputs, tokens, self.attention, taps_into(states, plan.keep))
        else:
            hidden = pieces.replay(size)[:tokens]
            states = self._kept.copy(plan)
        # Logits and sampling need not end before a chunk's KV is sent.
        self._written = self._mark()
        prompts = score_prompts(plan, hidden, self.model.logits)
        count = len(sampled)
        special = None
        if count:
            last = torch.from_numpy((np.cumsum(plan.lengths) - 1)[sampled].astype(np.int64))
            which = torch.from_numpy(sampled.astype(np.int64))
            if self._cuda:
                last, which = last.pin_memory(), which.pin_memory()
            last, which = (index.to(self.device, non_blocking=True) for index in (last, which))
            chosen = torch.empty(count, dtype=torch.int64, device=self.device)
            logits = self.model.logits(hidden.index_select(0, last))
            self._sample_mixed(logits, chosen)
            special = self._choose_special(plan, sampled, logits, inputs, chosen)
            self._sampled.index_copy_(0, which, chosen)
        return Extras(special, prompts, states, graph=size is not None)

    def _forward(self, inputs: InputBuffers, tokens: int, attention: Attention, taps: Taps = NO_TAPS) -> Tensor:
        """[T, hidden] of the first `tokens` tokens, some of which the step before has sampled."""
        feeds = Feeds(inputs.feeds[:tokens], self._sampled)
        return self.model.forward(inputs.tokens[:tokens], inputs.positions[:tokens], attention, feeds, taps)

    def _capture_pieces(self, capture: Capture) -> StepPieces | None:
        """Captures the graphs of steps in pieces; None if no step is to run in pieces."""
        if not self._step_sizes:
            return None
        config, none = self.model.config, np.zeros(0, np.int64)
        shape = self._step_sizes[-1], config.heads, config.head_dim
        dtype = TORCH_DTYPES[self.spec.dtype]
        query, attended = (torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2))

        def prepare(tokens: int) -> Forward:
            self.attention.plan(self._mixed.view(none, none, tokens))
            return partial(self._forward, self._mixed, tokens, taps=self._kept.taps(tokens))

        return StepPieces(self._step_sizes, prepare, self.attention, (query, attended), capture)

    def _prefill_once(self) -> None:
        """Runs a step of the largest size, of tokens whose KV isn't kept."""
        inputs = self._mixed
        tokens = min(len(inputs.tokens), self.spec.max_context)
        inputs.contexts[0] = tokens
        self.attention.plan(inputs.view(np.zeros(1, np.int64), np.array([tokens]), tokens))
        hidden = self._forward(inputs, tokens, self.attention)
        self._sample_mixed(self.model.logits(hidden[-1:]), self._sampled[:1])

    def _end(self) -> Callable[[], object]:
        """Function that waits for all launched work; raises `CollectiveError` where that needs a lost rank."""
        if self._stream is None:
            return lambda: None
        done = torch.cuda.Event()
        done.record(self._stream)
        group = self.model.place.group
        return partial(group.wait, done.query) if isinstance(group, GpuCollective) else done.synchronize

    def _mark(self) -> KVWrites:
        """The KV writes of all that was launched so far."""
        return WRITTEN if self._stream is None else StreamWrites(self._stream, self._waiter)

    def _time_prefill(self, prefill: Prefill) -> float:
        """Seconds of a step of the largest size, the best of three after one that compiles."""
        self.attention.prefill = prefill
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            self._prefill_once()
            self._end()()
            times.append(time.perf_counter() - begin)
        return min(times[1:])

    @contextmanager
    def _running(self) -> Iterator[None]:
        with torch.inference_mode(), self._on_stream():
            yield

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def build_gpu_runner(
    folder: Path,
    dtype: Dtype,
    options: EngineConfig,
    on_loaded: OnLoaded | None = None,
    device: torch.device | str = "cuda",
    memory: DeviceMemory | None = None,
    later_bytes: int = 0,
    *,
    slides: bool = True,
    place: Place = ALONE,
) -> GpuRunner:
    """Loads the checkpoint in `folder`, or a rank's part of it, onto a device and allocates its KV pools there.

    Args:
        dtype: of weights and KV; auto takes the checkpoint's.
        on_loaded: called with the loaded share of the weights, 0 to 1.
        memory: of the device; None asks CUDA.
        later_bytes: what else will be loaded onto the device.
        slides: whether layers with a window keep the KV of their windows only.
        place: of the rank.

    Raises:
        ValueError: the checkpoint or an option can't be used; the text says which and why.
        CollectiveError: another rank is lost.
    """
    served = read_config(folder).for_context(options.max_context)
    check_stored(options.quantization, served.stored)
    check_degree(served, place.degree, options.quantization)
    stages = place.degree.pipeline
    require(stages == 1, "pipeline_parallel", stages, "1 on a GPU, where tensor_parallel may be more")
    checkpoint = Checkpoint(folder)
    share_hashes(checkpoint, place)
    slices = Slices.of(served, place, options.quantization)
    config = slices.own
    memory = memory or memory_of(device)
    options = options.on("cuda", memory.total())
    coded = options.kv_dtype != "fp8" or architecture_of(torch.device(device)) >= FP8_ARCHITECTURE
    require(coded, "kv_dtype", options.kv_dtype, "auto, or int8 on a GPU of compute capability below 8.9")
    run_dtype, quantization = config.run_dtype(dtype, "cuda"), options.quantization
    whole = config.kv_layout(run_dtype, options.kv_dtype, options.block_size, "HND")

    def lay_out(weight: Tensor | CodedWeight, bias: Tensor | None) -> Linear:
        if isinstance(weight, CodedWeight):
            return quant_linear(weight, bias, TORCH_DTYPES[run_dtype], torch.device(device))
        return gpu_ops.linear(weight, bias)

    held = dequantizing(TORCH_DTYPES[run_dtype], lay_out) if quantization == "dense" else lay_out
    linear, head = quantizing(LAYERS.get(quantization), held), quantizing(HEAD.get(quantization), held)
    making = Making(head, keep=quantization != "dense", slices=slices, columns=quantizing_columns(quantization))
    kept = quantization if quantization in LAYERS else run_dtype
    with asking(f"the weights of {folder} in {kept}", memory), torch.inference_mode():
        weights = load_weights(checkpoint, served, TORCH_DTYPES[run_dtype], linear, on_loaded, device, making)
    if place.degree.tensor > 1 and torch.device(device).type == "cuda":
        place = on_gpus(place, torch.device(device), TORCH_DTYPES[run_dtype])
    model = Decoder(config, weights, gpu_ops.GpuOps(), place, gathers=True)
    unbounded = ModelSpec.of(checkpoint, served, run_dtype, options)
    layout = config.cache_layout(whole, unbounded.max_context) if slides else CacheLayout.of(whole)
    if not options.kv_memory_bytes:
        later_bytes += _runner_bytes(unbounded, model, layout, options, memory, device)
    pools = make_pools(layout, options, unbounded.max_context, memory, device, later_bytes, place)
    spec = unbounded.within(place.smallest(tokens_within(layout, pools, options)))
    with asking(f"buffers beside {sum([pool.nbytes for pool in pools])} bytes of KV (kv_memory_bytes)", memory):
        return GpuRunner(spec, model, layout, pools, options, make=(linear, head))


def _runner_bytes(
    spec: ModelSpec,
    model: Decoder,
    layout: CacheLayout,
    options: EngineConfig,
    memory: DeviceMemory,
    device: torch.device | str,
) -> int:
    """Bytes that a runner takes beside weights and pool: buffers, a step's intermediate tensors, graphs. It makes a
    runner with pools for one step and measures it; compiled kernels stay for the runner to come.

    Raises:
        ValueError: the device doesn't have that much.
    """
    memory.settle()
    before = memory.used()
    tokens = min(options.max_batch_tokens, spec.max_context)
    with asking(f"buffers of max_sequences {options.max_sequences} beside the weights", memory):
        pools = tuple([KVPool(track, track.blocks_for(tokens), device) for _, track in layout.tracks])
        runner = GpuRunner(spec, model, layout, pools, options)
    runner.warm_up()
    del runner
    return max(0, memory.used() - before - sum([pool.nbytes for pool in pools]))
