"""Rules that check the fields of messages, and the strict msgpack of the short messages that links send for each frame.

Control messages are protobuf, see `kvrelay.transfer.protocol.messages`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack  # type: ignore[import-untyped]  # it ships no types

MAX_REASON = 512
"""Limit of an error message in characters."""


class WireError(ValueError):
    """Bytes or a value that no message of this protocol can have. The text names the field and the limit."""


class Rule(Protocol):
    """Rule for one field: the form that its value must have."""

    def check(self, name: str, value: object) -> Any:
        """The value of the field `name`, in its Python type, from its form on the wire.

        Raises:
            WireError: the value doesn't follow the rule.
        """

    def plain(self, name: str, value: Any) -> object:
        """The form of a value on the wire.

        Raises:
            WireError: the value doesn't follow the rule.
        """
        return self.check(name, value)


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


def clip(text: str) -> str:
    """`text`, cut to MAX_REASON characters."""
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."


def unpack_named(packed: bytes, forms: Mapping[str, Sequence[Rule]]) -> tuple[str, tuple[Any, ...]]:
    """The name and the values of a message that is a list of both: numbers and bytes, nothing nested.

    Args:
        forms: by name, the rules of the values.

    Raises:
        WireError: the message has none of these forms.
    """
    try:
        message = msgpack.unpackb(packed, max_array_len=8, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack: {clip(str(error))}") from None
    match message:
        case [str(name), *values] if name in forms and len(values) == len(forms[name]):
            return name, tuple(rule.check(name, value) for rule, value in zip(forms[name], values, strict=True))
    raise WireError(f"a message of {len(packed)} bytes; allowed: {', '.join(forms)} with their values")


def pack(message: Sequence[object]) -> bytes:
    """A message that `unpack_named` reads."""
    return bytes(msgpack.packb(message))


def shown(value: object) -> str:
    """A value in an error message: a few of its characters at most."""
    if isinstance(value, str | bytes):
        return repr(value[:40]) + (f"... ({len(value)} long)" if len(value) > 40 else "")
    return repr(value) if isinstance(value, int | float | None) else type(value).__name__
