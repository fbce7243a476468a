"""Choice of the code that runs a model on so many ranks: kvrelay's own, or that of transformers."""

from pathlib import Path

from kvrelay.engine.config import Dtype, EngineConfig, ModelPath
from kvrelay.engine.degree import ONE
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.models.reading.config import ModelConfig, check_degree, check_experts, is_of_family, read_config
from kvrelay.kernels.cpu.library import library
from kvrelay.machine.options import require


def is_fast(folder: Path, path: ModelPath, options: EngineConfig | None = None, dtype: Dtype | None = None) -> bool:
    """Whether kvrelay's own code runs the model in `folder`, rather than that of transformers.

    Args:
        options: of a worker, with its device; None where only the model counts.
        dtype: of a worker on this machine, whose kernels count then; None where another one may run it.

    Raises:
        ValueError: the model's config can't be read, or `path` is fast and such a worker can't run it so.
    """
    if path == "general":
        return False
    if path == "fast":
        model = read_config(folder) if options is not None else None
        reason = "" if model is None or options is None else _unfit(model, options, dtype)
        if reason:
            raise ValueError(f"model_path is 'fast'; allowed: auto, general, because {reason}")
        return True
    try:
        model = read_config(folder)
    except ValueError as error:
        # Imported here because transformers takes seconds, which models of the fast path needn't wait for.
        from kvrelay.engine.models.general.reading import read_general_config

        try:
            read_general_config(folder)
        except ValueError as other:
            # The more helpful error: a family's own config is read more strictly.
            raise (error if is_of_family(folder) else other) from None
        return False
    return options is None or not _unfit(model, options, dtype)


def _unfit(model: ModelConfig, options: EngineConfig, dtype: Dtype | None) -> str:
    """The reason why such a worker can't run a model of one of kvrelay's families by kvrelay's own code; empty if it
    can."""
    if model.traits.experts is None:
        return ""
    if model.is_gguf:
        return "its experts are in a GGUF file"
    parts = options.expert_parallel
    if parts not in (1, options.tensor_parallel):
        return f"each of {parts} parts of its experts is on several ranks"
    if options.device == "cuda":
        return "its experts run on a GPU"
    if dtype == "float16" or (dtype is not None and library() is None):
        return "its experts need the native CPU kernels"
    return ""


def check_ranks(folder: Path, options: EngineConfig) -> None:
    """Checks, before anything is started or loaded, that a worker's ranks can compute the model in `folder`.

    Raises:
        ValueError: they can't; the text names the option, its value and what is allowed.
    """
    if options.degree == ONE:
        return
    if not is_fast(folder, options.model_path, options):
        several = f"cpu for {options.degree.ranks} ranks of a model that transformers' code runs"
        require(options.device != "cuda", "device", options.device, several)
        exchange, allowed = options.expert_exchange, "auto, all_reduce for a model that transformers' code runs"
        require(exchange != "all_to_all", "expert_exchange", exchange, allowed)
        spares = options.spare_experts
        require(not spares, "spare_experts", spares, "0 for a model that transformers' code runs")
        # Imported here because transformers takes seconds, which models of the fast path needn't wait for.
        from kvrelay.engine.models.general.reading import check_division

        check_division(folder, options.degree, options.expert_parallel)
        return
    block = Checkpoint(folder).block_of("self_attn.o_proj")
    model = read_config(folder)
    check_experts(model, options.expert_parallel, options.expert_exchange, options.spare_experts)
    check_degree(model, options.degree, options.quantization, block)
