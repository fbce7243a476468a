"""The runner on the CPU: `launch` computes the step to its end, or as far as a pipeline stage does.

The first of several stages has the embedding and, behind the last layer, the last norm and the head: rank 0 is one of
its ranks, and has what shapes logits. Hidden states of a step go from stage to stage, and those that yield something
back to the first one. While later stages compute a step, the first one computes the next: another chunk of a prompt, or
other sequences.

    stage 0    step 0   | step 1   | head of 0, step 2 | head of 1 ...
    stage 1               step 0   | step 1            | step 2
"""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.attention.base import CPU, Attention, AttentionInputs, LayerKV, layers_of
from kvrelay.engine.attention.native import NativeAttention, supports
from kvrelay.engine.attention.torch import TorchAttention
from kvrelay.engine.config import Dtype, EngineConfig, Quantization
from kvrelay.engine.kv.layout import CacheLayout, FloatDtype
from kvrelay.engine.kv.memory import DeviceMemory, HostMemory, make_pools, tokens_within
from kvrelay.engine.kv.pool import TORCH_DTYPES, KVPool
from kvrelay.engine.kv.writes import WRITTEN, KVWrites
from kvrelay.engine.models.fast.decoder import NO_TAPS, Decoder, Model, Taps, Weights, taps_into
from kvrelay.engine.models.fast.loader import Making, OnLoaded, load_weights
from kvrelay.engine.models.fast.native import NativeDecoder, fits
from kvrelay.engine.models.fast.parts import MakeAttention, Parts
from kvrelay.engine.models.fast.slices import Slices, share_hashes
from kvrelay.engine.models.loads import ExpertLoads
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.models.reading.config import check_degree, check_experts, read_config
from kvrelay.engine.models.reading.packed_cache import DamagedCacheError, PackedCache, packed_path
from kvrelay.engine.models.reading.stored import check_stored
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.quant.schemes import HEAD, LAYERS, LayOut, dequantizing, quantizing, quantizing_columns
from kvrelay.engine.ranks.collective import ALONE, Place, Ring
from kvrelay.engine.ranks.spans import even_span
from kvrelay.engine.runner.base import FinishedStep, StepHandle, chain_of_steps, warm_up_steps
from kvrelay.engine.runner.threads import TorchThreads, native_team
from kvrelay.engine.sampling.logprobs import read_prompts, score_prompts, wanted
from kvrelay.engine.sampling.native import NativeSampler, nonfinite_rows
from kvrelay.engine.sampling.sampler import (
    ALL_TOKENS,
    Choice,
    Sample,
    Vocabulary,
    are_plain,
    choose,
    draws_of,
    guessing,
    sample,
    step_output,
)
from kvrelay.engine.sampling.shards import Shard
from kvrelay.engine.states import StatesShape
from kvrelay.kernels.cpu import ops
from kvrelay.kernels.cpu.packed import packer
from kvrelay.kernels.cpu.program import Team
from kvrelay.kernels.ops import Linear
from kvrelay.machine.memory import return_free_memory

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = (1, 8, 64, 256)
"""Lengths of the prompts that a runner computes before it is used."""


