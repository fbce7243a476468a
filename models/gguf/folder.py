"""The Hugging Face folder of a GGUF model, in the user's cache."""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvrelay.machine.cache import user_cache
from kvrelay.machine.gguf import GENERAL_SUFFIX, INDEX
from kvrelay.models.gguf.config import (
    CLASSES,
    INTERLEAVED,
    ROPE_FACTORS,
    config_of,
    hugging_face_name,
    needed_names,
)
from kvrelay.models.gguf.header import GGUFError, Header, TensorInfo, read_header
from kvrelay.models.gguf.tokenizer import tokenizer_of

SUFFIX = ".gguf"
MAX_FOLDERS = 64
"""Limit of the number of models whose folders are kept; those that were used longest ago are removed first."""
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def files_in(path: Path) -> list[Path]:
    """The files of the model at a path: a GGUF file with its splits, or those of the one model in a folder, if any.

    Raises:
        ValueError: a split is missing, or the folder has several models; the text names them.
    """
    if path.is_dir():
        found = sorted(path.glob(f"*{SUFFIX}"))
        if len({name_of(file) for file in found}) > 1:
            names = ", ".join(file.name for file in found)
            raise ValueError(f"model: {path} holds several GGUF models; give one of them: {names}")
        return files_in(found[0]) if found else []
    match = _SPLIT.fullmatch(path.name)
    if match is None or not (count := int(match["count"])):
        return [path]
    parts = [path.with_name(f"{match['stem']}-{part + 1:05}-of-{match['count']}{SUFFIX}") for part in range(count)]
    for part in parts:
        if not part.is_file():
            raise GGUFError(part, f"no such file, though {path.name} is one of {count} splits")
    return parts


def name_of(file: Path) -> str:
    """The name of a file's model: the file's own, without its number if it is a split."""
    match = _SPLIT.fullmatch(file.name)
    return match["stem"] if match else file.stem


def folder_of(files: Sequence[Path], name: str | None = None) -> Path:
    """The folder of a model's files, written unless it is there.

    Args:
        name: of the model; the file's, without splits' numbers, unless given.

    Raises:
        GGUFError: a file is cut short or damaged, its architecture isn't served, or it lacks a tokenizer; the text
            names file and field.
    """
    files = [file.resolve() for file in files]
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for file in files:
        stat = file.stat()
        digest.update(
            f"{file} {stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} ".encode()
        )
    home = user_cache() / "gguf" / digest.hexdigest()[:24]
    folder = home / (name or name_of(files[0]))
    if not (folder / INDEX).is_file():
        _write(folder, _contents(files))
        by_age = sorted(home.parent.iterdir(), key=lambda each: each.stat().st_mtime)
        for old in by_age[:-MAX_FOLDERS]:
            shutil.rmtree(old, ignore_errors=True)
    os.utime(home)
    return folder


def _contents(files: Sequence[Path]) -> Mapping[str, str]:
    """The text of each file of the folder."""
    headers = [read_header(file) for file in files]
    first = headers[0]
    for number, header in enumerate(headers):
        count = header.integer("split.count", 1 if len(files) == 1 else None)
        if count != len(files):
            header.refuse(
                "split.count", f"{len(files)}, the number of files; splits are named NAME-00001-of-0000N.gguf"
            )
        if header.integer("split.no", number, minimum=0) != number:
            header.refuse("split.no", f"{number}, as the file's name says")
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise GGUFError(header.path, f"tensor {name} is in {tensors[name].path.name} too")
            tensors[name] = tensor
    whole = Header(first.path, first.metadata, tensors)
    config = config_of(whole)
    tokenizer, tokenizer_config = tokenizer_of(whole)
    count, vocab_size = tokenizer.get_vocab_size(), config["vocab_size"]
    if count > vocab_size:
        raise GGUFError(
            first.path,
            f"tokenizer.ggml.tokens has {count} tokens; allowed: up to {vocab_size}, as many as are embedded",
        )
    return {
        "config.json": json.dumps(config, indent=1),
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=1),
        INDEX: json.dumps({"tensors": _places(whole, config)}),
    }


def _places(header: Header, config: Mapping[str, Any]) -> dict[str, Any]:
    """The place of each tensor by its Hugging Face name, or by its own if transformers' code runs the model."""
    if config["model_type"].endswith(GENERAL_SUFFIX):
        return {name: _place(tensor) for name, tensor in header.tensors.items()}
    places = {}
    interleaved = config["model_type"] in INTERLEAVED
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in header.tensors.items():
        if name == ROPE_FACTORS:
            continue
        theirs = hugging_face_name(name)
        if theirs is None:
            raise GGUFError(tensor.path, f"tensor {name}: {CLASSES[config['model_type']]} has no such tensor")
        places[theirs] = _place(tensor, heads.get(theirs.split(".")[-2], 0) if interleaved else 0)
    for name in needed_names(config):
        if name not in header.tensors:
            raise GGUFError(header.path, f"tensor {name} is missing")
    return places


def _place(tensor: TensorInfo, interleaved_heads: int = 0) -> dict[str, Any]:
    return {
        "path": str(tensor.path),
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "begin": tensor.begin,
        "end": tensor.end,
        "interleaved_heads": interleaved_heads,
    }


def _write(folder: Path, contents: Mapping[str, str]) -> None:
    """Writes a folder atomically; leaves a folder that another process has written first."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name, text in contents.items():
            (made / name).write_text(text, encoding="utf-8")
        try:
            os.rename(made, folder)
        except OSError:
            if not (folder / INDEX).is_file():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
