"""What runs a model: kvrelay's own code, or that of transformers, on so many ranks."""

from pathlib import Path

from kvrelay.engine.config import EngineConfig, ModelPath
from kvrelay.engine.degree import ONE
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.models.reading.config import check_degree, is_of_family, read_config
from kvrelay.machine.options import require


def is_fast(folder: Path, path: ModelPath) -> bool:
    """Whether kvrelay's own code runs the model in `folder`, rather than that of transformers.

    Raises:
        ValueError: the model's config can't be read.
    """
    if path != "auto":
        return path == "fast"
    try:
        read_config(folder)
    except ValueError as error:
        # Imported here because transformers takes seconds, which models of the fast path needn't wait for.
        from kvrelay.engine.models.general.reading import read_general_config

        try:
            read_general_config(folder)
        except ValueError as other:
            # The one that says most: a family's own config is read more strictly.
            raise (error if is_of_family(folder) else other) from None
        return False
    return True


def check_ranks(folder: Path, options: EngineConfig) -> None:
    """Checks, before anything is started or loaded, that a worker's ranks can compute the model in `folder`.

    Raises:
        ValueError: they can't; the text names the option, its value and what is allowed.
    """
    if options.degree == ONE:
        return
    if not is_fast(folder, options.model_path):
        several = f"cpu for {options.degree.ranks} ranks of a model that transformers' code runs"
        require(options.device != "cuda", "device", options.device, several)
        # Imported here because transformers takes seconds, which models of the fast path needn't wait for.
        from kvrelay.engine.models.general.reading import check_division

        check_division(folder, options.degree, options.expert_parallel)
        return
    experts = options.expert_parallel
    require(experts == 1, "expert_parallel", experts, "1 for a model without experts")
    block = Checkpoint(folder).block_of("self_attn.o_proj")
    check_degree(read_config(folder), options.degree, options.quantization, block)
