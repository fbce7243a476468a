"""The runner of transformers' own modelling code: `launch` computes the step to its end."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.engine.kv.layout import FloatDtype
from kvrelay.engine.kv.memory import DeviceMemory, make_pools, memory_of, tokens_within
from kvrelay.engine.kv.pool import TORCH_DTYPES, wait_for_stream
from kvrelay.engine.models.fast.loader import OnLoaded
from kvrelay.engine.models.fast.slices import share_hashes
from kvrelay.engine.models.general.check import Prompts
from kvrelay.engine.models.general.choose import Choice, Kept, choose
from kvrelay.engine.models.general.experts import count_loads, on_cpu, on_gpu, swap_experts, take_flashinfer
from kvrelay.engine.models.general.flat import FlatWay
from kvrelay.engine.models.general.fused import fuse, native_modules
from kvrelay.engine.models.general.linears import swap, watching
from kvrelay.engine.models.general.mxfp4 import dequantize_stored
from kvrelay.engine.models.general.norms import swap_norms
from kvrelay.engine.models.general.observe import observe
from kvrelay.engine.models.general.places import LayerCache, Placing, arrange
from kvrelay.engine.models.general.ranks.parts import Part
from kvrelay.engine.models.general.ranks.plan import part_of
from kvrelay.engine.models.general.reading import VERSION, GeneralConfig, load_model, read_general_config
from kvrelay.engine.models.general.states import shifting_layers
from kvrelay.engine.models.general.step import Step, UnfitError, Way
from kvrelay.engine.models.general.store import Store
from kvrelay.engine.models.loads import ExpertLoads
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.models.reading.stored import check_stored
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.plan import StepOutput, StepPlan, kept_of
from kvrelay.engine.quant.schemes import HEAD, LAYERS, quantizing
from kvrelay.engine.ranks.collective import ALONE, CollectiveError, Place
from kvrelay.engine.runner.base import FinishedStep, chain_of_steps, warm_up_steps
from kvrelay.engine.runner.threads import TorchThreads, native_team
from kvrelay.engine.sampling.logprobs import read_prompts, score_prompts, wanted
from kvrelay.engine.sampling.native import NativeSampler
from kvrelay.engine.sampling.sampler import Sample, draws_of, sample, step_output
from kvrelay.engine.sampling.sampler import choose as choose_tokens
from kvrelay.engine.states import StatesShape
from kvrelay.kernels.cpu.packed import packer
from kvrelay.kernels.cpu.program import Team
from kvrelay.machine.memory import return_free_memory

logger = logging.getLogger(__name__)


class GeneralRunner:
    """Implements `Runner`."""

    lag = 0
    prefill_attention = ""
    chain = chain_of_steps

    def __init__(
        self,
        spec: ModelSpec,
        way: Way,
        store: Store,
        choice: Choice,
        threads: int,
        sample: Sample,
        rank: int = 0,
        expert_loads: ExpertLoads | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        """
        Args:
            choice: how the way was chosen.
            threads: that torch uses in a step.
            sample: chooses tokens.
            rank: of this process. Rank 0 chooses tokens, which the others needn't know.
            expert_loads: what the experts' kernels count.
            modules: names of the kinds of modules that native kernels compute.
        """
        self._modules = modules
        self._rank = rank
        self.spec = spec
        self.way = way
        self.store = store
        self.choice = choice
        self.pools, self.pool, self.layout = store.pools, store.pools[0], store.pools[0].layout
        self.cache_layout, self.whole_cache_layout = choice.layout, choice.placing.whole
        self._threads = TorchThreads(threads)
        self.sample = sample
        self.expert_loads = expert_loads

    @property
    def states_shape(self) -> StatesShape | None:
        """See `Runner.states_shape`: the last hidden states, in the flat way, on one rank."""
        if not isinstance(self.way, FlatWay) or self.store.placing.whole != self.store.placing.layout:
            return None
        text = self.way.model.config.get_text_config(decoder=True)
        return StatesShape(int(text.num_hidden_layers), int(text.hidden_size), last_only=True)

    @property
    def rolls_back(self) -> bool:
        """Whether steps may have guessed tokens: the states behind each are kept, and the last right one stays."""
        return isinstance(self.way, FlatWay) and self.pool.bytes.device.type == "cpu"

    @property
    def native(self) -> list[str]:
        """Names of the parts of the steps so far that kvrelay's kernels have computed."""
        return [*(self.way.native if isinstance(self.way, FlatWay) else ()), *self._modules]

    def launch(self, plan: StepPlan) -> FinishedStep:
        """See `Runner.launch`."""
        self._threads.set()
        if plan.keep and isinstance(self.way, FlatWay):
            self.way.keep_states()
        rows = np.flatnonzero(plan.sample)
        ends = np.cumsum(plan.lengths, dtype=np.int64)
        for copy in plan.copies:
            if copy.before:
                self.store.copy_slots(copy.group, copy.source, copy.target)
        asked = wanted(plan)
        with torch.inference_mode():
            logits = self.way.run(Step.of(plan), asked).cpu()
            if self.expert_loads is not None:
                self.expert_loads.stepped()
            states = None
            if plan.keep and isinstance(self.way, FlatWay):
                states = self.way.states()[:, None].clone()

            def at(tokens: Tensor) -> Tensor:
                # Both lists ascend, so lists of one length are equal. This saves a copy of rows of logits, which are
                # long.
                if len(tokens) == len(asked):
                    return logits
                return logits[torch.from_numpy(np.searchsorted(asked, tokens.numpy()))]

            prompt_logprobs = read_prompts(score_prompts(plan, torch.arange(plan.num_tokens), at))
            for copy in plan.copies:
                if not copy.before:
                    self.store.copy_slots(copy.group, copy.source, copy.target)
            if self.pool.bytes.device.type == "cuda":
                # A step without logits has waited for nothing yet, and links read its KV on streams of their own.
                wait_for_stream(self.pool.bytes.device)
            if not len(rows) or self._rank:
                empty = StepOutput((None,) * plan.num_rows, prompt_logprobs=prompt_logprobs, states=states)
                return FinishedStep(empty)
            chosen = choose_tokens(at(torch.from_numpy(ends[rows] - 1)), draws_of(plan, rows), self.sample)
        out = step_output(plan, rows, chosen, prompt_logprobs)
        self._roll_back(plan, out)
        return FinishedStep(replace(out, states=states))

    def _roll_back(self, plan: StepPlan, out: StepOutput) -> None:
        """Gives each sequence with guesses the state behind the last token that was right."""
        states = [number for number, group in enumerate(self.cache_layout.side_groups) if group.kind == "state"]
        if plan.drafts is None or not states:
            return
        drafts, kept, own = [*plan.drafts.tolist(), False], [*kept_of(plan, out), False], 0
        for row in range(plan.num_rows):
            own = own if drafts[row] else row
            if not drafts[row] or not kept[row] or (drafts[row + 1] and kept[row + 1]):
                continue
            for number in states:
                slots = plan.side_tables[number][:, 0]
                self.store.copy_slots(number + 1, int(slots[row]), int(slots[own]))

    def fetch(
        self, states: Tensor, places: tuple[int, ...], dtype: FloatDtype, then: Callable[[Tensor], object]
    ) -> None:
        """See `Runner.fetch`."""
        then(states[:, list(places)].to("cpu", TORCH_DTYPES[dtype]))

    def warm_up(self, keep: tuple[int, ...] = ()) -> None:
        """Runs steps of a few shapes, so that the first request finds code and buffers ready. Overwrites KV blocks."""
        warm_up_steps(self, (1, 8, 64))
        if self.expert_loads is not None:
            self.expert_loads.forget()


