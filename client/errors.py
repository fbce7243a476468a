"""The exceptions that a call can raise."""

from collections.abc import Iterable
from typing import cast

import grpc

RETRY_DELAY_KEY = "retry-delay-ms"


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
    grpc.StatusCode.UNAVAILABLE: Unavailable,
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
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        metadata = dict(cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ()))
        delay = str(metadata.get(RETRY_DELAY_KEY, ""))
        return Exhausted(message, code, int(delay) / 1000 if delay.isdecimal() else None)
    return _KINDS.get(code, KvrelayError)(message or code.name, code)
