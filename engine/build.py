"""Builds an engine from a checkpoint."""

import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kvrelay.engine.config import (
    STATE_METHODS,
    Device,
    Dtype,
    EngineConfig,
    SpeculationConfig,
)
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv.blocks import BlockPool
from kvrelay.engine.kv.memory import asking, memory_of
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.kv.prefix import PrefixIndex
from kvrelay.engine.kv.sides import SidePool, blocks_without_kv
from kvrelay.engine.models.choice import check_ranks, is_fast
from kvrelay.engine.models.fast.loader import OnLoaded, load_embedding
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.models.reading.config import read_config
from kvrelay.engine.ranks.collective import ALONE, Place
from kvrelay.engine.runner.base import ChainRunner, ModelRunner, Runner
from kvrelay.engine.runner.cpu import build_cpu_runner
from kvrelay.engine.runner.leading import LeadingModelRunner, LeadingRunner, Ranks
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.speculate import eagle_model, medusa
from kvrelay.engine.speculate.base import Proposer
from kvrelay.engine.speculate.draft import DraftProposer
from kvrelay.engine.speculate.eagle import EagleProposer
from kvrelay.engine.speculate.eagle_model import load_eagle
from kvrelay.engine.speculate.lookup import LookupProposer, NgramIndex, SuffixIndex
from kvrelay.engine.speculate.medusa import MedusaProposer, load_medusa
from kvrelay.engine.speculate.speculation import Speculation
from kvrelay.engine.speculate.tensors import find_file
from kvrelay.machine.options import AUTO, require

if TYPE_CHECKING:
    from kvrelay.engine.runner.general import GeneralRunner

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Runner)


def build_engine(
    folder: Path,
    dtype: Dtype,
    options: EngineConfig,
    on_loaded: OnLoaded | None = None,
    ranks: Ranks | None = None,
) -> tuple[Engine, Runner]:
    """An engine on the checkpoint in `folder`, and its runner, on the device that the options ask for.

    Args:
        on_loaded: called with the loaded share of the weights, 0 to 1.
        ranks: of this worker, if it has several; this process is rank 0. A draft model, and heads beside the model,
            are rank 0's alone.

    Raises:
        ValueError: the checkpoint or an option can't be used; the text says which and why.
    """
    device = device_of(options.device)
    memory = torch.cuda.mem_get_info()[1] if device == "cuda" else 0
    options = options.on(device, memory)
    check_ranks(folder, options)
    if not is_fast(folder, options.model_path, options, dtype):
        return _build_general(folder, dtype, options, on_loaded, ranks)
    kernel = options.expert_kernel
    require(kernel != "flashinfer", "expert_kernel", kernel, "auto, builtin for a model without experts")
    if options.speculation.method == "mtp":
        raise ValueError("speculation.method is 'mtp'; allowed with engine.model_path 'general' for this model")
    build = _builder(options)
    if device == "cuda":
        logger.info("the engine computes on %s", torch.cuda.get_device_name())
    place = ALONE if ranks is None else ranks.place
    proposer: Proposer | None
    runner, proposer = _beside_draft(dtype, options, lambda: build(folder, dtype, options, on_loaded, place=place))
    if ranks is not None:
        runner = LeadingModelRunner(runner, ranks)
    if options.speculation.method in STATE_METHODS:
        proposer = state_proposer(options, folder, runner)
        if isinstance(proposer, MedusaProposer):
            most = min(options.speculation.max_tokens, proposer.most)
            options = replace(options, speculation=replace(options.speculation, max_tokens=most))
    return engine_on(runner, options, proposer), runner


def build_rank(folder: Path, dtype: Dtype, options: EngineConfig, place: Place) -> Runner:
    """The runner of a rank other than 0, of a worker whose rank 0 calls `build_engine` with the same options.

    Raises:
        ValueError: as there.
    """
    device = device_of(options.device)
    options = options.on(device, torch.cuda.mem_get_info()[1] if device == "cuda" else 0)
    if not is_fast(folder, options.model_path, options, dtype):
        return _general_runner(folder, dtype, options, None, place)
    return _builder(options)(folder, dtype, options, None, place=place)


def _builder(options: EngineConfig) -> Callable[..., ModelRunner]:
    """Makes a runner of the fast path on the options' device."""
    if options.device != "cuda":
        return build_cpu_runner
    # Imported here because it needs Triton, which doesn't exist for every platform with a CPU runner.
    from kvrelay.engine.runner.gpu import build_gpu_runner

    return partial(build_gpu_runner, later_bytes=heads_bytes(options.speculation))


