"""What can go wrong with a call, as exceptions."""

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
        """Seconds after which to come again, where the router said so."""


class Unavailable(KvrelayError, ConnectionError):
    """No router was reached, or it has no worker that can take the request now."""


class DeadlineExceeded(KvrelayError, TimeoutError):
    """The call's timeout, or a limit of the router's, has passed."""


class Cancelled(KvrelayError):
    """The call was ended by the other side, or `close` was called in the middle of a read."""


class InternalError(KvrelayError):
    """A defect of kvrelay's."""


_KINDS: dict[grpc.StatusCode, type[KvrelayError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INTERNAL: InternalError,
}


def from_grpc(error: grpc.RpcError) -> KvrelayError:
    """The exception that stands for a gRPC status."""
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return KvrelayError(str(error))
    code, message = error.code(), error.details() or ""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Exhausted(message, code, _retry_after(error))
    return _KINDS.get(code, KvrelayError)(message or code.name, code)


def _retry_after(error: grpc.Call | grpc.aio.AioRpcError) -> float | None:
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == RETRY_DELAY_KEY and str(value).isdecimal():
            return int(value) / 1000
    return None