class CpuRunner:
    """Implements `Runner`, for a whole model or one rank's part of it.

    All ranks launch the same plans, and all return the step's whole output. Of several pipeline stages, a rank has a
    `StageRunner`.
    """

    lag = 0
    prefill_attention = ""

    def __init__(
        self,
        spec: ModelSpec,
        model: Model,
        cache_layout: CacheLayout,
        pools: tuple[KVPool, ...],
        attention: Attention,
        threads: int,
        parts: Parts,
        sample: Sample,
    ) -> None:
        """
        Args:
            threads: that torch uses in a step.
            parts: of a proposer that guesses from hidden states.
            sample: chooses tokens; a `Shard` if ranks share the vocabulary.
        """
        self.spec = spec
        self.parts = parts
        self.cache_layout = cache_layout
        self.pools, self.pool, self.layout = pools, pools[0], pools[0].layout
        self.model = model
        self.attention = attention
        self._threads = TorchThreads(threads)
        self._windows = [group.window for group in cache_layout.side_groups]
        self._sample = sample
        self._vocabulary: Vocabulary = sample if isinstance(sample, Shard) else ALL_TOKENS
        self._tokens = even_span(spec.vocab_size, model.place).count

    @property
    def whole_cache_layout(self) -> CacheLayout:
        """See `Runner.whole_cache_layout`."""
        return self.model.config.whole_cache_layout(self.cache_layout, self.spec.max_context)

    @property
    def states_shape(self) -> StatesShape | None:
        config = self.model.config.whole
        return StatesShape(config.layers, config.hidden_size)

    @property
    def expert_loads(self) -> ExpertLoads | None:
        """See `Runner.expert_loads`."""
        return self.model.expert_loads if isinstance(self.model, NativeDecoder) else None

    def launch(self, plan: StepPlan) -> StepHandle:
        """See `Runner.launch`."""
        self._threads.set()
        rows = np.flatnonzero(plan.sample)
        draws = draws_of(plan, rows)
        plain = not plan.keep and not plan.prompt_parts and (not draws or are_plain(draws))
        if isinstance(self.model, NativeDecoder) and self._vocabulary is ALL_TOKENS and plain:
            chosen, largest = self.model.choose(plan, rows, draws, 1)
            choice = Choice(chosen[0], nonfinite_rows(largest[0]), {}, None)
            return FinishedStep(step_output(plan, rows, choice))
        with torch.inference_mode():
            states = None
            if plan.keep:
                shape = plan.num_tokens, len(plan.keep), self.model.config.hidden_size
                states = torch.empty(shape, dtype=TORCH_DTYPES[self.spec.dtype])
            hidden = self.forward(plan, taps_into(states, plan.keep))
        output = self.finish(plan, hidden)
        return FinishedStep(output if states is None else replace(output, states=states))

    @torch.inference_mode()
    def finish(self, plan: StepPlan, hidden: Tensor) -> StepOutput:
        """Output of a step, without hidden states.

        Args:
            hidden: [T, hidden], of `forward`.
        """
        rows, vocabulary = np.flatnonzero(plan.sample), self._vocabulary
        prompt_logprobs = read_prompts(score_prompts(plan, hidden, self._logits, vocabulary.scores))
        if not len(rows):
            return StepOutput((None,) * plan.num_rows, prompt_logprobs=prompt_logprobs)
        ends = np.cumsum(plan.lengths, dtype=np.int64)
        logits = self._logits(hidden[torch.from_numpy(ends[rows] - 1)])
        choice = choose(logits, draws_of(plan, rows), self._sample, vocabulary)
        return step_output(plan, rows, choice, prompt_logprobs)

    def _logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, tokens of this rank] of rows of `forward`'s result; a head may have padding behind them."""
        return self.model.logits(hidden)[:, : self._tokens]

    def chain(self, plan: StepPlan, count: int) -> list[list[int]]:
        """See `ChainRunner.chain`. On the native kernels, all of it is one call, unless windows have pools."""
        self._threads.set()
        plain = self._vocabulary is ALL_TOKENS and not self._windows
        if not isinstance(self.model, NativeDecoder) or not plain:
            return chain_of_steps(self, plan, count)
        rows = np.arange(plan.num_rows)
        chosen, largest = self.model.choose(plan, rows, draws_of(plan, rows), count)
        sound = next((number for number, logits in enumerate(largest) if nonfinite_rows(logits)), count)
        return [[tokens[row] for tokens in chosen[:sound]] for row in range(plan.num_rows)]

    def forward(self, plan: StepPlan, taps: Taps = NO_TAPS, hidden: Tensor | None = None) -> Tensor:
        """The plan's tokens through all layers, with their KV written; [T, hidden], before the last norm.

        Args:
            taps: as for `Decoder.forward`.
            hidden: [T, hidden] of the stage before, if this is a later one.
        """
        inputs = AttentionInputs.from_plan(plan, self.cache_layout.block_size, windows=self._windows)
        self.attention.plan(inputs)
        tokens = torch.from_numpy(plan.tokens.astype(np.int64)) if hidden is None else hidden
        return self.model.forward(tokens, inputs.positions, self.attention, taps=taps)

    def fetch(
        self, states: Tensor, places: tuple[int, ...], dtype: FloatDtype, then: Callable[[Tensor], object]
    ) -> None:
        """See `Runner.fetch`."""
        # Indexed with a list, it is a copy.
        then(states[:, list(places)].to(TORCH_DTYPES[dtype]))

    def warm_up(self, keep: tuple[int, ...] = ()) -> None:
        """Runs steps of a few shapes, so that the first request finds code and buffers ready. Overwrites KV blocks."""
        warm_up_steps(self, WARM_UP_TOKENS)
        if isinstance(self.model, NativeDecoder):
            with torch.inference_mode():
                self.model.measure()
        if self.expert_loads is not None:
            self.expert_loads.forget()


