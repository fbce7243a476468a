"""A peer of a real `HandoffService` whose every byte the test writes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.messages import SERVICE, Message, decode, encode
from support.access import METADATA
from support.handoff import LAYOUT, RECEIVER, SENDER, Pair, prompt

CONFIG = TransferConfig(frame_timeout_seconds=2.0)
PATIENCE_SECONDS = 10.0
HELLO = LocalWorker(SENDER, LAYOUT, "fingerprint").hello(RECEIVER, CONFIG)
Call = grpc.aio.StreamStreamCall[bytes, bytes]


class RawPeer:
    """A control stream whose every byte the test writes."""

    def __init__(self, call: Call) -> None:
        self.call = call

    async def send(self, *messages: Message) -> None:
        await self.call.write(encode(messages))

    async def receive(self, kind: type[Message]) -> Message:
        """The next message of this kind; AssertionError if the stream ends first."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (batch := await self.call.read()) is not grpc.aio.EOF:
                for message in decode(batch):
                    if isinstance(message, kind):
                        return message
        raise AssertionError(f"the stream ended without {kind.__name__}")


def control(channel: grpc.aio.Channel) -> RawPeer:
    return RawPeer(channel.stream_stream(f"/{SERVICE}/Control", None, None)(None, metadata=METADATA))


@asynccontextmanager
async def raw_peer(world: Pair) -> AsyncIterator[RawPeer]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{world.port}") as channel:
        peer = control(channel)
        yield peer
        peer.call.cancel()


async def still_works(world: Pair) -> None:
    """Checks that a hand-off still arrives; it takes a second attempt if the raw peer has dialled epoch 1."""
    for attempt in (1, 2):
        key = ("still works", attempt)
        world.announce(key, prompt(20))
        world.compute(key, [0, 1])
        if await world.sent(key):
            return
    raise AssertionError(f"no hand-off works any more: {world.ends.export_failed}")
