"""Requests that cost the most to be parsed and checked, made from the models and messages that describe requests.

Each place that a request may have is filled in turn with each shape of a large value, be it right or wrong there. A new
field is covered as soon as it is a part of its model or message.
"""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from pydantic import BaseModel

from kvrelay.router.__main__ import GC_THRESHOLDS
from kvrelay.router.faces.http import openapi
from kvrelay.router.request.validation import DETOKENIZE_IDS
from kvrelay.router.request.wire import MAX_ESCAPES, MAX_LISTS, MAX_STRINGS, MAX_VALUES
from kvrelay.v1 import inference_pb2 as pb
from support.clock import Clock
from support.http_calls import CHAT, HELLO

Path = tuple[str | int, ...]
MARK = "the place to be filled"
UNKNOWN = b"\xf8\x3f\x01"
"""A field that no message has."""
DEPTH = 8
"""Levels of a body that have places of their own."""
CONTEXT = 128 * 1024
"""Tokens of the context of the model that is served."""
PATHS: dict[str, tuple[type[BaseModel], Mapping[str, Any], int]] = {
    "/v1/completions": (openapi.BODIES["/v1/completions"][0], HELLO, CONTEXT),
    "/v1/chat/completions": (openapi.BODIES["/v1/chat/completions"][0], CHAT, 0),
    "/tokenize": (openapi.BODIES["/tokenize"][0], {"prompt": "a"}, 0),
    "/detokenize": (openapi.BODIES["/detokenize"][0], {"tokens": [5]}, DETOKENIZE_IDS),
}
"""Facts about each path of HTTP: the model of its body, a right body, and the entries that a list of numbers may have
in addition to `MAX_VALUES`."""
METHODS: dict[str, Message] = {
    "Generate": pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1)),
    "Tokenize": pb.TokenizeRequest(text="a"),
    "Detokenize": pb.DetokenizeRequest(token_ids=[5]),
    "GetModelInfo": pb.GetModelInfoRequest(),
}
"""Right requests, by method of the public gRPC."""
ENTRIES = {
    "numbers": "1",
    "negative numbers": "-1",
    "fractions": "1.0",
    "texts": '"a"',
    "lists": "[]",
    "lists of a number": "[1]",
    "objects": "{}",
    "objects with a field": '{"a":1}',
}


@asynccontextmanager
async def probed(lags: list[float]) -> AsyncIterator[None]:
    """Measures for how long the event loop's turns are held, in seconds.

    The garbage collector's thresholds are those of a router's own process, whose start leaves little to look at: what
    the tests before have left must be frozen.
    """

    async def probe() -> None:
        clock = Clock()
        while True:
            await asyncio.sleep(0)
            lags.append(clock.lap())

    thresholds = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    task = asyncio.create_task(probe())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        gc.set_threshold(*thresholds)


