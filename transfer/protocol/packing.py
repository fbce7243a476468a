"""Strict, bounded msgpack, and the rules that check its values as fields of messages.

msgpack itself accepts duplicate keys, NaN, extension types and unbounded nesting; all of these are refused here. A
length that the bytes claim is compared with the bytes that are there before memory is allocated.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack  # type: ignore[import-untyped]  # it ships no types

MAX_MAP = 32
MAX_VALUES = 1024
"""Values in all maps and lists of one batch at most; it bounds the time that decoding takes."""
MAX_REASON = 512
"""Characters of an error message at most."""


class WireError(ValueError):
    """Bytes or a value that no message of this protocol can have. The text names the field and the limit."""


class Rule(Protocol):
    """The form of one field."""

    def check(self, name: str, value: object) -> Any:
        """The decoded value of the field `name`, in its Python type.

        Raises:
            WireError: the value doesn't follow the rule.
        """

    def plain(self, value: Any) -> object:
        """The value as msgpack's own types."""
        return self.check("value", value)


@dataclass(frozen=True, slots=True)
class Number(Rule):
    low: int
    high: int

    def check(self, name: str, value: object) -> int:
        if type(value) is not int or not self.low <= value <= self.high:
            raise WireError(f"{name} is {shown(value)}; allowed: an integer from {self.low} to {self.high}")
        return value


@dataclass(frozen=True, slots=True)
class Text(Rule):
    shortest: int
    longest: int

    def check(self, name: str, value: object) -> str:
        if type(value) is not str or not self.shortest <= len(value) <= self.longest:
            raise WireError(f"{name} is {shown(value)}; allowed: text of {self.shortest} to {self.longest} characters")
        return value


@dataclass(frozen=True, slots=True)
class Flag(Rule):
    def check(self, name: str, value: object) -> bool:
        if type(value) is not bool:
            raise WireError(f"{name} is {shown(value)}; allowed: true or false")
        return value


@dataclass(frozen=True, slots=True)
class Raw(Rule):
    shortest: int
    longest: int

    def check(self, name: str, value: object) -> bytes:
        if type(value) is not bytes or not self.shortest <= len(value) <= self.longest:
            raise WireError(f"{name} is {shown(value)}; allowed: {self.shortest} to {self.longest} bytes")
        return value


@dataclass(frozen=True, slots=True)
class Choice(Rule):
    kind: type[enum.Enum]

    def check(self, name: str, value: object) -> enum.Enum:
        try:
            return self.kind(value)
        except ValueError:
            allowed = ", ".join(str(member.value) for member in self.kind)
            raise WireError(f"{name} is {shown(value)}; allowed: {allowed}") from None

    def plain(self, value: enum.Enum) -> object:
        return value.value


@dataclass(frozen=True, slots=True)
class Many(Rule):
    item: Rule
    most: int

    def check(self, name: str, value: object) -> tuple[Any, ...]:
        if type(value) is not list or len(value) > self.most:
            raise WireError(f"{name} is {shown(value)}; allowed: a list of at most {self.most}")
        return tuple(self.item.check(name, item) for item in value)

    def plain(self, value: tuple[Any, ...]) -> object:
        if len(value) > self.most:
            raise WireError(f"{len(value)} items; allowed: at most {self.most}")
        return [self.item.plain(item) for item in value]


def clip(text: str) -> str:
    """`text`, cut to MAX_REASON characters."""
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."


def unpack(packed: bytes, max_array: int) -> object:
    """The decoded value: dicts with text keys, lists, text, bytes, numbers, booleans, None.

    Raises:
        WireError: `packed` is not exactly one such value, a list in it is longer than `max_array`, or its maps and
            lists have more than MAX_VALUES values.
    """
    left = MAX_VALUES

    def count(values: int) -> None:
        nonlocal left
        left -= values
        if left < 0:
            raise WireError(f"more values than the {MAX_VALUES} that a batch may have")

    def items(found: list[object]) -> list[object]:
        count(1 + len(found))
        return found

    def pairs(found: list[tuple[object, object]]) -> dict[object, object]:
        count(1 + len(found))
        plain: dict[object, object] = {}
        for key, value in found:
            if type(key) is not str or key in plain:
                raise WireError(f"a map's key is {shown(key)}; allowed: text, each key once")
            plain[key] = value
        return plain

    try:
        return msgpack.unpackb(
            packed,
            object_pairs_hook=pairs,
            list_hook=items,
            ext_hook=_no_extension,
            max_array_len=max_array,
            max_map_len=MAX_MAP,
            max_ext_len=0,
        )
    except WireError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack: {clip(str(error))}") from None


def unpack_named(packed: bytes, forms: Mapping[str, Sequence[Rule]]) -> tuple[str, tuple[Any, ...]]:
    """The name and the values of a message that is a list of both, as the links' own short messages are.

    Args:
        forms: by name, the rules of the values.

    Raises:
        WireError: the message has none of these forms.
    """
    match unpack(packed, max_array=8):
        case [str(name), *values] if name in forms and len(values) == len(forms[name]):
            return name, tuple(rule.check(name, value) for rule, value in zip(forms[name], values, strict=True))
    raise WireError(f"a message of {len(packed)} bytes; allowed: {', '.join(forms)} with their values")


def pack(value: object) -> bytes:
    """`value` has the types that `unpack` returns."""
    return bytes(msgpack.packb(value))


def pack_joined(parts: Sequence[bytes]) -> bytes:
    """A list of values that are packed already."""
    return bytes(msgpack.Packer().pack_array_header(len(parts))) + b"".join(parts)


def values_in(value: object) -> int:
    """The number of values in maps and lists, as `unpack` counts them."""
    match value:
        case dict():
            return 1 + len(value) + sum(values_in(item) for item in value.values() if isinstance(item, dict | list))
        case list():
            return 1 + len(value) + sum(values_in(item) for item in value if isinstance(item, dict | list))
    return 0


def _no_extension(code: int, data: bytes) -> object:
    raise WireError(f"extension type {code}; no extension is allowed")


def shown(value: object) -> str:
    """A value in an error message: a few of its characters at most."""
    if isinstance(value, str | bytes):
        return repr(value[:40]) + (f"... ({len(value)} long)" if len(value) > 40 else "")
    return repr(value) if isinstance(value, int | float | None) else type(value).__name__
