"""The client side of `HandoffService`: the hand-offs of one prefill worker, with real streams, links and clock."""

import asyncio
import logging
from contextlib import suppress

import grpc

from kvrelay.prefill_worker.kv_sender import KVSender, SenderHost
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.stream_status import peer_status
from kvrelay.transfer.links.endpoint_loop import EndpointLoop, HandoffSetup
from kvrelay.transfer.protocol.messages import SERVICE, VERSION, Code, decode
from kvrelay.transfer.protocol.outbox import WRITE_TIMEOUT_SECONDS, Outbox
from kvrelay.transfer.protocol.packing import WireError
from kvrelay.transfer.protocol.peers import Peer

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 0.5
"""Longest time in seconds that peers may take to read the last messages of a worker that shuts down."""

Call = grpc.aio.StreamStreamCall[bytes, bytes]


class HandoffClient:
    """Runs the `KVSender` of one prefill worker on the running event loop, until `close`."""

    def __init__(self, setup: HandoffSetup, host: SenderHost) -> None:
        self._loop = EndpointLoop(setup)
        self._credentials = setup.credentials
        self._streams: set[OutgoingStream] = set()
        self.sender = KVSender(self._loop.context, self._loop.frames, host, self._connect)
        self._loop.start(self.sender)

    def _connect(self, peer: Peer, sender: KVSender) -> "OutgoingStream":
        stream = OutgoingStream(peer, sender, self._credentials)
        self._streams = {old for old in self._streams if not old.done} | {stream}
        return stream

    async def close(self, code: Code = Code.CLOSED) -> None:
        """Ends all hand-offs, streams and links, for this reason."""
        for stream in self._streams:
            stream.close()  # when the peer has read what is queued
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._closed()
        self.sender.end_pairs(code)
        await self._closed()
        await self._loop.stop()

    async def _closed(self) -> None:
        for stream in self._streams:
            await stream.ended()


class OutgoingStream(Outbox):
    """The stream, for as long as it lives; the sender opens another one after it.

    The sender gets each message (`on_message`) and, once, the reason of the end (`stream_ended`), on the event loop.
    """

    def __init__(self, peer: Peer, sender: KVSender, credentials: Credentials) -> None:
        super().__init__()
        self.peer = peer
        self._credentials = credentials
        self._sender = sender
        self._over: tuple[Code, str] | None = None
        self._task = asyncio.create_task(self._run(), name=f"hand-offs to {peer.name}")
        # A callback, because the body of a task that is cancelled at once never runs.
        self._task.add_done_callback(self._finish)

    def end(self, code: Code, message: str) -> None:
        """See `ControlStream.end`."""
        if self._over is None:
            self._over = code, message
            self.close()
            self._task.cancel()

    @property
    def done(self) -> bool:
        """Whether the stream has ended."""
        return self._task.done()

    async def ended(self) -> None:
        """Returns when the stream has ended and the sender knows it."""
        await asyncio.wait([self._task])

    def _finish(self, task: asyncio.Task[tuple[Code, str]]) -> None:
        self.close()
        self._over = self._over or (
            (Code.CLOSED, f"the control stream to {self.peer.name} ended") if task.cancelled() else task.result()
        )
        self._sender.stream_ended(self, *self._over)

    async def _run(self) -> tuple[Code, str]:
        """Runs the stream; the reason of its end, unless `end` gave one."""
        stream = f"control stream to {self.peer.name}"
        try:
            async with self._credentials.channel(self.peer.address, "worker") as channel:
                control = channel.stream_stream(f"/{SERVICE}/Control", None, None)
                await self._converse(control(None, metadata=self._credentials.metadata))
        except grpc.aio.AioRpcError as error:
            reason = f"{stream}: {error.code().name}: {error.details()}"
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                return Code.INCOMPATIBLE, f"{reason}; the hello was of version {VERSION} of the protocol"
            return Code.CLOSED, reason
        except WireError as error:
            return Code.PROTOCOL, f"{stream}: {error}"
        except Exception as error:
            logger.exception("a control stream failed", extra={"peer": self.peer.name})
            return Code.INTERNAL, f"{stream}: {type(error).__name__}"
        return Code.CLOSED, f"{stream} was ended by {self.peer.name}"

    async def _converse(self, call: Call) -> None:
        writer = asyncio.create_task(self._write(call), name=f"hand-offs to {self.peer.name}: writer")
        try:
            with peer_status(call):
                async for batch in call:
                    for message in decode(batch):
                        self._sender.on_message(self, message)
        finally:
            writer.cancel()
            call.cancel()
            with suppress(asyncio.CancelledError):
                await writer

    async def _write(self, call: Call) -> None:
        try:
            async for batch in self.batches():
                await asyncio.wait_for(call.write(batch), WRITE_TIMEOUT_SECONDS)
            await call.done_writing()
            return
        except WireError:
            logger.exception("this worker made a message that can't be written", extra={"peer": self.peer.name})
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reading side of the same call reports it
        call.cancel()
