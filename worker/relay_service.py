"""The worker's end of the relay: one stream per router, one message per engine step."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from kvrelay.internal.v1.worker_pb2 import RelayRequest, RelayResponse
from kvrelay.internal.v1.worker_pb2_grpc import WorkerServiceServicer
from kvrelay.rpc.options import HELLO_SECONDS
from kvrelay.worker.relay.requests import key_of
from kvrelay.worker.relay.stream import RelayStream
from kvrelay.worker.worker import Worker

logger = logging.getLogger(__name__)

WRITE_TIMEOUT_SECONDS = 5.0


class RelayService(WorkerServiceServicer):
    """Serves `kvrelay.internal.v1.WorkerService` for one incarnation of a worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._id = worker.id

    async def Relay(
        self,
        request_iterator: AsyncIterator[RelayRequest],
        context: "grpc.aio.ServicerContext[RelayRequest, RelayResponse]",
    ) -> None:
        worker = self._worker
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                first = await anext(request_iterator, None)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {HELLO_SECONDS:g} s")
        if first is None or first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a relay must be hello")
        if first.hello.worker_incarnation != self._id.incarnation:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this is {self._id}, not incarnation {first.hello.worker_incarnation!r}",
            )
        stream = RelayStream(first.hello.router, worker.load, worker.costs)
        reader = asyncio.create_task(self._read(request_iterator, stream), name=f"relay {stream.router}")
        try:
            await context.write(stream.first(worker.hello()))
            worker.attach(stream)
            async for message in stream.messages():
                await asyncio.wait_for(context.write(message), WRITE_TIMEOUT_SECONDS)
        except (TimeoutError, grpc.RpcError, grpc.aio.BaseError) as error:
            # A client that dies during a write raises one of these errors, not a cancellation.
            logger.warning("router lost", extra={"router": stream.router, "reason": type(error).__name__})
        finally:
            reader.cancel()
            worker.abandon(stream)
            await asyncio.wait((reader,))
            if not reader.cancelled() and (failure := reader.exception()) is not None:
                logger.error("reading a relay failed", extra={"router": stream.router}, exc_info=failure)

    async def _read(self, requests: AsyncIterator[RelayRequest], stream: RelayStream) -> None:
        try:
            async for request in requests:
                if self._worker.id != self._id:
                    return  # it has taken another role since
                match request.WhichOneof("message"):
                    case "submit":
                        stream.submits_seen += 1
                        self._worker.submit(request.submit, stream)
                    case "cancel":
                        self._worker.cancel(key_of(request.cancel), stream)
                    case "begin":
                        self._worker.begin(key_of(request.begin), stream)
                    case "answered":
                        self._worker.answered(request.answered, stream)
                    case "fence":
                        self._worker.fence(request.fence)
        finally:
            stream.close()
