"""Reads the JSON body of a request: bounded in size, in time and in the work of parsing it."""

import asyncio
import re
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvrelay.router.errors import InvalidArgument, InvalidRequest, shorten
from kvrelay.router.http.errors import SlowBody, TooLarge

BodyT = TypeVar("BodyT", bound=BaseModel)

SMALL_BYTES = 64 * 1024
"""A body up to this size is parsed in about a millisecond, whatever is in it."""
MAX_STRINGS = 32768
MAX_VALUES = 65536
"""Strings and other values of a larger body, beside the numbers that a prompt may have."""
SECRET_FIELDS = frozenset(("prompt", "messages", "stop", "bad_words"))
"""Fields whose values no error and no log contains."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


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
        # In a thread: the loop over the strings takes up to some 10 ms, during which others have their turns.
        await asyncio.get_running_loop().run_in_executor(None, _check_outline, data, MAX_VALUES + max_numbers)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)) from None


def _check_outline(data: bytes, max_values: int) -> None:
    """Checks that a body has so few values that it is parsed in some milliseconds.

    Each value but the first of its list or object comes behind a comma.
    """
    commas, strings = data.count(b","), 0
    if commas <= max_values:
        return
    for match in _STRING.finditer(data):
        commas -= data.count(b",", *match.span())
        strings += 1
        if strings > MAX_STRINGS:
            raise InvalidRequest("body: number of strings", strings, f"up to {MAX_STRINGS}")
    if commas > max_values:
        raise InvalidRequest("body: number of values", commas, f"up to {max_values}")


def _refusal(problems: list[ErrorDetails]) -> InvalidArgument:
    """The first problem, as an error that names field, value and what is allowed."""
    problem = problems[0]
    where = _place(problem["loc"])
    if problem["type"] == "json_invalid":
        reason = problem.get("ctx", {}).get("error", "malformed")
        return InvalidArgument(f"body: not valid JSON: {reason}")
    # A union reports what each of its members allows.
    same = [other for other in problems if _place(other["loc"]) == where]
    allowed = " or ".join(dict.fromkeys(_allowed(other) for other in same))
    if problem["type"] == "extra_forbidden":
        error = InvalidArgument(f"{where} is not a field that this server knows")
    elif problem["type"] == "missing":
        error = InvalidArgument(f"{where} is missing")
    else:
        error = InvalidArgument(f"{where} is {_shown(problem['loc'], problem['input'])}; allowed: {allowed}")
    error.field = where
    return error


def _place(parts: tuple[int | str, ...]) -> str:
    """`messages[0].role` of a location; pydantic adds the names of a union's members, which are no identifiers or
    begin with a capital letter or are a type's name."""
    shown = ""
    for part in parts:
        if isinstance(part, int):
            shown += f"[{part}]"
        elif not _names_a_type(part):
            shown += f".{part}" if shown else part
    return shown or "body"


def _names_a_type(part: str) -> bool:
    return part in ("str", "int", "float", "bool", "none") or not part.isidentifier() or part[0].isupper()


def _allowed(problem: ErrorDetails) -> str:
    text = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ").removeprefix("a valid ")
    return text.replace("None", "null")


def _shown(parts: tuple[int | str, ...], value: Any) -> str:
    """A value, or only its kind where it may have text of a prompt."""
    if value is None or isinstance(value, bool):
        return str(value).lower() if value is not None else "null"
    if isinstance(value, (int, float)):
        return shorten(value)
    if isinstance(value, str):
        return shorten(value) if parts and parts[0] not in SECRET_FIELDS else "a string"
    return "an array" if isinstance(value, (list, tuple)) else "an object"


def _too_large(size: int, most: int) -> TooLarge:
    return TooLarge(f"body: number of bytes is {size}; allowed: up to {most}")
