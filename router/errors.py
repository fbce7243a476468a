"""The ways in which a request can fail, each with the gRPC status that its client gets."""

import math
from typing import ClassVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]  # it ships no types
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # it ships no types

from kvrelay.router.trace import Outcome

MAX_VALUE_CHARACTERS = 64
MAX_TEXT_BYTES = 1024
"""Size limit of an error's text in bytes; half as many if it isn't ASCII, as gRPC then writes three bytes for each."""
RETRY_DELAY_KEY = "retry-delay-ms"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
"""Key of a `google.rpc.Status` with the details of an error, as gRPC's libraries read it."""
GIVEN_UP_KEY = "given-up"
RETRY_DELAY_SECONDS = 1.0
"""Seconds after which a client should retry after RESOURCE_EXHAUSTED, if nothing else is known."""


class RequestError(Exception):
    """A request that ends without a completion. Its text goes to the client and to the log: never any of a prompt."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    outcome: ClassVar[Outcome] = "internal"
    """The value of `RequestTrace.outcome`."""
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    """Trailing metadata of the status."""
    field: str | None = None
    """The field of the request that is at fault."""

    def __init__(self, text: str = "") -> None:
        super().__init__(brief(text))


class InvalidArgument(RequestError):
    """No worker can ever serve the request as it is."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    outcome = "invalid"


class SlowRequest(InvalidArgument):
    """The request did not arrive in time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class InvalidRequest(InvalidArgument):
    """A field of the request is beyond a limit; the text names the field, its value and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {shorten(value)}; allowed: {allowed}")
        self.field = field.partition(":")[0]


class PromptTooLong(InvalidRequest):
    """The prompt leaves no token of the context, or fewer than the request asks for."""


class BadField(InvalidArgument):
    """A field of a JSON body has a wrong type or form."""

    def __init__(self, text: str, field: str, code: str | None) -> None:
        """
        Args:
            code: OpenAI's name of what is wrong with it.
        """
        super().__init__(text)
        self.field = field
        self.name = code


class ModelNotFound(RequestError):
    """The request names another model than the served one."""

    code = grpc.StatusCode.NOT_FOUND
    outcome = "invalid"
    field = "model"


class NotKept(RequestError):
    """The router has no request of this name, or none any more."""

    code = grpc.StatusCode.NOT_FOUND
    outcome = "invalid"


class Unauthenticated(RequestError):
    """The caller has not shown who it is."""

    code = grpc.StatusCode.UNAUTHENTICATED
    outcome = "invalid"


class Forbidden(RequestError):
    """The caller is known, and may not ask for this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    outcome = "invalid"


class Exhausted(RequestError):
    """The cluster is full; the metadata says when to retry."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    outcome = "exhausted"

    def __init__(self, text: str = "", retry_seconds: float = RETRY_DELAY_SECONDS) -> None:
        super().__init__(text)
        self.retry_seconds = retry_seconds
        """Seconds after which to try again."""
        milliseconds = math.ceil(retry_seconds * 1000)
        info = RetryInfo(retry_delay=Duration(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 10**6))
        status = Status(code=self.code.value[0], message=str(self))
        status.details.add().Pack(info)
        self.metadata = ((RETRY_DELAY_KEY, str(milliseconds)), (STATUS_DETAILS_KEY, status.SerializeToString()))


class TargetMissed(Exhausted):
    """The request could not meet the targets of its class; the metadata says when an equal one could."""


class QueueOverflow(Exhausted):
    """The queue had no room for the request, or gave its place there to another client's."""


class LimitReached(Exhausted):
    """The caller has used up what it may ask for now."""


class Unavailable(RequestError):
    """No worker can take the request now."""

    code = grpc.StatusCode.UNAVAILABLE
    outcome = "unavailable"


class GivenUp(Unavailable):
    """Several workers have tried in vain; the metadata asks the client not to try again by itself."""

    metadata = ((GIVEN_UP_KEY, "1"),)


class Superseded(RequestError):
    """A later call of the same client continues the request."""

    code = grpc.StatusCode.ABORTED
    outcome = "cancelled"


class DeadlineExceeded(RequestError):
    """The client's deadline, or the router's limit on the first token, has passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    outcome = "deadline"


class SlowReader(RequestError):
    """The client did not read a message within the idle timeout."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    outcome = "cancelled"


class InternalError(RequestError):
    """A defect of kvrelay."""


def brief(text: str, most: int = MAX_TEXT_BYTES) -> str:
    """A text of at most `most` bytes in UTF-8, or half of them if it isn't ASCII; what can't be encoded is escaped."""
    if text.isascii() and len(text) <= most:
        return text
    encoded = text[:most].encode(errors="backslashreplace")
    most = most if encoded.isascii() else most // 2
    return encoded.decode() if len(encoded) <= most else encoded[: most - 3].decode(errors="ignore") + "..."


def shorten(value: object) -> str:
    """`repr(value)`, cut to a length that fits in an error message."""
    # The value is cut first, because the `repr` of some megabytes takes milliseconds.
    text = repr(value[: MAX_VALUE_CHARACTERS + 1] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}..."
