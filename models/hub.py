"""Models of the Hugging Face hub, by `hf:ORG/NAME` or `hf:ORG/NAME@REVISION`.

The library `huggingface_hub` downloads them into its cache, shows a progress bar on a terminal, takes up a broken
connection where it ended, and reads its variables: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Files that the cache
has are not downloaded again, and a revision that it has is used without the hub if the hub can't be reached.
"""

import re
from pathlib import Path

PREFIX = "hf:"
FORM = "hf:ORG/NAME or hf:ORG/NAME@REVISION"
_ADDRESS = re.compile(r"hf:(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template*",
)
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "pytorch_model.bin")
"""Names of the files in which speculative heads are published, where they are no `model.safetensors`."""


def fetch(model: str, *, weights: bool, heads: bool) -> Path:
    """The folder in the hub's cache with a model's files, downloaded first where they are missing.

    Args:
        model: `hf:ORG/NAME`, with `@REVISION` for a branch, tag or commit other than main.
        weights: False for what a tokenizer needs.
        heads: whether it is a model's speculative heads.

    Raises:
        ValueError: the name is malformed, there is no such model, or it can't be had; the text says which and why.
    """
    address = _ADDRESS.fullmatch(model)
    if address is None:
        raise ValueError(f"model: {model!r} is no name of the Hugging Face hub; give {FORM}")
    try:
        import huggingface_hub
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError:
        raise ValueError(f"model: {model!r} needs huggingface_hub; run `pip install 'kvrelay[hub]'`") from None
    patterns = [*TEXT_FILES, *(WEIGHTS if weights else ()), *(HEADS if heads else ())]
    try:
        folder = huggingface_hub.snapshot_download(
            address["name"], revision=address["revision"], allow_patterns=patterns
        )
    except GatedRepoError:
        why = "its owner gives access on request; ask for it on its page, and set HF_TOKEN"
    except RepositoryNotFoundError:
        why = "the hub has no such model, or it is private and HF_TOKEN is not set"
    except RevisionNotFoundError:
        why = f"it has no revision {address['revision']!r}"
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        why = "it is not in the cache, and the hub can't be reached or HF_HUB_OFFLINE is set"
    except (HfHubHTTPError, OSError) as error:
        why = " ".join(str(error).split())
    else:
        return Path(folder)
    raise ValueError(f"model: {model!r} can't be had: {why}")
