"""Messages from outside the cluster, parsed without raising: gRPC would answer a raising parser with its own text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

MessageT = TypeVar("MessageT", bound=Message)

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True)
class BadPayload:
    """Bytes that are no message of the expected type."""

    problem: str


class Parser(Generic[MessageT]):
    """A gRPC request deserializer that returns BadPayload where the message can't be parsed."""

    def __init__(self, kind: type[MessageT]) -> None:
        self._kind = kind

    def __call__(self, data: bytes) -> MessageT | BadPayload:
        try:
            return self._kind.FromString(data)
        except DecodeError:
            descriptor = cast(Descriptor, self._kind.DESCRIPTOR)
            field = find_bad_text(descriptor, data)
            name = descriptor.full_name
            return BadPayload(f"{field}: not valid UTF-8" if field else f"the request is no {name}")


def find_bad_text(descriptor: Descriptor, data: bytes) -> str | None:
    """Path of the first string field of `data` that is not UTF-8, e.g. `sampling.stop[1]`; None if that isn't it."""
    try:
        return next(_bad_texts(descriptor, data), None)
    except _Malformed:
        return None


class _Malformed(ValueError):
    """Not the wire format of protobuf."""


def _bad_texts(descriptor: Descriptor, data: bytes) -> Iterator[str]:
    seen: dict[int, int] = {}
    for number, value in _length_fields(data):
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        index = seen[number] = seen.get(number, -1) + 1
        path = f"{field.name}[{index}]" if field.is_repeated else field.name
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(value):
            yield path
        elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
            for below in _bad_texts(field.message_type, value):
                yield f"{path}.{below}"


def _length_fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, value) of the length-delimited fields, in order."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _LENGTH:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise _Malformed
            yield number, data[at : at + length]
            at += length
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
        else:
            raise _Malformed


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(_MAX_VARINT_BYTES):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at
    raise _Malformed


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
