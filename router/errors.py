"""How a request can fail, each as the gRPC status that its client sees."""

from typing import ClassVar

import grpc

from kvrelay.router.records import Outcome

MAX_VALUE_CHARACTERS = 64
RETRY_DELAY_KEY = "retry-delay-ms"


class RequestError(Exception):
    """A request that ends without a completion. Its text goes to the client and to the log: never any of a prompt."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    outcome: ClassVar[Outcome] = "internal"
    """The value of `RequestRecord.outcome`."""

    metadata: tuple[tuple[str, str], ...] = ()
    """Trailing metadata of the status."""


class InvalidRequest(RequestError):
    """The request can never be served as it is: names the field, its value and what is allowed."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    outcome = "invalid"

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} is {shorten(value)}; allowed: {limit}")
        self.field = field


class InvalidPayload(RequestError):
    """The bytes are no message of the contract."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    outcome = "invalid"


class RefusedByWorker(RequestError):
    """A worker says that no worker can serve the request: it differs from the router about a limit."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    outcome = "invalid"


class Exhausted(RequestError):
    """The cluster is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    outcome = "exhausted"

    def __init__(self, message: str, retry_delay_seconds: float) -> None:
        super().__init__(message)
        self.metadata = ((RETRY_DELAY_KEY, str(round(retry_delay_seconds * 1000))),)


class Unavailable(RequestError):
    """No worker can take the request now."""

    code = grpc.StatusCode.UNAVAILABLE
    outcome = "unavailable"


class DeadlineExceeded(RequestError):
    """The client's deadline, or the router's limit on the first token, has passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    outcome = "deadline"


class SlowReader(RequestError):
    """The client has not taken a message for the idle timeout."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    outcome = "cancelled"


class InternalError(RequestError):
    """A defect."""


def shorten(value: object) -> str:
    """`value` as a message shows it; a long one is cut."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}..."