def build_general_runner(
    folder: Path,
    dtype: Dtype,
    options: EngineConfig,
    on_loaded: OnLoaded | None = None,
    memory: DeviceMemory | None = None,
    *,
    place: Place = ALONE,
    guesses: bool = False,
    blocks: int = 0,
) -> GeneralRunner:
    """Loads the checkpoint in `folder`, or a rank's part of it, finds the way of running it, and allocates the pools of
    its KV.

    Args:
        dtype: of weights and KV; auto takes the checkpoint's, or float32 in place of float16 on CPU.
        options: without `auto`, but that of `kv_memory_bytes`.
        on_loaded: called with the loaded share of the weights, 0 to 1.
        memory: of the device.
        place: of the rank.
        guesses: whether it is a draft model, whose KV is written over where a guess was wrong. Layers with a window
            then keep the KV of all tokens.
        blocks: of the pools, in place of `kv_memory_bytes`; 0 for what the options say.

    Raises:
        ValueError: the checkpoint or an option can't be used; the text says which and why.
        CollectiveError: another rank is lost.
    """
    device = torch.device("cuda" if options.device == "cuda" else "cpu")
    config, checkpoint = read_general_config(folder), Checkpoint(folder)
    check_stored(options.quantization, config.stored)
    run_dtype = run_dtype_of(dtype, config, device)
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    share_hashes(checkpoint, place)
    part = Part(place, options.expert_parallel)
    model = load_model(config, checkpoint, TORCH_DTYPES[run_dtype], device, on_loaded, part)
    return_free_memory()
    if on_loaded is not None:
        on_loaded(1.0)
    team = native_team(threads, supported=run_dtype != "float16" and device.type == "cpu")
    layers, why, prompts, packed = _prepare(model, config, run_dtype, options, team, place)
    # torch's threads spin for a while after each call, which would take the cores from the kernels' own threads.
    threads = 1 if packed > 0.4 else threads
    torch.set_num_threads(threads)
    placing = _placings(layers, why, run_dtype, options, device, place, slides=not guesses)
    choice = choose(model, prompts, placing, team, TORCH_DTYPES[run_dtype], place.group)
    if guesses:
        _check_draft(folder, config, choice)
    if blocks:
        options = replace(options, kv_memory_bytes=blocks * choice.layout.block_bytes)
    way = f"{choice.name}, transformers {VERSION}, {choice.layout.kinds}"
    spec = ModelSpec.of(checkpoint, config, run_dtype, options, way)
    pools = make_pools(choice.layout, options, spec.max_context, memory or memory_of(device), device, place=place)
    store = Store(choice.placing, pools)
    spec = spec.within(place.smallest(tokens_within(choice.layout, pools, options)))
    logger.info("%s runs as transformers' code, %s; faster ways: %s", config.architecture, choice.name, choice.refused)
    chooser: Sample = sample if team is None else NativeSampler(team)
    loads = count_loads(model, place.group, options.expert_parallel, device)
    modules = native_modules(model)
    return GeneralRunner(spec, choice.make(store), store, choice, threads, chooser, place.rank, loads, modules)


