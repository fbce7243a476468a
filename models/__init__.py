"""Models by name: the bundled ones, those of the package index (`packages.py`) and of the Hugging Face hub (`hub.py`);
and GGUF files (`gguf/`), and the script that trained the bundled ones.

Importing this package imports no torch, so that the router can resolve a model's name.
"""

from pathlib import Path

from kvrelay.models import gguf, hub, packages

_HERE = Path(__file__).resolve().parent


def names() -> tuple[str, ...]:
    """The names of the bundled models, sorted."""
    return tuple(sorted(config.parent.name for config in _HERE.glob("*/config.json")))


def bundled(name: str) -> Path | None:
    """The folder of the bundled model `name`, or None if there is no such model."""
    return _HERE / name if name in names() else None


def _on_hub(model: str) -> bool:
    """Whether a model that isn't bundled is one of the hub: by its prefix, or by its form if there is no such path."""
    named = hub.name_of(model) is not None and not model.endswith(gguf.SUFFIX)
    return model.startswith(hub.PREFIX) or (named and not Path(model).exists())


def resolve(model: str, *, weights: bool = True) -> Path:
    """The folder of a model: a bundled one, by its name; one of the package index, by its name, or of the Hugging Face
    hub, by `hf:ORG/NAME` or `ORG/NAME`, which is downloaded where the cache doesn't have it; a Hugging Face folder, by
    its path; or a GGUF file or a folder with one, by its path, for which a Hugging Face folder is made (`gguf/`).

    A bundled name takes precedence over a folder of the same name; write `./name` for that folder. A folder takes
    precedence over a model of the hub; write `hf:ORG/NAME` for that model.

    Args:
        weights: whether the weights are needed, besides the configuration and the tokenizer.

    Raises:
        ValueError: it is none of them, or can't be downloaded.
    """
    if (folder := bundled(model)) is not None:
        return folder
    if model in packages.MODELS:
        return gguf.folder_of([packages.fetch(model)], model)
    if _on_hub(model):
        return hub.fetch(model, weights=weights)
    paths = "the path of a folder with a config.json, or of a GGUF file"
    allowed = f"{paths}, {hub.FORM}, or one of {', '.join((*names(), *packages.MODELS))}"
    path = Path(model).expanduser()
    if model and path.suffix == gguf.SUFFIX and path.is_file():
        return gguf.folder_of(gguf.files_in(path))
    if not model or not path.is_dir():
        raise ValueError(f"model: {model!r} is neither a folder nor a GGUF file nor a bundled model; give {allowed}")
    if not any(path.glob("*.safetensors*")) and (files := gguf.files_in(path)):
        return gguf.folder_of(files)
    if not (path / "config.json").is_file():
        raise ValueError(f"model: the folder {model!r} holds no config.json and no GGUF file; give {allowed}")
    return path


def model_name(model: str) -> str:
    """The name of a model, without asking the hub: a bundled or packaged one's, ORG/NAME of the hub, or that of its
    folder or GGUF file."""
    if bundled(model) is not None or model in packages.MODELS:
        return model
    if _on_hub(model) and (name := hub.name_of(model)) is not None:
        return name
    folder = Path(model).expanduser().resolve()
    if folder.suffix == gguf.SUFFIX:
        return gguf.name_of(folder)
    # The hub's cache keeps ORG/NAME as models--ORG--NAME/snapshots/COMMIT.
    kind, _, name = folder.parent.parent.name.partition("--")
    if folder.parent.name == "snapshots" and kind == "models" and name:
        return name.replace("--", "/", 1)
    return folder.name
