"""Reads the JSON body of a request: bounded in size, in time and in the work of parsing it."""

import asyncio
import re
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvrelay.router.errors import InvalidArgument, InvalidRequest, shorten
from kvrelay.router.http.errors import BadField, SlowBody, TooLarge

BodyT = TypeVar("BodyT", bound=BaseModel)

SMALL_BYTES = 64 * 1024
"""A body up to this size is parsed in about a millisecond, whatever is in it."""
MAX_STRINGS = 32768
MAX_QUOTES = 2**18
MAX_ESCAPES = 2**19
MAX_VALUES = 65536
"""Strings, quotation marks, escapes of characters by \\u, and other values of a larger body, beside the numbers that a
prompt may have."""
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
        raise SlowBody(f"the body did not come within {seconds:g} s") from None
    except web.RequestPayloadError:
        raise InvalidArgument("body: its transfer encoding is malformed") from None
    except web.HTTPRequestEntityTooLarge:
        raise TooLarge(f"body: number of bytes is above {most}; allowed: up to {most}") from None


async def parse(kind: type[BodyT], data: bytes, max_numbers: int) -> BodyT:
    """The request in a body.

    Args:
        max_numbers: most entries of a list of numbers.

    Raises:
        InvalidArgument: it is no valid JSON, or not such a request. The text has nothing of a prompt.
    """
    if len(data) > SMALL_BYTES:
        # In a thread: the loop over the strings takes up to a tenth of a second, during which others have their turns.
        await asyncio.get_running_loop().run_in_executor(None, _check_outline, data, MAX_VALUES + max_numbers)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)) from None


def _check_outline(data: bytes, max_values: int) -> None:
    """Checks that a body has so few values that it is parsed in some milliseconds.

    Each value but the first of its list or object comes behind a comma outside of a string.

    Raises:
        InvalidRequest: it has more.
    """
    if data.count(b"\\u") > MAX_ESCAPES:
        raise InvalidArgument(f"body: number of \\u escapes is above {MAX_ESCAPES}; allowed: up to {MAX_ESCAPES}")
    if data.count(b",") <= max_values and data.count(b'"') <= 2 * MAX_STRINGS:
        return
    values = strings = quotes = start = 0
    inside = False
    while (quote := data.find(b'"', start)) >= 0:
        quotes += 1
        if not inside:
            values += data.count(b",", start, quote)
            strings += 1
            inside = True
        elif _even_backslashes(data[start:quote]):
            inside = False
        for name, count, most in (("strings", strings, MAX_STRINGS), ("quotation marks", quotes, MAX_QUOTES)):
            if count > most:
                raise InvalidArgument(f"body: number of {name} is above {most}; allowed: up to {most}")
        start = quote + 1
    values += 0 if inside else data.count(b",", start)
    if values > max_values:
        raise InvalidRequest("body: number of values", values, f"up to {max_values}")


def _even_backslashes(text: bytes) -> bool:
    """Whether a quotation mark behind `text` ends a string: it does unless a backslash escapes it."""
    return (len(text) - len(text.rstrip(b"\\"))) % 2 == 0


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
        text = f"{where} is not a field that this server knows"
    elif kind == "missing":
        text = f"{where} is missing"
    else:
        text = f"{where} is {_shown(where, value)}; allowed: {allowed}"
    return BadField(text, where, _code(kind, value))


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