def _build_general(
    folder: Path, dtype: Dtype, options: EngineConfig, on_loaded: OnLoaded | None, ranks: Ranks | None
) -> tuple[Engine, Runner]:
    """`build_engine` for a model that transformers' code runs.

    Raises:
        ValueError: as there.
    """
    method, allowed = options.speculation.method, "off, ngram, suffix, draft, mtp"
    if method in ("medusa", "eagle3"):
        raise ValueError(
            f"speculation.method is {method!r}; allowed for a model that transformers' code runs: {allowed}"
        )
    if method == "mtp" and ranks is not None:
        raise ValueError("speculation.method is 'mtp'; allowed for a worker of one rank")
    place = ALONE if ranks is None else ranks.place
    proposer: Proposer | None
    general, proposer = _beside_draft(dtype, options, lambda: _general_runner(folder, dtype, options, on_loaded, place))
    if method == "mtp":
        # Imported here for the same reason as the runner.
        from kvrelay.engine.speculate.mtp import mtp_proposer

        proposer = mtp_proposer(options, folder, general)
    runner: Runner = general if ranks is None else LeadingRunner(general, ranks)
    return engine_on(runner, options, proposer, rolls_back=general.rolls_back and ranks is None), runner


def _general_runner(
    folder: Path, dtype: Dtype, options: EngineConfig, on_loaded: OnLoaded | None, place: Place, **draft: Any
) -> "GeneralRunner":
    """See `build_general_runner`."""
    # Imported here because transformers takes seconds, which workers of the fast path needn't wait for.
    from kvrelay.engine.runner.general import build_general_runner

    return build_general_runner(folder, dtype, options, on_loaded, place=place, **draft)


def _beside_draft(dtype: Dtype, options: EngineConfig, build: Callable[[], R]) -> tuple[R, DraftProposer | None]:
    """The runner that `build` makes, and the draft model beside it, if the options name one."""
    drafts, proposer = options.speculation.method == "draft", None
    if drafts and not options.kv_memory_bytes:
        # The draft model comes first, because the served model's KV takes the rest of the memory.
        proposer = draft_proposer(dtype, options, 0)
    runner = build()
    if drafts and proposer is None:
        proposer = draft_proposer(dtype, options, draft_blocks(runner, options))
    if proposer is not None:
        proposer.check(runner.spec)
    return runner, proposer


def draft_options(options: EngineConfig) -> EngineConfig:
    """The options of a draft model."""
    # The options' kernels may not support the draft model's shapes; these support all.
    share = max(0.01, 0.1 * options.memory_share)
    return replace(options, prefill_attention="triton", expert_kernel="builtin", memory_share=share)


def draft_blocks(runner: Runner, options: EngineConfig) -> int:
    """Blocks of a draft model's pool, if `kv_memory_bytes` is given: as many as the served model has for all tokens of
    sequences. If it keeps none of these, as many as its windows would have if they kept all."""
    groups = runner.cache_layout.groups
    if groups[0].tracks:
        return runner.pools[0].num_blocks
    each = sum([track.block_bytes for group in groups if group.kind == "window" for track in group.tracks])
    return options.kv_memory_bytes // each if each else blocks_without_kv(options, runner.spec.max_context)


def draft_proposer(dtype: Dtype, options: EngineConfig, blocks: int) -> DraftProposer:
    """The draft model that the options name. Its rejected guesses are overwritten, also where they had filled a window.

    Args:
        blocks: of its pool; 0 if its memory is a part of `memory_share`, because `kv_memory_bytes` isn't given.

    Raises:
        ValueError: its checkpoint can't be used; the text says why.
    """
    folder, own = Path(options.speculation.draft_model), draft_options(options)
    if not is_fast(folder, options.model_path):
        given = max(1, blocks) if options.kv_memory_bytes else 0
        runner: ChainRunner = _general_runner(folder, dtype, own, None, ALONE, guesses=True, blocks=given)
        return DraftProposer(runner, options.max_batch_tokens)
    if options.kv_memory_bytes:
        config = read_config(folder)
        run_dtype = config.run_dtype(dtype, options.device)
        layout = config.kv_layout(run_dtype, options.kv_dtype, options.block_size, "NHD")
        own = replace(own, kv_memory_bytes=max(1, blocks) * layout.block_bytes)
    return DraftProposer(_builder(options)(folder, dtype, own, slides=False), options.max_batch_tokens)