class StageStep:
    """A step that has left the first stage; implements `StepHandle`."""

    written: KVWrites = WRITTEN
    """KV writes of this stage."""

    def __init__(self, finish: Callable[[], StepOutput]) -> None:
        self.result = finish


class StageRunner(CpuRunner):
    """Implements `Runner` for a rank of a stage. Only ranks of the first stage return the step's output."""

    def __init__(self, *given: Any, ring: Ring) -> None:
        """
        Args:
            given: as for `CpuRunner`.
            ring: of all stages, `Place.stages`.
        """
        super().__init__(*given)
        self.lag = self.model.place.degree.pipeline - 1
        self._ring = ring

    states_shape = None
    """Nothing is kept, because the stages have the inputs of their own layers only."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """See `Runner.launch`. Computes the step in this stage, and sends the result to the next one.

        Raises:
            CollectiveError: another stage is lost.
        """
        self._threads.set()
        place = self.model.place
        with torch.inference_mode():
            given = None if place.stage == 0 else self._receive(plan.num_tokens)
            hidden = self.forward(plan, hidden=given)
            if place.is_last:
                hidden = hidden[torch.from_numpy(wanted(plan))]
            self._ring.send(hidden)
        if place.stage:
            return FinishedStep(StepOutput((None,) * plan.num_rows))
        return StageStep(partial(self._finish, plan))

    def _receive(self, rows: int) -> Tensor:
        hidden = torch.empty(rows, self.model.config.hidden_size, dtype=self.parts.activations)
        self._ring.receive(hidden)
        return hidden

    @torch.inference_mode()
    def _finish(self, plan: StepPlan) -> StepOutput:
        """The step's output, when the last stage has ended it."""
        rows = torch.from_numpy(wanted(plan))
        # Where nothing is read, nothing is written: then this takes no memory.
        hidden = torch.empty(plan.num_tokens, self.model.config.hidden_size, dtype=self.parts.activations)
        hidden[rows] = self._receive(len(rows))
        return self.finish(plan, hidden)


def build_cpu_runner(
    folder: Path,
    dtype: Dtype,
    options: EngineConfig,
    on_loaded: OnLoaded | None = None,
    memory: DeviceMemory | None = None,
    *,
    slides: bool = True,
    place: Place = ALONE,
) -> CpuRunner:
    """Loads the checkpoint in `folder`, or a rank's part of it, and allocates its KV pools.

    Args:
        dtype: of weights and KV; auto takes the checkpoint's, or float32 in place of float16, which is slow on CPU.
        on_loaded: called with the loaded share of the weights, 0 to 1.
        memory: of the machine; None asks Linux.
        slides: whether layers with a window keep the KV of their windows only. Over several pipeline stages they keep
            all, because a stage may have layers of one kind only, and a plan has tables for all kinds.
        place: of the rank.

    Raises:
        ValueError: the checkpoint or an option can't be used; the text says which and why.
        CollectiveError: another rank is lost.
    """
    whole = read_config(folder).for_context(options.max_context)
    checkpoint = Checkpoint(folder)
    options, slides = options.on("cpu"), slides and place.degree.pipeline == 1
    check_stored(options.quantization, whole.stored)
    check_degree(whole, place.degree, options.quantization)
    check_experts(whole, options.expert_parallel, options.expert_exchange, options.spare_experts)
    share_hashes(checkpoint, place)
    whole_experts, spares = options.expert_parallel > 1, options.spare_experts
    slices = Slices.of(whole, place, options.quantization, whole_experts=whole_experts, spares=spares)
    config = slices.own
    run_dtype = config.run_dtype(dtype)
    own_layout = config.kv_layout(run_dtype, options.kv_dtype, options.block_size, "NHD")
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    supported = run_dtype != "float16" and supports(TORCH_DTYPES[own_layout.dtype]) and fits(config)
    team = native_team(threads, supported=supported)
    whole_choice: Sample = sample if team is None else NativeSampler(team)
    choice = Shard(place, config.vocab_size, whole_choice) if place.degree.tensor > 1 else whole_choice
    # Proposers are rank 0's alone, and guess from the whole vocabulary.
    parts = _parts(TORCH_DTYPES[run_dtype], team, options.quantization, whole_choice)
    with torch.inference_mode():
        weights = _load(checkpoint, run_dtype, slices, options, parts, team, on_loaded)
    return_free_memory()
    spec = ModelSpec.of(checkpoint, whole, run_dtype, options)
    layout = config.cache_layout(own_layout, spec.max_context) if slides else CacheLayout.of(own_layout)
    memory = memory or HostMemory(ranks=place.degree.ranks)
    pools = make_pools(layout, options, spec.max_context, memory, place=place)
    # The memory doesn't decide which layers have a pool of their own.
    layers = layers_of(pools, config.windows(spec.max_context))
    spec = spec.within(place.smallest(tokens_within(layout, pools, options)))
    make: Callable[..., CpuRunner] = CpuRunner
    if place.degree.pipeline > 1:
        tokens = max(options.max_batch_tokens, *WARM_UP_TOKENS)
        make = partial(StageRunner, ring=place.stages(tokens * config.hidden_size * parts.activations.itemsize))
    if team is None:
        plain = Decoder(config, weights, ops, place)
        return make(spec, plain, layout, pools, TorchAttention(layers), threads, parts, choice)
    # torch has little left to do here. Its threads spin for a while after each call, which would take the cores from
    # the kernels' own threads.
    torch.set_num_threads(1)
    attention = NativeAttention(layers, config.heads, team)
    with torch.inference_mode():
        native = NativeDecoder(config, weights, attention, team, place, options.expert_exchange)
        return make(spec, native, layout, pools, attention, 1, parts, choice)


