"""What transformers says of GGUF files whose architecture no family has, for models that run by its own code."""

from pathlib import Path
from typing import Any


def transformers_config(file: Path) -> Any:
    """transformers' configuration of a GGUF file's model.

    Raises:
        ValueError: transformers doesn't know the architecture, or isn't installed; the text names the file.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(f"{file}: its architecture needs transformers; run `pip install transformers gguf`") from None
    try:
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{file}: transformers can't read its configuration: {error}") from error
