"""Classes of options: what is common to the sections of the configuration and to the options of one process."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from annotated_types import Interval

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

AUTO = 0
"""Value of a number that the worker chooses by its device."""

Port = Annotated[int, Interval(ge=0, le=65535)]


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raises ValueError naming the option, its value and what is allowed, unless `condition`."""
    if not condition:
        raise ValueError(f"{field} is {value!r}; allowed: {allowed}")


class Options:
    """Base of frozen dataclasses with options. Each value is within what its annotation allows, by whomever it is set.

    Annotations with limits are `Literal`, and `Annotated` with `Interval` or `Automatic`. Pydantic takes the same ones
    for files, and shows them in the JSON schema. A class that compares several options has a `__post_init__` of its
    own, which calls this one first.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a value isn't allowed; the text names the option, the value, and what is.
        """
        options: type = type(self)
        for name, accepts, allowed in _limits(options):
            require(accepts(getattr(self, name)), name, getattr(self, name), allowed)


@dataclass(frozen=True, slots=True)
class Mistake:
    """Mistake that pydantic found in a file with options, in the words of `require`."""

    path: tuple[str, ...]
    """Names of the sections and of the key."""
    text: str
    """Text that follows the key and says what is wrong."""
    unknown_key: bool = False

    @classmethod
    def of(cls, problem: "ErrorDetails") -> "Mistake":
        """The mistake that one of a ValidationError's `errors()` describes."""
        path = tuple(map(str, problem["loc"]))
        if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            return cls(path, ": unknown key", unknown_key=True)
        if problem["type"] in ("missing", "missing_argument"):
            return cls(path, " is missing")
        value = "null" if problem["input"] is None else repr(problem["input"])
        allowed = problem["msg"]
        for words, plain in _PLAIN.items():
            allowed = allowed.replace(words, plain)
        if match := _REFUSED.fullmatch(allowed):
            path = (*path, *match["field"].split("."))
            value, allowed = match["value"], match["allowed"]
        elif problem["type"] in ("value_error", "json_invalid"):
            return cls(path, f": {allowed}")
        elif problem["type"] in ("model_type", "dataclass_type", "dict_type"):
            allowed = "a mapping of keys to values"
        return cls(path, f" is {value if len(value) <= 80 else f'{value[:77]}...'}; allowed: {allowed}")

    def __str__(self) -> str:
        return (".".join(self.path) + self.text).removeprefix(": ")


_REFUSED = re.compile(r"(?P<field>[\w.]+) is (?P<value>.*); allowed: (?P<allowed>.*)", re.DOTALL)
_PLAIN = {
    "Input should be ": "",
    "String should have ": "",
    "Value error, ": "",
    "a valid tuple": "a list",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}
"""Words of pydantic's messages, and the words that replace them."""

Accepts = Callable[[Any], bool]


@cache
def _limits(options: type) -> list[tuple[str, Accepts, str]]:
    """The options that have limits, each with a test of its value and a text for what that accepts."""
    hints = get_type_hints(options, include_extras=True)
    return [(name, *limit) for name, hint in hints.items() for limit in _limits_of(hint)]


def _limits_of(hint: Any) -> Iterator[tuple[Accepts, str]]:
    choices = get_args(hint)
    if get_origin(hint) is Literal:
        yield choices.__contains__, ", ".join(choices)
    elif get_origin(hint) is Annotated:
        yield from _limits_of(choices[0])
        for limit in hint.__metadata__:
            if isinstance(limit, Automatic):
                yield limit.accepts, limit.allowed
            elif isinstance(limit, Interval):
                yield _interval(limit)
    elif NoneType in choices:
        for accepts, allowed in _limits_of(choices[0]):
            yield _or_none(accepts), f"{allowed}, or null"


def _or_none(accepts: Accepts) -> Accepts:
    return lambda value: value is None or accepts(value)


def _interval(limit: Interval) -> tuple[Accepts, str]:
    above, least, most = limit.gt, limit.ge, limit.le
    if above is not None:
        return lambda value: bool(value > above), f"more than {above}"
    if most is None:
        return lambda value: bool(value >= least), f"{least} or more"
    return lambda value: bool(least <= value <= most), f"{least} to {most}"


@dataclass(frozen=True, slots=True)
class Removed:
    """Tells pydantic to refuse a value with what to write instead of it."""

    value: str
    """The value, which the option no longer has."""

    instead: str
    """Text of the error message: what to write."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import PydanticCustomError
        from pydantic_core import core_schema as schemas

        def check(value: object) -> object:
            if value == self.value:
                text = "Input should be {instead}; {value} was removed"
                raise PydanticCustomError("removed", text, {"instead": self.instead, "value": self.value})
            return value

        return schemas.no_info_before_validator_function(check, handler(source))


@dataclass(frozen=True, slots=True)
class Automatic:
    """Tells pydantic that a number may also be `auto`. Imports pydantic only where pydantic asks for it."""

    allowed: str
    """Text of the error message: what is allowed."""

    least: float = 1
    """Smallest number."""

    most: float | None = None
    """Largest number; None is no limit."""

    sizes: bool = False
    """Whether a number of bytes may be given as text, such as 8GiB."""

    word: object = AUTO
    """Value that `auto` becomes."""

    def accepts(self, value: float) -> bool:
        """Whether an option may have this value, in which AUTO stands for `auto`."""
        return value == self.word or (value >= self.least and (self.most is None or value <= self.most))

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic import ByteSize, TypeAdapter
        from pydantic_core import core_schema as schemas

        word = self.word
        number: schemas.CoreSchema
        if int in (source, *get_args(source)):
            most = None if self.most is None else int(self.most)
            number = schemas.int_schema(ge=int(self.least), le=most, strict=True)
        else:
            number = schemas.float_schema(ge=self.least, le=self.most, allow_inf_nan=False)
        auto = schemas.no_info_after_validator_function(lambda _: word, schemas.literal_schema(["auto"]))
        choices: list[schemas.CoreSchema | tuple[schemas.CoreSchema, str]] = [auto, number]
        if self.sizes:
            parse = TypeAdapter(ByteSize).validate_python
            text = schemas.str_schema(pattern=r"^\d*\.?\d+\s*[A-Za-z]+$", strict=True)
            choices.append(schemas.no_info_after_validator_function(lambda size: int(parse(size)), text))
        shown = schemas.plain_serializer_function_ser_schema(lambda value: "auto" if value == word else value)
        return schemas.union_schema(
            choices,
            mode="left_to_right",
            custom_error_type="automatic",
            custom_error_message=self.allowed,
            serialization=shown,
        )
