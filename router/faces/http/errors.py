"""Errors of requests as OpenAI's HTTP answers: status, headers and body."""

import math
import re
from typing import Any

import grpc
from pydantic_core import to_json

from kvrelay.router.errors import (
    MAX_TEXT_BYTES,
    RETRY_DELAY_KEY,
    BadField,
    GivenUp,
    InvalidArgument,
    InvalidRequest,
    NotKept,
    PromptTooLong,
    RequestError,
    SlowRequest,
    brief,
)


class TooLarge(InvalidArgument):
    """The body has more bytes than the router takes."""


SPECIAL: dict[type[RequestError], int] = {TooLarge: 413, SlowRequest: 408}
STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
NAMES = {
    "sampling.": "",
    "token_ids.ids": "prompt",
    "text": "prompt",
    "messages.template_kwargs": "chat_template_kwargs",
}
"""Fields of the public contract that have another name here."""
_FIELD = re.compile(r"^(sampling\.|token_ids\.ids|text\b|messages\.template_kwargs)")
TYPES = {403: "permission_error", 429: "rate_limit_error"}
CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
UNKNOWN_URL = "unknown_url"
MAX_BYTES = 2048
"""Size limit of an error's body in bytes."""


def status_of(error: RequestError) -> int:
    """The HTTP status of a request's error."""
    return SPECIAL.get(type(error)) or STATUSES[error.code]


def headers_of(error: RequestError) -> dict[str, str]:
    """The headers that tell a client whether and when to try again, as OpenAI's clients read them."""
    if RETRY_DELAY_KEY in (metadata := dict(error.metadata)):
        milliseconds = str(metadata[RETRY_DELAY_KEY])
        return {"Retry-After": str(math.ceil(int(milliseconds) / 1000)), "retry-after-ms": milliseconds}
    if error.code == grpc.StatusCode.UNAUTHENTICATED:
        return {"WWW-Authenticate": "Bearer"}
    return {"x-should-retry": "false"} if isinstance(error, GivenUp) else {}


def body_of(error: RequestError) -> bytes:
    """The JSON of a request's error."""
    status = status_of(error)
    return error_json(status, _renamed(str(error)), param=error.field and _renamed(error.field), code=_code(error))


def _code(error: RequestError) -> str | None:
    if isinstance(error, PromptTooLong):
        return "context_length_exceeded"
    if isinstance(error, NotKept):
        return "request_not_found"
    if isinstance(error, BadField):
        return error.name
    return "invalid_value" if isinstance(error, InvalidRequest) else CODES.get(status_of(error))


def _renamed(text: str) -> str:
    """A field, or a text that begins with one, by its name here."""
    return _FIELD.sub(lambda match: NAMES[match[0]], text)


def error_json(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """OpenAI's error body, of at most MAX_BYTES."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    for size in (MAX_TEXT_BYTES, MAX_TEXT_BYTES // 8):
        shown = brief(message, size), None if param is None else brief(param, size // 4)
        error: dict[str, Any] = {"message": shown[0], "type": kind, "param": shown[1], "code": code}
        if len(body := to_json({"error": error})) <= MAX_BYTES:
            break
    return body