def _load(
    checkpoint: Checkpoint,
    dtype: FloatDtype,
    slices: Slices,
    options: EngineConfig,
    parts: Parts,
    team: Team | None,
    on_loaded: OnLoaded | None,
) -> Weights:
    """The weights; packed ones from the disk if they are quantized at load and the cache has them."""

    def load(cache: PackedCache | None) -> Weights:
        keep = options.quantization != "dense"
        making = Making(
            parts.head,
            router=None if team is None else packer(team),
            has_embedding=team is not None,
            cache=cache,
            keep=keep,
            slices=slices,
            columns=quantizing_columns(options.quantization),
        )
        return load_weights(checkpoint, slices.config, parts.dtype, parts.linear, on_loaded, making=making)

    most = options.packed_cache_bytes
    coded = options.quantization in LAYERS or (options.quantization == "none" and slices.config.is_gguf)
    # Spare slots are written to, and what is cached may be shared.
    if team is None or not most or not coded or options.spare_experts:
        return load(None)
    place = slices.place
    part = f" rank {place.rank} of {place.degree}" if place.degree.ranks > 1 else ""
    part += " with whole experts" if options.expert_parallel > 1 else ""
    path = packed_path(f"{checkpoint.fingerprint()} {dtype} {options.quantization}{part}", team)
    try:
        cache = PackedCache(path, team, most)
        weights = load(cache)
    except DamagedCacheError as error:
        logger.warning("the cache of packed weights is damaged, so it is written anew: %s", error)
        cache = PackedCache(path, team, most, read=False)
        weights = load(cache)
    cache.finish()
    return weights


def _parts(dtype: torch.dtype, team: Team | None, quantization: Quantization, choice: Sample) -> Parts:
    """The parts that lay weights out for `team`'s kernels, or for torch's without a team."""
    quantize, quantize_head = LAYERS.get(quantization), HEAD.get(quantization)
    if team is None and quantize is not None:
        logger.warning("without the native kernels, quantized weights take as much memory and time as others")
    lay_out: LayOut[Linear] = dequantizing(dtype, ops.linear) if team is None else packer(team)
    if quantization == "dense":
        lay_out = dequantizing(dtype, lay_out)
    linear, head = quantizing(quantize, lay_out), quantizing(quantize_head, lay_out)
    attention: MakeAttention = (
        (lambda pool, heads, plans: TorchAttention([LayerKV(pool, 0, 0)]))
        if team is None
        else (lambda pool, heads, plans: NativeAttention([LayerKV(pool, 0, 0)], heads, team))
    )
    activations = dtype if team is None else torch.float32
    return Parts(linear, head, ops, attention, guessing(choice), dtype, activations, CPU, torch.inference_mode)
