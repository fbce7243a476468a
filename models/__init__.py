"""The bundled models, by name, and the script that trained them (`train.py`).

Importing this package imports no torch, so that the router can resolve a model's name.
"""

from pathlib import Path

_HERE = Path(__file__).resolve().parent


def names() -> tuple[str, ...]:
    """The names of the bundled models, sorted."""
    return tuple(sorted(config.parent.name for config in _HERE.glob("*/config.json")))


def bundled(name: str) -> Path | None:
    """The folder of the bundled model `name`, or None if there is no such model."""
    return _HERE / name if name in names() else None


def resolve(model: str) -> Path:
    """The folder of a model, given by the name of a bundled model or by the path of a Hugging Face folder.

    A bundled name takes precedence over a folder of the same name; write `./name` for that folder.

    Raises:
        ValueError: it is neither.
    """
    if (folder := bundled(model)) is not None:
        return folder
    allowed = f"the path of a folder with a config.json, or a bundled model: {', '.join(names())}"
    path = Path(model).expanduser()
    if not model or not path.is_dir():
        raise ValueError(f"model: {model!r} is neither a folder nor a bundled model; give {allowed}")
    if not (path / "config.json").is_file():
        raise ValueError(f"model: the folder {model!r} holds no config.json; give {allowed}")
    return path
