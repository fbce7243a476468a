"""Reads a cluster's configuration file; each mistake in it is one line."""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvrelay.cluster.config import ClusterConfig, schema
from kvrelay.cluster.errors import UsageError

MAX_FILE_BYTES = 2**20
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
# The text of every options class for a value out of its range; see kvrelay.engine.config.require.
_OUT_OF_RANGE = re.compile(r"(?P<field>[\w.]+) is (?P<value>.*); allowed: (?P<allowed>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Override:
    """A value given on the command line."""

    flag: str
    value: object


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, where a duplicate key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                raise yaml.MarkedYAMLError(problem="a key must be a name", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load(path: Path | None = None, overrides: Mapping[str, Override] | None = None) -> ClusterConfig:
    """The configuration of a YAML file (None: the defaults), with `overrides` (by key, e.g. `router.grpc_port`) on top.

    Raises:
        UsageError: the file can't be read, or a key or value isn't allowed.
    """
    values = {} if path is None else _read(path)
    overrides = overrides or {}
    for key, override in overrides.items():
        section, _, field = key.partition(".")
        below = values.get(section, {})
        if not field:
            values[section] = override.value
        elif isinstance(below, dict):
            values[section] = {**below, field: override.value}
    try:
        return ClusterConfig.model_validate(values)
    except ValidationError as error:
        source = "" if path is None else f"{path}: "
        raise UsageError(*(_line(problem, source, overrides) for problem in error.errors())) from None


def dump(config: ClusterConfig) -> str:
    """The configuration as YAML, every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"{path}: more than {MAX_FILE_BYTES} bytes")
        values = yaml.load(data.decode(), _Loader)
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
    return {str(key): {} if value is None else value for key, value in (values or {}).items()}


def _line(problem: ErrorDetails, source: str, overrides: Mapping[str, Override]) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] in _UNKNOWN_KEY:
        return f"{source}{path}: unknown key; {_suggestion(path)}"
    value = _short(repr(problem["input"]))
    allowed = problem["msg"].removeprefix("Input should be ")
    if problem["type"] == "value_error":
        allowed = allowed.removeprefix("Value error, ")
        if match := _OUT_OF_RANGE.fullmatch(allowed):
            path = f"{path}.{match['field']}".removeprefix(".")
            value, allowed = _short(match["value"]), match["allowed"]
    elif problem["type"] in ("model_type", "dataclass_type", "dict_type"):
        allowed = "a mapping of keys to values"
    if path in overrides:
        source, path = "", overrides[path].flag
    return f"{source}{path} is {value}; allowed: {allowed}"


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _suggestion(path: str) -> str:
    """The nearest keys of the same section, the same key of another section, or all keys of the section."""
    section, _, key = path.rpartition(".")
    known = dict(_keys(schema()))
    near = difflib.get_close_matches(key, known.get(section, []), n=2, cutoff=0.7)
    near = near or [f"{other}.{key}".removeprefix(".") for other, keys in known.items() if key in keys][:3]
    return f"did you mean {' or '.join(near)}?" if near else f"allowed: {', '.join(known.get(section, []))}"


def _keys(root: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Every section's path with its keys, from the JSON schema."""
    stack = [("", root)]
    while stack:
        path, node = stack.pop()
        if "$ref" in node:
            node = root["$defs"][node["$ref"].rpartition("/")[2]]
        if "properties" in node:
            yield path, list(node["properties"])
            stack += [(f"{path}.{key}".removeprefix("."), child) for key, child in node["properties"].items()]
