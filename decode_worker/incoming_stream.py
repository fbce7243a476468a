"""One control stream from a prefill worker to this decode worker."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc

from kvrelay.internal.v1.handoff_pb2 import ControlRequest, ControlResponse
from kvrelay.transfer.control import WRITE_TIMEOUT_SECONDS, Outbox
from kvrelay.transfer.messages import Code, Hello, Message, Refuse, decode
from kvrelay.transfer.packing import WireError, clip
from kvrelay.transfer.peers import Peer

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[ControlRequest, ControlResponse]


class IncomingStream:
    """The stream, for as long as it lives."""

    def __init__(self, peer: Peer, hello: Hello) -> None:
        self.peer = peer
        self.layout = hello.layout
        self.gpu = hello.gpu
        self.frame_bytes = hello.frame_bytes
        """Of the sender's frames, at most."""
        self.epoch = 0
        """Of the link that the sender dialled last."""
        self.outbox = Outbox()
        self.over: tuple[Code, str] | None = None

    def end(self, code: Code, message: str) -> None:
        """Ends the stream and tells the sender why."""
        if self.over is None:
            self.over = code, message
            self.outbox.put(Refuse(code, clip(message)))
            self.outbox.close()

    async def run(
        self,
        rest: AsyncIterator[ControlRequest],
        context: Context,
        on_message: Callable[["IncomingStream", Message], None],
    ) -> None:
        """Reads and writes until either end is done, or has failed; `over` then says why."""
        reader = asyncio.create_task(self._read(rest, on_message), name=f"hand-offs from {self.peer.name}")
        try:
            async for frame in self.outbox.frames():
                await asyncio.wait_for(context.write(ControlResponse(frame=frame)), WRITE_TIMEOUT_SECONDS)
        except (TimeoutError, grpc.RpcError, grpc.aio.BaseError) as error:
            # A sender that dies during a write shows as one of these, not as a cancellation.
            self._ended(Code.CLOSED, f"control stream from {self.peer.name}: {type(error).__name__}")
        finally:
            self._ended(Code.CLOSED, f"control stream from {self.peer.name} was cut")
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader

    async def _read(
        self, requests: AsyncIterator[ControlRequest], on_message: Callable[["IncomingStream", Message], None]
    ) -> None:
        try:
            async for request in requests:
                for message in decode(request.frame):
                    if self.over is None:
                        on_message(self, message)
            self._ended(Code.CLOSED, f"{self.peer.name} ended its control stream")
        except WireError as error:
            self.end(Code.PROTOCOL, str(error))
        finally:
            self._ended(Code.CLOSED, f"control stream from {self.peer.name} was cut")
            self.outbox.close()

    def _ended(self, code: Code, message: str) -> None:
        self.over = self.over or (code, message)


async def read_hello(requests: AsyncIterator[ControlRequest]) -> tuple[Hello, list[Message]]:
    """The first message of a stream, and those that came in the same frame.

    Raises:
        WireError: it is no Hello.
    """
    first = await anext(requests, None)
    messages = [] if first is None else decode(first.frame)
    if not messages or not isinstance(messages[0], Hello):
        raise WireError("the first message of a control stream must be Hello")
    return messages[0], messages[1:]