def _placings(
    layers: tuple[LayerCache, ...] | None,
    why: str,
    run_dtype: FloatDtype,
    options: EngineConfig,
    device: torch.device,
    place: Place,
    *,
    slides: bool,
) -> Callable[[Kept], Placing]:
    """Function that gives the places of what each layer keeps, in pools of blocks.

    Args:
        layers, why: see `_prepare`.
        slides: whether layers with a window keep the KV of that only.
    """

    def placing(kept: Kept) -> Placing:
        if layers is None and kept != "tokens":
            raise UnfitError(why)
        return arrange(
            () if layers is None or kept == "tokens" else layers,
            run_dtype,
            run_dtype if options.kv_dtype == "auto" else options.kv_dtype,
            options.block_size,
            "HND" if device.type == "cuda" else "NHD",
            with_tokens=kept != "cache",
            slides=slides,
            degree=place.degree,
            rank=place.rank,
        )

    return placing


def _check_draft(folder: Path, config: GeneralConfig, choice: Choice) -> None:
    """Raises ValueError if a draft model keeps states."""
    if any(group.kind == "state" for group in choice.layout.groups):
        raise ValueError(
            f"speculation.draft_model is {folder.name}; allowed: a model without states, because a state can't go back"
            f" behind wrong guesses, and {config.architecture} keeps one ({choice.name})"
        )