def device_of(device: Device) -> Device:
    """The device to use, "cpu" or "cuda"; for auto, the GPU if this process sees one that can be used.

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


def on_devices(options: EngineConfig) -> EngineConfig:
    """The options of a worker of several ranks with the device on which all of them compute.

    Raises:
        ValueError: there is no such device, or there are fewer GPUs than ranks.
    """
    device = device_of(options.device)
    if device == "cuda":
        present, ranks = torch.cuda.device_count(), options.degree.ranks // options.hosts
        allowed = f"such that the {ranks} ranks of a machine have a GPU each, of the {present} that this worker sees"
        require(ranks <= present, "tensor_parallel", options.tensor_parallel, allowed)
    return replace(options, device=device)


def engine_on(
    runner: Runner, options: EngineConfig, proposer: Proposer | None = None, *, rolls_back: bool = False
) -> Engine:
    """An engine whose steps `runner` runs, with the options that the runner was made with.

    Args:
        proposer: guesses tokens; None makes the one that the options name, if any.
        rolls_back: whether the runner keeps the states behind guessed tokens, and goes back to the last that was right.

    Raises:
        ValueError: an option that the engine needs is still `auto` (`EngineConfig.on`).
    """
    for name in ("block_size", "max_batch_tokens", "max_sequences"):
        require(getattr(options, name) != AUTO, name, "auto", "a number, as `EngineConfig.on` makes it")
    cache, counts = runner.cache_layout, [pool.num_blocks for pool in runner.pools]
    by_group: dict[int, int] = {}
    for (index, _), count in zip(cache.tracks, counts, strict=True):
        by_group.setdefault(index, count)
    windows = [(group.window, by_group[index]) for index, group in enumerate(cache.groups) if group.kind == "window"]
    pool = BlockPool(by_group.get(0) or blocks_without_kv(options, runner.spec.max_context, windows))
    namespace = hashlib.sha256(f"{runner.spec.fingerprint} {cache}".encode()).digest()
    proposer = proposer or proposer_of(options.speculation)
    sides = []
    for index, group in enumerate(cache.side_groups, start=1):
        spare = 0 if proposer is None or group.kind != "state" else min(options.max_sequences, by_group[index] // 4)
        sides.append(SidePool(group, by_group[index], options.block_size, spare))
    memory = None if 0 in by_group else next((side.pool for side in sides if not side.is_state), None)
    prefix = PrefixIndex(pool, options.block_size, namespace, enabled=options.prefix_cache, sides=sides, memory=memory)
    if proposer is not None and not rolls_back and any(group.kind == "state" for group in cache.groups):
        method = options.speculation.method
        raise ValueError(
            f"speculation.method is {method!r}; allowed for a model whose layers keep a state: 'off', but on CPU,"
            " on one rank, with kvrelay's kernels of its states"
        )
    speculation = None
    if proposer is not None:
        # A step that `launch` computes is measured in CPU time of its thread, which other processes don't change.
        clock = time.monotonic if runner.lag else time.thread_time
        speculation = Speculation(options.speculation, proposer, clock)
    return Engine(Scheduler(options, prefix, runner.spec, runner.lag, speculation), runner)


def proposer_of(config: SpeculationConfig) -> Proposer | None:
    """The proposer that needs no model of its own; None if guesses are off."""
    if config.method == "ngram":
        return LookupProposer(lambda: NgramIndex(config.shortest_match, config.longest_match))
    if config.method == "suffix":
        return LookupProposer(lambda: SuffixIndex(config.shortest_match))
    return None


def heads_bytes(config: SpeculationConfig) -> int:
    """About what the weights of a proposer's heads take, by their file; 0 if it has none.

    Raises:
        ValueError: the file isn't there, or is a pickled one.
    """
    if config.method not in STATE_METHODS:
        return 0
    name = medusa.FILE if config.method == "medusa" else eagle_model.FILE
    return find_file(Path(config.draft_model), name).stat().st_size


def state_proposer(options: EngineConfig, folder: Path, runner: ModelRunner) -> Proposer:
    """The proposer that guesses from the runner's hidden states.

    Args:
        folder: of the served model.

    Raises:
        ValueError: its checkpoint can't be used with the runner's model, or the device lacks memory; the text says why.
    """
    config, model, parts = options.speculation, runner.model, runner.parts
    own, target = Path(config.draft_model), model.config.whole
    with asking(f"what {config.method} needs beside the KV pool", memory_of(parts.device)), parts.running():
        if config.method == "medusa":
            return MedusaProposer(load_medusa(own, target, parts), target, model.norm, parts)
        # A rank of several has a part of the embedding.
        embedding = model.embedding if options.tensor_parallel == 1 else None
        if embedding is None:
            embedding = load_embedding(Checkpoint(folder), parts.dtype)
        eagle = load_eagle(own, target, embedding, parts)
        layout = replace(
            runner.layout,
            layers=1,
            kv_heads=eagle.config.kv_heads,
            head_dim=eagle.config.head_dim,
            dtype=runner.spec.dtype,
        )
        pool = KVPool(layout, max([pool.num_blocks for pool in runner.pools]), parts.device)
        return EagleProposer(eagle, pool, parts, options.max_batch_tokens, config.max_tokens)
