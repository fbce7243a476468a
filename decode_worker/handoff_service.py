"""The server side of `HandoffService`: the hand-offs of one decode worker, with real streams, links and clock."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc

from kvrelay.decode_worker.kv_receiver import KVReceiver, ReceiverHost
from kvrelay.rpc.identity import WorkerId
from kvrelay.rpc.options import HELLO_SECONDS
from kvrelay.transfer.links.endpoint_loop import EndpointLoop, HandoffSetup
from kvrelay.transfer.protocol.messages import SERVICE, Code, Hello, Message, Refuse, decode, encode
from kvrelay.transfer.protocol.outbox import WRITE_TIMEOUT_SECONDS, Outbox
from kvrelay.transfer.protocol.packing import WireError, clip
from kvrelay.transfer.protocol.peers import NEWS_SECONDS, Peer

Context = grpc.aio.ServicerContext[bytes, bytes]


class HandoffService:
    """Runs the `KVReceiver` of one decode worker on the running event loop, until `close`."""

    def __init__(self, setup: HandoffSetup, host: ReceiverHost) -> None:
        self._loop = EndpointLoop(setup)
        self.receiver = KVReceiver(self._loop.context, self._loop.frames, host)
        self._loop.start(self.receiver)

    async def close(self, code: Code = Code.CLOSED) -> None:
        """Ends all hand-offs, streams and links, for this reason."""
        self.receiver.end_pairs(code)
        await self._loop.stop()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Lets a server that hasn't started take control streams."""
        control = grpc.stream_stream_rpc_method_handler(self._control)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Control": control}),))

    async def _control(self, requests: AsyncIterator[bytes], context: Context) -> None:
        receiver = self.receiver
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello, messages = await read_hello(requests)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {HELLO_SECONDS:g} s")
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        peer = await receiver.peers.met(WorkerId(hello.worker, hello.incarnation), NEWS_SECONDS)
        refusal = receiver.objection(hello)
        if refusal is not None or peer is None:
            code, reason = refusal or (Code.UNKNOWN_PEER, f"{hello.worker} has just left the membership")
            await context.write(encode([Refuse(code, clip(reason))]))
            return
        stream = IncomingStream(peer, receiver)
        receiver.accept(stream, hello)
        for message in messages:
            receiver.on_message(stream, message)
        await stream.run(requests, context)


class IncomingStream(Outbox):
    """One stream, for as long as it lives.

    The receiver gets each message (`on_message`) and, once, the reason of the end (`stream_ended`), on the event loop.
    """

    def __init__(self, peer: Peer, receiver: KVReceiver) -> None:
        super().__init__()
        self.peer = peer
        self._receiver = receiver
        self._over: tuple[Code, str] | None = None

    def end(self, code: Code, message: str) -> None:
        """See `ControlStream.end`."""
        if self._over is None:
            self._over = code, message
            self.put(Refuse(code, clip(message)))
            self.close()

    async def run(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Reads and writes until either end is done or has failed."""
        reader = asyncio.create_task(self._read(requests), name=f"hand-offs from {self.peer.name}")
        try:
            async for batch in self.batches():
                await asyncio.wait_for(context.write(batch), WRITE_TIMEOUT_SECONDS)
        except (TimeoutError, grpc.RpcError, grpc.aio.BaseError) as error:
            # A sender that dies during a write raises one of these errors, not a cancellation.
            self._ended(Code.CLOSED, f"control stream from {self.peer.name}: {type(error).__name__}")
        finally:
            code, message = self._ended(Code.CLOSED, f"control stream from {self.peer.name} was cut")
            self.close()
            self._receiver.stream_ended(self, code, message)
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for batch in requests:
                for message in decode(batch):
                    if self._over is None:
                        self._receiver.on_message(self, message)
            self._ended(Code.CLOSED, f"{self.peer.name} ended its control stream")
        except WireError as error:
            self.end(Code.PROTOCOL, str(error))
        finally:
            self._ended(Code.CLOSED, f"control stream from {self.peer.name} was cut")
            self.close()

    def _ended(self, code: Code, message: str) -> tuple[Code, str]:
        """Reason of the stream's end: the first one that was found."""
        self._over = self._over or (code, message)
        return self._over


async def read_hello(requests: AsyncIterator[bytes]) -> tuple[Hello, list[Message]]:
    """The first message of a stream, and the other messages of its batch.

    Raises:
        WireError: the first message is not a Hello.
    """
    first = await anext(requests, None)
    messages = [] if first is None else decode(first)
    if not messages or not isinstance(messages[0], Hello):
        raise WireError("the first message of a control stream must be Hello")
    return messages[0], messages[1:]
