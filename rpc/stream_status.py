"""The status of a stream call that is written to while its other end ends it."""

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

WRITE_FAILED = "Internal error from Core"
"""Details of the status that grpc.aio gives a call whose write fails."""
StreamCall = grpc.aio.StreamStreamCall[Any, Any]


@contextmanager
def peer_status(call: StreamCall) -> Iterator[None]:
    """Makes the reads within this context end with the status that the call's other end gave it.

    A write that meets the end of its call makes grpc.aio put a status of its own, INTERNAL, in place of the other end's
    (https://github.com/grpc/grpc/issues/36066). If the other end's comes first, as it mostly does, only callbacks of
    the call are sure to get it. If it comes second, the last read gets it.

    Enter the context before the first write.

    Raises:
        grpc.aio.AioRpcError: the status isn't OK.
    """
    statuses: list[grpc.aio.AioRpcError] = []
    call.add_done_callback(lambda ended: statuses.append(_status_of(ended)))
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.details() != WRITE_FAILED or not statuses:
            raise
        if statuses[0].code() is not grpc.StatusCode.OK:
            raise statuses[0] from None


def _status_of(ended: StreamCall) -> grpc.aio.AioRpcError:
    """The status of a call that has ended."""
    code, details = _result(ended.code()), _result(ended.details())
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, "")


def _result(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as returned:
        return returned.value
    raise RuntimeError("the coroutine waits")
