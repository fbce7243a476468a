"""Checks the outline of a protobuf message or of JSON before it is parsed, so that none holds the event loop for long.

Parsing 4 MiB takes a millisecond if they are one text, and a hundred if they are millions of small fields. This reads
the tags and lengths of a message's fields, without their contents, up to a bound on their number; in JSON, it counts
what stands between the strings.
"""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

INLINE_BYTES = 4096
"""Size limit in bytes of requests that are parsed and checked on the event loop, if they have few values."""
FEW_VALUES = 128
"""Number of JSON values, or fields of a message, that cost a millisecond or two together."""
SMALL_BYTES = 64 * 1024
"""Size in bytes up to which any content is parsed in some milliseconds."""
MAX_FIELDS = 4096
"""Most fields of a larger message, those of its parts included; a list of numbers is one field."""
MAX_STRINGS = 16384
MAX_LISTS = 16384
MAX_QUOTES = 2**18
MAX_ESCAPES = 2**18
MAX_VALUES = 65536
"""Strings, lists and objects, quotation marks, escapes of characters by \\u, and other values of larger JSON, beside
the numbers that a prompt may have."""
VARINT_BYTES = 5
"""Longest encoding of a uint32."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class BadOutline(ValueError):
    """The message or JSON is malformed, or too costly to parse; the text says which limit it exceeds."""


class _TooManyFields(BadOutline):
    """The message has more fields than it may have."""


def is_light_json(data: bytes) -> bool:
    """Whether this JSON body can be parsed and checked within some milliseconds."""
    return len(data) <= INLINE_BYTES and data.count(b",") <= FEW_VALUES


def is_light_message(data: bytes, kind: Any) -> bool:
    """Whether this serialized message can be parsed and checked within some milliseconds.

    Args:
        kind: its Descriptor.
    """
    if len(data) > INLINE_BYTES:
        return False
    try:
        _check(data, 0, len(data), kind, FEW_VALUES, len(data))
    except _TooManyFields:
        return False
    except BadOutline:
        pass  # it is refused at once
    return True


def check_outline(data: bytes, kind: Any, max_numbers: int) -> None:
    """Checks a serialized message.

    Args:
        kind: its Descriptor, for which the stubs have two classes.
        max_numbers: most entries of a list of numbers.

    Raises:
        BadOutline: parsing it may take long, or isn't possible.
    """
    if len(data) > SMALL_BYTES:
        _check(data, 0, len(data), kind, MAX_FIELDS, max_numbers * VARINT_BYTES)


def check_json(data: bytes, max_numbers: int) -> None:
    """Checks that JSON has so few values that it is parsed in some milliseconds.

    Each value but the first of its list or object comes behind a comma outside of a string.

    Args:
        max_numbers: most entries of a list of numbers, beside MAX_VALUES other values.

    Raises:
        BadOutline: it has more.
    """
    if len(data) <= SMALL_BYTES:
        return
    max_values = MAX_VALUES + max_numbers
    if data.count(b"\\u") > MAX_ESCAPES:
        allowed = f"up to {MAX_ESCAPES}, and any number of characters in UTF-8"
        raise BadOutline(f"number of \\u escapes is above {MAX_ESCAPES}; allowed: {allowed}")
    lists = data.count(b"[") + data.count(b"{")
    if data.count(b",") <= max_values and data.count(b'"') <= 2 * MAX_STRINGS and lists <= MAX_LISTS:
        return
    values = lists = strings = quotes = start = 0
    inside = False
    end = len(data)
    while start <= end:
        quote = data.find(b'"', start)
        quote = end if quote < 0 else quote
        quotes += 1
        if not inside:
            values += data.count(b",", start, quote)
            lists += data.count(b"[", start, quote) + data.count(b"{", start, quote)
            strings += 1
            inside = True
        elif _even_backslashes(data[start:quote]):
            inside = False
        for name, count, most in (
            ("values", values, max_values),
            ("lists and objects", lists, MAX_LISTS),
            ("strings", strings - 1, MAX_STRINGS),
            ("quotation marks", quotes - 1, MAX_QUOTES),
        ):
            if count > most:
                raise BadOutline(f"number of {name} is above {most}; allowed: up to {most}")
        start = quote + 1


def _even_backslashes(text: bytes) -> bool:
    """Whether a quotation mark behind `text` ends a string: it does unless a backslash escapes it."""
    return (len(text) - len(text.rstrip(b"\\"))) % 2 == 0


def _check(data: bytes, at: int, end: int, kind: Any, left: int, number_bytes: int) -> int:
    """Checks data[at:end]; returns how many of the `left` fields remain."""
    while at < end:
        if left <= 0:
            raise _TooManyFields(f"it has more than {MAX_FIELDS} fields")
        left -= 1
        tag, at = _varint(data, at, end)
        wire, field = tag & 7, kind.fields_by_number.get(tag >> 3)
        if wire == _LENGTH:
            length, at = _varint(data, at, end)
            if length > end - at:
                raise BadOutline("it is malformed")
            if field is not None and field.type == FieldDescriptor.TYPE_MESSAGE:
                left = _check(data, at, at + length, field.message_type, left, number_bytes)
            elif field is not None and field.type == FieldDescriptor.TYPE_UINT32 and length > number_bytes:
                name = f"{kind.full_name.rpartition('.')[2]}.{field.name}"
                raise BadOutline(
                    f"{name} has {length} bytes, more than {number_bytes // VARINT_BYTES} numbers can have"
                )
            at += length
        elif wire == _VARINT:
            at = _varint(data, at, end)[1]
        elif wire in (_FIXED32, _FIXED64):
            at += 4 if wire == _FIXED32 else 8
        else:
            raise BadOutline("it is malformed")
    if at != end:
        raise BadOutline("it is malformed")
    return left


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number at `at`, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise BadOutline("it is malformed")
