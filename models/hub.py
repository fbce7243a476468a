"""Models of the Hugging Face hub, by `hf:ORG/NAME` or `ORG/NAME`, either with `@REVISION` behind it.

The library `huggingface_hub` downloads them into its cache, shows a progress bar on a terminal, takes up a broken
connection where it ended, and reads its variables: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Files that the cache
has are not downloaded again, and a revision that it has is used without the hub if the hub can't be reached.

Only the files named here are downloaded. None of them is code, and none is a pickle.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PREFIX = "hf:"
FORM = "hf:ORG/NAME or hf:ORG/NAME@REVISION"
_ADDRESS = re.compile(r"(?P<prefix>hf:)?(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template*",
)
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "medusa_lm_head.safetensors",
)
BAR_SECONDS = 0.5


def name_of(model: str) -> str | None:
    """ORG/NAME of a model that is given as one of the hub, with or without the prefix; None if it has another form."""
    address = _ADDRESS.fullmatch(model)
    return None if address is None else address["name"]


def fetch(model: str, *, weights: bool) -> Path:
    """The folder in the hub's cache with a model's files, downloaded first where they are missing.

    Args:
        model: `hf:ORG/NAME` or `ORG/NAME`, with `@REVISION` for a branch, tag or commit other than main.
        weights: False for what a tokenizer needs.

    Raises:
        ValueError: the name is malformed, there is no such model, or it can't be had; the text says which and why.
    """
    address = _ADDRESS.fullmatch(model)
    if address is None:
        raise ValueError(f"model: {model!r} is no name of the Hugging Face hub; give {FORM}")
    absent = "" if address["prefix"] else "is no folder here, and as a model of the Hugging Face hub it "
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
        raise ValueError(f"model: {model!r} {absent}needs huggingface_hub; run `pip install 'kvrelay[hub]'`") from None
    patterns = [*TEXT_FILES, *(WEIGHTS if weights else ())]
    try:
        with _bar(address["name"]) as bar:
            folder = huggingface_hub.snapshot_download(
                address["name"], revision=address["revision"], allow_patterns=patterns, tqdm_class=bar
            )
    except GatedRepoError:
        why = "its owner gives access on request; ask for it on its page, and set HF_TOKEN"
    except RepositoryNotFoundError:
        why = "the hub has no such model; check the name, and set HF_TOKEN if it is private"
    except RevisionNotFoundError:
        why = f"it has no revision {address['revision']!r}; its page lists the branches, tags and commits"
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        why = (
            "it is not in the cache, and the hub can't be reached or HF_HUB_OFFLINE is set; download it where there is "
            "a network, and give its folder"
        )
    except (HfHubHTTPError, OSError) as error:
        why = " ".join(str(error).split())
    except Exception as error:  # noqa: BLE001 - those of its HTTP library, whose name differs between its versions
        why = f"the download broke off ({' '.join(str(error).split())}); what has come is kept, so try again"
    else:
        if not weights or any(Path(folder).glob("*.safetensors")):
            return Path(folder)
        why = "it has no weights in safetensors; pickled ones are never read, so convert them (docs/troubleshooting.md)"
    raise ValueError(f"model: {model!r} {absent}can't be had: {why}")


@contextmanager
def _bar(name: str) -> Iterator[type]:
    """The class of the library's progress bars. Of several that it makes, one is shown, while the `with` lasts.

    It counts the bytes on disk, on a terminal only, and only if the download takes BAR_SECONDS or more.
    """
    from huggingface_hub.utils.tqdm import tqdm

    made: list[tqdm] = []

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            options |= {"desc": name, "leave": False, "delay": BAR_SECONDS}
            if options.get("unit") != "B" or str(options.get("name")).endswith(".transfer"):
                options["disable"] = True  # counts files, or bytes on the network
            super().__init__(*args, **options)  # type: ignore[no-untyped-call]  # it has no types
            made.append(self)

        def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
            """Does nothing, so that the model's name stays in front."""

        set_description_str = set_description

    try:
        yield Bar
    finally:
        for bar in made:  # the library leaves them open, so that they would be drawn over what is printed next
            bar.close()
