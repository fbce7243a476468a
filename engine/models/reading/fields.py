"""Strict reading of a checkpoint's JSON files."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

T = TypeVar("T")
LARGEST = sys.float_info.max
"""Largest finite number; integers may be larger."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ValueError: there is no such file, or it holds something else; the text names the file.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; a model is a Hugging Face checkpoint folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a JSON {type(value).__name__}; allowed: an object")
    return value


class Fields:
    """One JSON object and the name of the file that it came from.

    Each getter takes the field's name and a default for a field that is absent or null; without a default the field
    is required. Every getter raises ValueError naming file, field, value and what is allowed.
    """

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self.source = source
        self._values = values

    @property
    def names(self) -> set[str]:
        """Names of the present fields, null ones included."""
        return set(self._values)

    def get(self, name: str) -> Any:
        """The raw value; None where it is absent or null."""
        return self._values.get(name)

    def refuse(self, name: str, allowed: str) -> NoReturn:
        """Raises the ValueError for the field."""
        if name not in self._values:
            raise ValueError(f"{self.source}: {name} is missing; allowed: {allowed}")
        raise ValueError(f"{self.source}: {name} is {self._values[name]!r}; allowed: {allowed}")

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """Below 2**31."""
        allowed = f"an integer of at least {minimum}"
        return self._checked(name, default, lambda value: type(value) is int and minimum <= value < 2**31, allowed)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        valid = self._checked(
            name, default, lambda value: type(value) in (int, float) and 0 < value <= LARGEST, "a number above 0"
        )
        return float(valid)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of so many finite numbers above 0."""
        found = self._values.get(name)
        if (
            not isinstance(found, list)
            or len(found) != count
            or not all(type(each) in (int, float) and 0 < each <= LARGEST for each in found)
        ):
            self.refuse(name, f"a list of {count} numbers above 0")
        return tuple(map(float, found))

    def boolean(self, name: str, default: bool) -> bool:
        return self._checked(name, default, lambda value: type(value) is bool, "true, false")

    def choice(self, name: str, allowed: tuple[T, ...], default: T | None = None) -> T:
        """One of a few texts."""
        return self._checked(name, default, lambda value: value in allowed, ", ".join(map(str, allowed)))

    def _checked(self, name: str, default: T | None, valid: Callable[[Any], bool], allowed: str) -> T:
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if not valid(value):
            self.refuse(name, allowed)
        return cast("T", value)

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """One id or a list of them; None where the field is absent or null."""
        value = self._values.get(name)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            self.refuse(name, "a token id or a list of them")
        return tuple(ids)

    def merged(self, others: "Fields | None") -> "Fields":
        """These fields with those of `others`, which take precedence."""
        if others is None:
            return self
        return Fields(others.source, {**self._values, **{name: others.get(name) for name in others.names}})

    def fields(self, name: str) -> "Fields | None":
        """A nested object; None where it is absent or null."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return Fields(f"{self.source}: {name}", value)
