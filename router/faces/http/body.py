"""Reads the JSON body of a request: bounded in size, in time and in the work of parsing it."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvrelay.router.errors import MAX_VALUE_CHARACTERS, BadField, InvalidArgument, SlowRequest, shorten
from kvrelay.router.faces.http.errors import TooLarge
from kvrelay.router.request.wire import BadOutline, check_json

BodyT = TypeVar("BodyT", bound=BaseModel)

MOST_SHOWN = 64
"""Problems of one body that pydantic formats, each in some microseconds. There are more only if an object has more
unknown fields: every check of a list stops at its first problem."""
# Fields whose texts no error and no log contains.
_SECRET = re.compile(r"(body|prompt|messages|stop|bad_words)\b")
CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "not_served": "unsupported_value",
    "less_than_equal": "{kind}_above_max_value",
    "less_than": "{kind}_above_max_value",
    "greater_than_equal": "{kind}_below_min_value",
    "greater_than": "{kind}_below_min_value",
    "string_too_long": "string_above_max_length",
    "string_too_short": "string_below_min_length",
    "too_long": "array_above_max_length",
    "too_short": "array_below_min_length",
}
"""OpenAI's names of pydantic's kinds of problems."""


def declared_size(request: web.Request, most: int) -> int:
    """The size of the body in bytes, by its header; `most` if that says nothing.

    Raises:
        TooLarge: it is above `most`.
    """
    size = request.content_length
    if size is not None and size > most:
        raise _too_large(size, most)
    return most if size is None else size


async def read(request: web.Request, most: int, seconds: float) -> bytes:
    """The whole body.

    Args:
        most: largest size in bytes.
        seconds: time for all of it.

    Raises:
        InvalidArgument: it is too large, or late.
    """
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        raise SlowRequest(f"the body did not come within {seconds:g} s") from None
    except web.RequestPayloadError:
        raise InvalidArgument("body: it ended early, or its transfer encoding is malformed") from None
    except web.HTTPRequestEntityTooLarge:
        raise TooLarge(f"body: number of bytes is above {most}; allowed: up to {most}") from None


def parse(kind: type[BodyT], data: bytes, max_numbers: int = 0) -> BodyT:
    """The request in a body. No call of a library in it holds the interpreter for 20 ms, whatever the body has; all of
    them together may take longer, so a large body is parsed in another process (`router/request/lanes.py`).

    Args:
        max_numbers: most entries of a list of numbers.

    Raises:
        InvalidArgument: it is no valid JSON, or not such a request. The text has nothing of a prompt.
    """
    try:
        check_json(data, max_numbers)
    except BadOutline as error:
        raise InvalidArgument(f"body: {error}") from None
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        problems = error
    if problems.error_count() > MOST_SHOWN:
        try:
            raise _unknown(next(_extras(kind.model_validate_json(data, extra="allow"), ()), ()))
        except ValidationError as error:
            problems = error
    raise _refusal(problems.errors(include_url=False))


def _extras(value: Any, where: tuple[int | str, ...]) -> Iterator[tuple[int | str, ...]]:
    """The paths of the unknown fields in a request that was accepted with them."""
    if isinstance(value, BaseModel):
        for name in value.model_extra or ():
            yield (*where, name)
        for name in value.model_fields_set - (value.model_extra or {}).keys():
            yield from _extras(getattr(value, name), (*where, name))
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from _extras(each, (*where, at))


def _refusal(problems: list[ErrorDetails]) -> InvalidArgument:
    """The deepest problem, as an error that names field, value and what is allowed.

    A union reports what each of its members allows: the member that fits best fails deepest.
    """
    problem = max(problems, key=lambda problem: len(problem["loc"]))
    kind, where, value = problem["type"], _place(problem["loc"]), problem["input"]
    same = [other for other in problems if _place(other["loc"]) == where]
    allowed = " or ".join(dict.fromkeys(_allowed(other) for other in same))
    if kind == "misfit":
        where, value, allowed = (problem["ctx"][name] for name in ("field", "value", "allowed"))
    elif kind == "json_invalid":
        return InvalidArgument(f"body: not valid JSON: {problem['ctx']['error']}")
    if kind == "extra_forbidden":
        return _unknown(problem["loc"])
    text = f"{where} is missing" if kind == "missing" else f"{where} is {_shown(where, value)}; allowed: {allowed}"
    return BadField(text, where, _code(kind, value))


def _unknown(place: tuple[int | str, ...]) -> BadField:
    where = _place(place)
    return BadField(f"{where} is not a field that this server knows", where, CODES["extra_forbidden"])


def _code(kind: str, value: Any) -> str:
    fallback = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return CODES.get(kind, fallback).format(kind="decimal" if isinstance(value, float) else "integer")


def _place(parts: tuple[int | str, ...]) -> str:
    """`messages[0].role` of a location; without the names of a union's members, which pydantic adds."""
    shown = ""
    for part in parts:
        if isinstance(part, int):
            shown += f"[{part}]"
        elif not _names_a_type(part):
            part = part if len(part) <= MAX_VALUE_CHARACTERS else f"{part[:MAX_VALUE_CHARACTERS]}..."
            shown += f".{part}" if shown else part
    return shown or "body"


def _names_a_type(part: str) -> bool:
    return part in ("str", "int", "float", "bool", "none") or any(sign in part for sign in "[(-") or part[:1].isupper()


def _allowed(problem: ErrorDetails) -> str:
    text = problem["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    text = re.sub(r"^(List|String|Dictionary) should have (.*?)( after validation)?(, not \d+)?$", r"\2", text)
    return text.replace("None", "null")


def _shown(where: str, value: Any) -> str:
    """A value, or only its kind where it may have text of a prompt."""
    if value is None or isinstance(value, bool):
        return str(value).lower() if value is not None else "null"
    if isinstance(value, (int, float)):
        return shorten(value)
    if isinstance(value, str):
        return "a string" if _SECRET.match(where) else shorten(value)
    return "an array" if isinstance(value, (list, tuple)) else "an object"


def _too_large(size: int, most: int) -> TooLarge:
    return TooLarge(f"body: number of bytes is {size}; allowed: up to {most}")
