"""The code that runs a model: kvrelay's own, or that of transformers."""

from pathlib import Path

from kvrelay.engine.config import ModelPath
from kvrelay.engine.models.reading.config import is_of_family, read_config


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