class Bodies:
    """The costly bodies of one model."""

    def __init__(self, kind: type[BaseModel], base: Mapping[str, Any]) -> None:
        """
        Args:
            kind: model of the request.
            base: a right request.
        """
        self._schema = kind.model_json_schema()
        self._base = base

    def places(self) -> dict[Path, Any]:
        """All places below the body itself, with their schemas."""
        return {path: schema for path, schema in self._walk(self._schema, ()) if path}

    def of(self, size: int, numbers: int) -> list[tuple[str, Callable[[], bytes]]]:
        """The bodies in which one place is filled, each with its name, and made when it is asked for.

        Args:
            size: of a body, in bytes.
            numbers: most entries of a list of numbers, beside `MAX_VALUES`.
        """
        made: list[tuple[str, Callable[[], bytes]]] = []
        for path, schema in self.places().items():
            entries = dict(ENTRIES)
            for number, arm in enumerate(self._arms(schema)):
                if arm.get("type") == "array":
                    entries[f"right entries {number}"] = json.dumps(self._least(arm["items"]))
                    entries[f"full entries {number}"] = json.dumps(self._least(arm["items"], full=True))
            shapes: dict[str, Callable[[], str]] = {
                name: partial(_list_of, entry, _count(entry, size, numbers)) for name, entry in entries.items()
            }
            shapes["keys"] = partial(_keys, min(size // 12, MAX_STRINGS - 200))
            shapes["text"] = partial(_text, "x", size - 200)
            shapes["signs"] = partial(_text, "<", size - 200)
            shapes["special tokens"] = partial(_text, "</s>", size // 4 - 50)
            shapes["escapes"] = partial(_text, "\\u00df", min(size // 6 - 50, MAX_ESCAPES))
            shapes["nesting"] = partial(str.__mul__, "[", min(size - 200, MAX_LISTS - 100))
            made += [(f"{path}: {name}", partial(self._filled, path, make)) for name, make in shapes.items()]
        return made

    def _filled(self, path: Path, make: Callable[[], str]) -> bytes:
        return json.dumps(self._with(self._schema, dict(self._base), path)).replace(json.dumps(MARK), make()).encode()

    def _with(self, schema: Any, value: Any, path: Path) -> Any:
        """The value with MARK at a place; what leads there is as small as it may be."""
        if not path:
            return MARK
        first, rest = path[0], path[1:]
        for arm in self._arms(schema):
            if isinstance(first, int) and arm.get("type") == "array" and self._leads(arm["items"], rest):
                items = value if isinstance(value, list) and value else [self._least(arm["items"])]
                return [self._with(arm["items"], items[0], rest)]
            if isinstance(first, str) and first in arm.get("properties", {}):
                fields = value if isinstance(value, dict) else self._least(arm)
                return fields | {first: self._with(arm["properties"][first], fields.get(first), rest)}
            if isinstance(first, str) and isinstance(arm.get("additionalProperties"), dict):
                return {first: self._with(arm["additionalProperties"], None, rest)}
        raise LookupError(f"no place {path}")

    def _leads(self, schema: Any, path: Path) -> bool:
        return path in [path for path, _ in self._walk(schema, ())]

    def _arms(self, schema: Any) -> list[Any]:
        """The alternatives of a schema, without null."""
        if "$ref" in schema:
            return self._arms(self._schema["$defs"][schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema:
            return [arm for each in schema["anyOf"] for arm in self._arms(each)]
        return [] if schema.get("type") == "null" else [schema]

    def _walk(self, schema: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        yield path, schema
        if len(path) >= DEPTH:
            return
        for arm in self._arms(schema):
            for name, each in arm.get("properties", {}).items():
                yield from self._walk(each, (*path, name))
            if arm.get("type") == "array":
                yield from self._walk(arm["items"], (*path, 0))
            if isinstance(arm.get("additionalProperties"), dict):
                yield from self._walk(arm["additionalProperties"], (*path, "1"))

    def _least(self, schema: Any, *, full: bool = False) -> Any:
        """A right value that is as small as it may be, or one with all fields."""
        arm = next(iter(self._arms(schema)), {"type": "null"})
        if "const" in arm or "enum" in arm:
            return arm["const"] if "const" in arm else arm["enum"][0]
        if arm.get("type") == "object":
            names = arm.get("properties", {}) if full else arm.get("required", ())
            return {name: self._least(arm["properties"][name], full=full) for name in names}
        if arm.get("type") == "array":
            return [self._least(arm["items"], full=full)] if full or arm.get("minItems") else []
        if arm.get("type") == "string":
            return "a" * arm.get("minLength", 0) or ("a" if "pattern" in arm else "")
        return {"integer": arm.get("minimum", 1), "number": 1, "boolean": True}.get(arm.get("type", ""))


def _list_of(entry: str, count: int) -> str:
    return "[" + ",".join([entry] * count) + "]"


def _keys(count: int) -> str:
    return "{" + ",".join(f'"{number}":1' for number in range(100_000, 100_000 + count)) + "}"


def _text(character: str, count: int) -> str:
    return '"' + character * count + '"'


def _count(entry: str, size: int, numbers: int) -> int:
    """The number of entries that a body of this size may have."""
    strings, lists = entry.count('"') // 2, entry.count("{") + entry.count("[")
    left = [(size - 300) // (len(entry) + 1), (MAX_VALUES + numbers) // (1 + entry.count(",")) - 100]
    if strings:
        left.append((MAX_STRINGS - 100) // strings)
    if lists:
        left.append((MAX_LISTS - 100) // lists)
    return min(left)


def messages(kind: type[Message], base: Message, size: int) -> list[tuple[str, Callable[[], bytes]]]:
    """Messages of `size` bytes in which one field is filled, each with its name; the rest is as in `base`."""
    whole = base.SerializeToString()
    unknown = UNKNOWN * ((size - len(whole)) // len(UNKNOWN))
    made: list[tuple[str, Callable[[], bytes]]] = [("unknown fields", lambda: whole + unknown)]
    for path, fields in _paths(kind.DESCRIPTOR, ()):
        left = size - len(whole) - 16 * len(fields)
        for name, value in _values(fields[-1]):
            made.append((f"{path}: many of {name}", partial(_message, whole, fields, value, left, once=False)))
            made.append((f"{path}: one with much {name}", partial(_message, whole, fields, value, left, once=True)))
    return made


def _message(whole: bytes, fields: tuple[Any, ...], value: bytes, size: int, *, once: bool) -> bytes:
    """A message with its last field once and large, or as often as possible."""
    *outer, field = fields
    number = field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)
    if once:
        data = value * (size // max(1, len(value)))
        data = _key(field, 2) + _varint(len(data)) + data
    else:
        one = _key(field, 0) + value if number else _key(field, 2) + _varint(len(value)) + value
        data = one * (size // len(one))
    for each in reversed(outer):
        data = _key(each, 2) + _varint(len(data)) + data
    return whole + data


def _paths(descriptor: Any, above: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for field in descriptor.fields:
        fields = (*above, field)
        yield ".".join(each.name for each in fields), fields
        if field.type == FieldDescriptor.TYPE_MESSAGE and len(fields) < DEPTH:
            yield from _paths(field.message_type, fields)


def _values(field: Any) -> list[tuple[str, bytes]]:
    """Small contents of one field, right and wrong."""
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return [("text", b"a"), ("JSON", b"[]"), ("no UTF-8", b"\xff")]
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return [("empty", b""), ("unknown field", UNKNOWN)]
    return [("numbers", b"\x01")]


def _key(field: Any, wire: int) -> bytes:
    return _varint(field.number << 3 | wire)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))
