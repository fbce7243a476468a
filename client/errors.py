"""The exceptions that a call can raise."""

from collections.abc import Iterable
from typing import cast

import grpc

RETRY_DELAY_KEY = "retry-delay-ms"
GIVEN_UP_KEY = "given-up"
BROKEN = ("RST_STREAM", "Stream removed")
"""Parts of the text of INTERNAL or UNKNOWN that show that gRPC made it of a broken connection."""


class KvrelayError(Exception):
    """A call that failed. `code` is the gRPC status; None where the request never left this process."""

    def __init__(self, message: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(message)
        self.code = code


class InvalidRequest(KvrelayError, ValueError):
    """The request can never be served as it is; the text names the field, its value and what is allowed."""


class Exhausted(KvrelayError):
    """The cluster is full."""

    def __init__(self, message: str, code: grpc.StatusCode | None = None, retry_after: float | None = None) -> None:
        super().__init__(message, code)
        self.retry_after = retry_after
        """Seconds after which to retry; None if the router gave no delay."""


class Unavailable(KvrelayError, ConnectionError):
    """No router was reached, or the router has no worker that can take the request now."""

    def __init__(self, message: str, code: grpc.StatusCode | None = None, *, given_up: bool = False) -> None:
        super().__init__(message, code)
        self.given_up = given_up
        """Whether several workers have tried the request in vain, so that the client doesn't try it again by itself."""


class DeadlineExceeded(KvrelayError, TimeoutError):
    """The call's timeout, or a time limit of the router, has passed."""


class Cancelled(KvrelayError):
    """The other side ended the call, or `close` was called during a read."""


class Unauthenticated(KvrelayError, PermissionError):
    """The router asks for an API key, or does not know the one that it got."""


class InternalError(KvrelayError):
    """A defect of kvrelay."""


_KINDS: dict[grpc.StatusCode, type[KvrelayError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: InvalidRequest,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}


def from_grpc(error: grpc.RpcError) -> KvrelayError:
    """The exception for a gRPC status."""
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return KvrelayError(str(error))
    code, message = error.code(), error.details() or ""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        # gRPC's own limit, of this process or of the router, far above what the router allows.
        return InvalidRequest(message, grpc.StatusCode.INVALID_ARGUMENT)
    metadata = dict(cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ()))
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and any(sign in message for sign in BROKEN):
        return Unavailable(message, grpc.StatusCode.UNAVAILABLE)
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(message or code.name, code, given_up=GIVEN_UP_KEY in metadata)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        delay = str(metadata.get(RETRY_DELAY_KEY, ""))
        return Exhausted(message, code, int(delay) / 1000 if delay.isdecimal() else None)
    return _KINDS.get(code, KvrelayError)(message or code.name, code)
