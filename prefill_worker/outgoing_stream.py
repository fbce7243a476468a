"""One control stream from this prefill worker to one decode worker."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import grpc

from kvrelay.internal.v1.handoff_pb2 import ControlRequest, ControlResponse
from kvrelay.internal.v1.handoff_pb2_grpc import HandoffServiceStub
from kvrelay.rpc.options import channel_options
from kvrelay.transfer.control import WRITE_TIMEOUT_SECONDS, Outbox
from kvrelay.transfer.messages import Code, Message, decode
from kvrelay.transfer.packing import WireError
from kvrelay.transfer.peers import Peer

logger = logging.getLogger(__name__)

Call = grpc.aio.StreamStreamCall[ControlRequest, ControlResponse]


class OutgoingStream:
    """The stream, for as long as it lives; another one is made after it.

    `on_message` is given each message of the receiver, `on_end` (once) why the stream is over. Both on the event loop.
    """

    def __init__(
        self,
        peer: Peer,
        on_message: Callable[["OutgoingStream", Message], None],
        on_end: Callable[["OutgoingStream", Code, str], None],
    ) -> None:
        self.peer = peer
        self.outbox = Outbox()
        self.gpu = False
        """Whether the receiver's KV lies on a GPU, once it has said so: before it grants anything."""
        self._on_message = on_message
        self._on_end = on_end
        self._over: tuple[Code, str] | None = None
        self._task = asyncio.create_task(self._run(), name=f"hand-offs to {peer.name}")
        # Not at the end of the task itself, which never begins if it is cancelled first.
        self._task.add_done_callback(self._finish)

    def end(self, code: Code, message: str) -> None:
        """Ends the stream, for this reason. `on_end` follows."""
        if self._over is None:
            self._over = code, message
            self.outbox.close()
            self._task.cancel()

    async def closed(self) -> None:
        """Returns when the stream has ended and `on_end` was called."""
        await asyncio.wait([self._task])

    def _finish(self, task: asyncio.Task[tuple[Code, str]]) -> None:
        self.outbox.close()
        self._over = self._over or (
            (Code.CLOSED, f"the control stream to {self.peer.name} ended") if task.cancelled() else task.result()
        )
        self._on_end(self, *self._over)

    async def _run(self) -> tuple[Code, str]:
        """Why the stream is over, unless it was told."""
        stream = f"control stream to {self.peer.name}"
        try:
            async with grpc.aio.insecure_channel(self.peer.address, options=channel_options()) as channel:
                await self._converse(HandoffServiceStub(channel).Control())
        except grpc.aio.AioRpcError as error:
            return Code.CLOSED, f"{stream}: {error.code().name}: {error.details()}"
        except WireError as error:
            return Code.PROTOCOL, f"{stream}: {error}"
        except Exception as error:
            logger.exception("a control stream failed", extra={"peer": self.peer.name})
            return Code.INTERNAL, f"{stream}: {type(error).__name__}"
        return Code.CLOSED, f"{stream} was ended by {self.peer.name}"

    async def _converse(self, call: Call) -> None:
        writer = asyncio.create_task(self._write(call), name=f"hand-offs to {self.peer.name}: writer")
        try:
            async for response in call:
                for message in decode(response.frame):
                    self._on_message(self, message)
        finally:
            writer.cancel()
            call.cancel()
            with suppress(asyncio.CancelledError):
                await writer

    async def _write(self, call: Call) -> None:
        try:
            async for frame in self.outbox.frames():
                await asyncio.wait_for(call.write(ControlRequest(frame=frame)), WRITE_TIMEOUT_SECONDS)
        except WireError:
            logger.exception("a message of this worker's own can't be written", extra={"peer": self.peer.name})
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reading side of the same call reports it
        finally:
            call.cancel()
