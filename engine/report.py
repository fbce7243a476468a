"""Report of how a model runs on this machine: path, way, state of a sequence, and unavailable features."""

from dataclasses import dataclass, replace
from pathlib import Path

from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.engine.degree import MAX_RANKS
from kvrelay.engine.kv.layout import CacheLayout
from kvrelay.engine.models.choice import is_fast
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.models.reading.config import allowed_degrees, read_config
from kvrelay.kernels.cpu.library import library

POOL_BYTES = 2**26
"""Size of the pools of a model that is only looked at."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Report of how a model runs."""

    architecture: str
    dtype: str
    path: str
    """`fast` or `general`."""
    way: str
    """Way of the general path, with transformers' version; empty on the fast one."""
    slower_because: tuple[tuple[str, str], ...]
    """Faster ways, each with the reason why the model can't be run in it."""
    groups: tuple[tuple[str, int, int], ...]
    """(kind, window, bytes) of each layer group: bytes of a token, or of a sequence's whole state."""
    unavailable: tuple[tuple[str, str], ...]
    """Features that aren't available, and why."""
    tensor_parallel: tuple[int, ...] = (1,)
    """Numbers of ranks that each layer can be divided over."""
    pipeline_parallel: int = 1
    """Largest number of stages."""
    speculation: tuple[str, ...] = ()
    """Methods that may guess tokens."""
    native: tuple[str, ...] = ()
    """Names of the parts of a step that kvrelay's native kernels compute; torch computes the others."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token that all tokens of a sequence take."""
        return sum(size for kind, window, size in self.groups if kind != "state" and not window)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence whatever its length: its states, and its windows when they are full."""
        states = sum(size for kind, _, size in self.groups if kind == "state")
        return states + sum(window * size for _, window, size in self.groups)


def report_on(folder: Path, dtype: Dtype, options: EngineConfig) -> ModelReport:
    """Report of how the model in `folder` runs on the CPU. Loads its weights, unless it is on the fast path.

    Raises:
        ValueError: it can't be served; the text says why.
    """
    if is_fast(folder, options.model_path, options.on("cpu"), dtype):
        # Imported here because torch takes seconds.
        from kvrelay.engine.models.fast.native import fits

        config = read_config(folder).for_context(options.max_context)
        run_dtype = config.run_dtype(dtype)
        whole = config.kv_layout(run_dtype, options.kv_dtype, options.on("cpu").block_size, "NHD")
        layout = config.cache_layout(whole, min(config.max_positions, options.max_context or config.max_positions))
        block = Checkpoint(folder).block_of("self_attn.o_proj")
        degrees = tuple(allowed_degrees(config, options.quantization, block)), min(config.layers, MAX_RANKS)
        guesses = "ngram", "suffix", "draft", "medusa", "eagle3"
        native = ("all layers",) if run_dtype != "float16" and fits(config) and library() is not None else ()
        unavailable = (("mtp", "it needs model_path general, and a checkpoint that brings the layer along"),)
        return ModelReport(
            config.architecture, run_dtype, "fast", "", (), _groups(layout), unavailable, *degrees, guesses, native
        )
    # Imported here because transformers takes seconds.
    from kvrelay.engine.models.general.reading import VERSION, degrees_of
    from kvrelay.engine.runner.general import build_general_runner
    from kvrelay.engine.speculate.mtp import brings_layer

    options = replace(options.on("cpu"), kv_memory_bytes=options.kv_memory_bytes or POOL_BYTES, max_sequences=1)
    runner = build_general_runner(folder, dtype, options)
    runner.warm_up()
    layout = runner.cache_layout
    lacking = [("medusa, eagle3", "transformers' code doesn't yield the hidden states that their heads read")]
    methods = ["ngram", "suffix", "draft"]
    if runner.states_shape is not None and brings_layer(folder):
        methods.append("mtp")
    else:
        lacking.append(("mtp", "the checkpoint brings no layer for it, or the model doesn't run flat"))
    if any(group.kind == "state" for group in layout.groups) and not runner.rolls_back:
        methods = []
        lacking.append(("speculation", "a state can't be taken back when a guess was wrong"))
    return ModelReport(
        runner.spec.architecture,
        runner.spec.dtype,
        "general",
        f"{runner.choice.name}, transformers {VERSION}",
        runner.choice.refused,
        _groups(layout),
        tuple(lacking),
        tuple(degrees_of(folder)),
        speculation=tuple(methods),
        native=tuple(runner.native),
    )


def _groups(layout: CacheLayout) -> tuple[tuple[str, int, int], ...]:
    return tuple(
        (group.kind, group.window, sum(track.token_bytes for track in group.tracks))
        for group in layout.groups
        if group.tracks
    )
