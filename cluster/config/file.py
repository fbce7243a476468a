"""Reads a cluster's configuration file; each mistake in it is one line."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kvrelay.cluster.config.options import ClusterConfig, schema
from kvrelay.cluster.errors import UsageError
from kvrelay.machine.options import Mistake

MAX_FILE_BYTES = 2**20
MERGE = "tag:yaml.org,2002:merge"
"""YAML's tag of `<<`, whose mapping's keys are those that aren't given beside it."""
ANY = "*"


@dataclass(frozen=True, slots=True)
class Override:
    """A value given on the command line."""

    flag: str
    value: object


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, where a duplicate key is an error."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # what looks like a date or a number, such as 2024-13-45 and 0x_
            raise yaml.MarkedYAMLError(problem=f"{node.value}: {error}", problem_mark=node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                raise yaml.MarkedYAMLError(problem="a key must be a name", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load(path: Path | None = None, overrides: Mapping[str, Override] | None = None) -> ClusterConfig:
    """The configuration of a YAML file (None: the defaults), with `overrides` on top, in their order.

    Args:
        overrides: by key, e.g. `router.grpc_port`.

    Raises:
        UsageError: the file can't be read, or a key or value isn't allowed.
    """
    values, root = ({}, None) if path is None else _read(path)
    overrides = overrides or {}
    for key, override in overrides.items():
        values = _with(values, key.split("."), override.value)
    try:
        return ClusterConfig.model_validate(values)
    except ValidationError as error:
        raise UsageError(*(_line(Mistake.of(each), path, root, overrides) for each in error.errors())) from None


def dump(config: ClusterConfig) -> str:
    """The configuration as YAML, every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def parsed(text: str) -> Any:
    """The value of a text in YAML.

    Raises:
        yaml.YAMLError: it isn't YAML, or nested too deeply.
    """
    return _parsed(text)[0]


def _parsed(text: str) -> tuple[Any, yaml.Node | None]:
    """The value, and the node that it is from."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        return (None if root is None else loader.construct_document(root)), root
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


def _read(path: Path) -> tuple[dict[str, Any], yaml.Node | None]:
    """The values of a file, and the node of YAML that they are from."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"{path}: more than {MAX_FILE_BYTES} bytes")
        values, root = _parsed(data.decode())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8") from None
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise UsageError(f"{path}: {where}{error.problem or 'not YAML'}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict | None):
        raise UsageError(f"{path}: holds a {type(values).__name__}; allowed: a mapping of sections")
    # An empty section (`engine:` and nothing below) takes its defaults.
    return {str(key): {} if value is None else value for key, value in (values or {}).items()}, root


def _with(values: dict[str, Any], path: Sequence[str], value: object) -> dict[str, Any]:
    """A copy of `values` with another value at `path`. Sections above it are made; one that is no mapping stays as it
    is."""
    key, *rest = path
    if rest:
        section = values.get(key, {})
        value = _with(section, rest, value) if isinstance(section, dict) else section
    return {**values, key: value}


def _line(mistake: Mistake, file: Path | None, root: yaml.Node | None, overrides: Mapping[str, Override]) -> str:
    key, text = ".".join(mistake.path), mistake.text
    if mistake.unknown_key:
        text += _suggestion(mistake.path)
    for depth in range(len(mistake.path), 0, -1):
        if (override := overrides.get(".".join(mistake.path[:depth]))) is not None:
            return ".".join((override.flag, *mistake.path[depth:])) + text
    number = _line_number(root, mistake.path)
    where = "" if file is None else f"{file}: " if number is None else f"{file}: line {number}: "
    return where + key + text


def _line_number(root: yaml.Node | None, path: Sequence[str]) -> int | None:
    """The line of the key at `path`, or of the nearest section above it that the file has; None if it has none."""
    node, number = root, None
    for part in path:
        pairs: list[tuple[yaml.Node, yaml.Node]] = []
        if isinstance(node, yaml.MappingNode):
            pairs = [(key, value) for key, value in node.value if key.value == part]
        elif isinstance(node, yaml.SequenceNode):
            pairs = [(value, value) for index, value in enumerate(node.value) if str(index) == part]
        if not pairs:
            break
        key, node = pairs[-1]  # before it are those of a merged mapping (`<<`)
        number = key.start_mark.line + 1
    return number


def _suggestion(path: Sequence[str]) -> str:
    """The nearest keys of the same section, the same key of another section, or all keys of the section."""
    *section, key = path
    sections = _sections()
    known = next((keys for name, keys in sections.items() if _same(name, section)), [])
    near = difflib.get_close_matches(key, known, n=2, cutoff=0.7)
    near = near or [".".join((*name, key)) for name, keys in sections.items() if key in keys and ANY not in name][:3]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; allowed: {', '.join(known)}" if known else ""


@cache
def _sections() -> dict[tuple[str, ...], list[str]]:
    """The keys of every section, by the section's path."""
    return dict(_keys(schema()))


def _same(name: Sequence[str], path: Sequence[str]) -> bool:
    return len(name) == len(path) and all(one in (other, ANY) for one, other in zip(name, path, strict=True))


def _keys(root: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Every section's path with its keys, from the JSON schema; ANY is a name that the file chooses."""
    stack: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), root)]
    while stack:
        path, node = stack.pop()
        if "$ref" in node:
            node = root["$defs"][node["$ref"].rpartition("/")[2]]
        if isinstance(chosen := node.get("additionalProperties"), dict):
            stack.append(((*path, ANY), chosen))
        if "properties" in node:
            yield path, list(node["properties"])
            stack += [((*path, key), child) for key, child in node["properties"].items()]