def _prepare(
    model: PreTrainedModel,
    config: GeneralConfig,
    run_dtype: FloatDtype,
    options: EngineConfig,
    team: Team | None,
    place: Place,
) -> tuple[tuple[LayerCache, ...] | None, str, Prompts, float]:
    """Observes what a loaded model keeps and yields, and replaces its layers with ours.

    Returns:
        What each layer of its cache keeps, or None and why its cache can't be used; prompts with its logits; the share
        of its weights that are packed for `team`.

    Raises:
        ValueError, UnfitError, CollectiveError: the model can't be run at all.
    """
    total, packed = sum(parameter.nbytes for parameter in model.parameters()), 0
    lay_out = None if team is None else packer(team)
    if config.stored is not None:
        # Before all else, because without them the model can't run.
        if team is None or lay_out is None or options.quantization == "dense":
            dequantize_stored(model, TORCH_DTYPES[run_dtype])
        else:
            packed = swap_experts(model, on_cpu(team, lay_out))
    layers: tuple[LayerCache, ...] | None
    try:
        layers, why = observe(model, place.group), ""
    except CollectiveError:
        raise
    except Exception as error:  # noqa: BLE001  # the model's code fails in whatever way
        layers, why = None, str(error)
    windows = tuple({layer.window for layer in layers or () if layer.window})
    if shifting_layers(model):
        # RWKV's first pass divides weights of some products by powers of 2. No later one looks at them.
        with torch.inference_mode():
            model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device))
    with watching(model) as uses:
        prompts = _prompts(model, config, windows, place)
    swap_norms(model, team)
    if team is not None and lay_out is not None:
        linear = quantizing(LAYERS.get(options.quantization), lay_out)
        head = quantizing(HEAD.get(options.quantization), lay_out)
        own = part_of(config.vocab_size, place.group.size, place.group.place)
        packed += swap(model, uses, linear, head, (config.vocab_size, len(own)))
        packed += swap_experts(model, on_cpu(team, linear))
        fuse(model, team)
        if options.quantization != "none":
            prompts = _prompts(model, config, windows, place)
    elif options.device == "cuda" and options.quantization in LAYERS:
        swap_experts(model, on_gpu(LAYERS[options.quantization], TORCH_DTYPES[run_dtype], model.device))
        prompts = _prompts(model, config, windows, place)
    elif options.device != "cpu" and options.expert_kernel != "builtin":
        take_flashinfer(model, options.expert_kernel)
        prompts = _prompts(model, config, windows, place)
    return layers, why, prompts, packed / max(1, total)


def _prompts(model: PreTrainedModel, config: GeneralConfig, windows: tuple[int, ...], place: Place) -> Prompts:
    """Prompts with the model's logits.

    Raises:
        ValueError, UnfitError, CollectiveError: it yields none; of several ranks, the text names the degree.
    """
    try:
        return Prompts(model, config.vocab_size, windows, config.max_positions, place.group)
    except (CollectiveError, UnfitError):
        raise
    except Exception as error:  # the model's code fails in whatever way
        if place.group.size == 1:
            raise
        raise ValueError(
            f"tensor_parallel is {place.group.size}; allowed: 1, because the plan of {config.architecture} doesn't"
            f" suit its code: {error}"
        ) from error


def run_dtype_of(dtype: Dtype, config: GeneralConfig, device: torch.device) -> FloatDtype:
    """Dtype in which the weights are used."""
    if dtype != "auto":
        return dtype
    return "float32" if config.dtype == "float16" and device.type == "cpu" else config.dtype
