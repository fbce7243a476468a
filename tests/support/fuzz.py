"""Hypothesis strategies of messages that no sound peer sends: any protobuf by its descriptor, and damaged bytes."""

from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

MessageT = TypeVar("MessageT", bound=Message)
DEPTH = 3
"""Levels of messages in messages."""

_NUMBERS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([0, 1, 2, 250, 251, 4096, 2**31, 2**32 - 1]) | st.integers(0, 300),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from([0, 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats() | st.floats(0, 1),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
}
_TEXTS = st.sampled_from(["", "fuzz", "prefill-0", "decode-0"]) | st.text(max_size=20)


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return _fields(field.message_type, depth - 1)
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return st.sampled_from([value.number for value in field.enum_type.values]) | st.integers(0, 99)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _TEXTS
    return _NUMBERS[field.cpp_type]


def _fields(descriptor: Any, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    """The keyword arguments of a message."""
    optional: dict[str, st.SearchStrategy[Any]] = {}
    for field in descriptor.fields:
        if depth == 0 and field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            continue
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            key, value = (_values(entry.fields_by_name[name], depth) for name in ("key", "value"))
            optional[field.name] = st.dictionaries(key, value, max_size=6)
            continue
        value = _values(field, depth)
        optional[field.name] = st.lists(value, max_size=6) if field.is_repeated else value
    groups = [{field.name for field in oneof.fields} for oneof in descriptor.oneofs]

    def one_of_each(values: dict[str, Any]) -> dict[str, Any]:
        for group in groups:
            for name in sorted(group & values.keys())[1:]:
                del values[name]
        return values

    return st.fixed_dictionaries({}, optional=optional).map(one_of_each)


def protobufs(kind: type[MessageT]) -> st.SearchStrategy[MessageT]:
    """Messages of a type: every field may be set, to any value that it can have."""
    return _fields(kind.DESCRIPTOR, DEPTH).map(lambda values: kind(**values))


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes that were cut, flipped, repeated or extended, or that are only noise."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "cut", "repeat", "insert", "noise"])):
            case "flip" if data:
                data[at] ^= draw(st.integers(1, 255))
            case "cut":
                del data[at:]
            case "repeat":
                data[at:at] = data[at : at + 16]
            case "insert":
                data[at:at] = draw(st.binary(max_size=16))
            case "noise":
                data[:] = draw(st.binary(max_size=64))
    return bytes(data)
