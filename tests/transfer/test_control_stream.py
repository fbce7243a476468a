"""The control stream: a hostile, confused or outdated peer changes nothing, is told why, and ends no process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import msgpack
import pytest
from test_handoff_messages import INVALID

from kvrelay.engine.kv.layout import CacheLayout, KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.prefill_worker.handoff_client import HandoffClient
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.events import tokens_digest
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_KEYS,
    SERVICE,
    VERSION,
    Abort,
    Ack,
    Code,
    Dial,
    Finish,
    Grant,
    Hello,
    Key,
    Message,
    Nack,
    Offer,
    Push,
    Refuse,
    Renew,
    Wait,
    decode,
    encode,
)
from kvrelay.transfer.protocol.peers import PeerTable
from support.handoff import HOST, LAYOUT, RECEIVER, SENDER, Ends, Pair, SendingHost, links_of, pair, prompt, setup
from support.secrets import METADATA

pytestmark = pytest.mark.anyio
CONFIG = TransferConfig(frame_timeout_seconds=2.0)
HELLO = LocalWorker(SENDER, CacheLayout.of(LAYOUT), "fingerprint").hello(RECEIVER, CONFIG)
PATIENCE_SECONDS = 10.0
TOKENS = list(range(20))
KEY = ("r", 1)
OLD = bytes(msgpack.packb([{"type": "Hello", "version": 6, "worker": SENDER.name}]))


class RawPeer:
    """A control stream whose every byte the test writes."""

    def __init__(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
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


@asynccontextmanager
async def raw_peer(world: Pair) -> AsyncIterator[RawPeer]:
    async with grpc.aio.insecure_channel(f"{HOST}:{world.port}") as channel:
        peer = RawPeer(channel.stream_stream(f"/{SERVICE}/Control", None, None)(None, metadata=METADATA))
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


@pytest.fixture
async def world() -> AsyncIterator[Pair]:
    """A pair that afterwards still works."""
    async with pair(CONFIG, transports=links_of("fake")) as world:
        yield world
        await still_works(world)


async def refused_by(peer: RawPeer, *batches: bytes) -> Refuse:
    """The refusal with which a decode worker answers these batches."""
    for batch in batches:
        await peer.call.write(batch)
    refusal = await peer.receive(Refuse)
    assert isinstance(refusal, Refuse)
    return refusal


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (b"", ""),
        (b"\xff" * 100, ""),
        (b"\x93" * 1000, ""),
        (encode([Renew((KEY,))]), ""),
        (b"\x0a" + bytes([len(OLD)]) + OLD, f"version {VERSION} of the protocol"),
    ],
    ids=["nothing", "no message", "another one", "no hello", "a hello before protobuf"],
)
async def test_a_stream_that_does_not_begin_with_hello_is_refused(world: Pair, batch: bytes, why: str) -> None:
    async with raw_peer(world) as peer:
        await peer.call.write(batch)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await peer.receive(Hello)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert why in (error.value.details() or "")


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"cache": CacheLayout.of(replace(LAYOUT, layers=LAYOUT.layers + 1))}, Code.INCOMPATIBLE, "layers"),
        ({"cache": CacheLayout.of(replace(LAYOUT, head_dim=LAYOUT.head_dim * 2))}, Code.INCOMPATIBLE, "head_dim"),
        ({"cache": CacheLayout.of(replace(LAYOUT, kv_heads=LAYOUT.kv_heads * 2))}, Code.INCOMPATIBLE, "kv_heads"),
        ({"fingerprint": "another model"}, Code.INCOMPATIBLE, "fingerprint"),
        ({"version": 2**31}, Code.INCOMPATIBLE, "version"),
        ({"checksum": False}, Code.INCOMPATIBLE, "checksum"),
        ({"worker": "prefill-9"}, Code.UNKNOWN_PEER, "not a member"),
        ({"incarnation": "another"}, Code.UNKNOWN_PEER, "not a member"),
        ({"peer_incarnation": "another"}, Code.UNKNOWN_PEER, "incarnation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_worker_that_differs_is_refused_with_the_field(
    world: Pair, change: dict[str, object], code: Code, field: str
) -> None:
    async with raw_peer(world) as peer:
        refusal = await refused_by(peer, encode([replace(HELLO, **change)]))  # type: ignore[arg-type]  # as named
        assert refusal.code is code
        assert field in refusal.message


async def test_an_invalid_batch_ends_the_stream_with_the_reason(world: Pair) -> None:
    world.expect(KEY, TOKENS)
    wrong = {name: batch for name, (batch, _) in INVALID.items()}
    for name, batch in (wrong | {"to a sender": encode([Ack("r", 1, 1)]), "too": encode([Wait("r", 1)])}).items():
        async with raw_peer(world) as peer:
            assert (await refused_by(peer, encode([HELLO]), batch)).code is Code.PROTOCOL, name
        assert not world.receiving.reservations, name


async def test_messages_about_unknown_attempts_change_nothing(world: Pair) -> None:
    async with raw_peer(world) as peer:
        await peer.send(HELLO)
        await peer.send(
            Renew((("nobody", 1),)),
            Abort("nobody", 1, Code.CANCELLED, ""),
            Finish("nobody", 1, 1, 7, 1, 1),
            Push("nobody", 1, 1, 0, 0, 16, 100),
        )
        world.expect(KEY, TOKENS)
        await peer.send(Offer("r", 1, 21, b"0" * 16))
        nack = await peer.receive(Nack)
        assert isinstance(nack, Nack)
        assert nack.key == KEY
        assert not world.receiving.reservations
        assert world.receiver.dropped >= 3


async def test_an_epoch_is_dialled_once() -> None:
    async with pair(CONFIG, transports=links_of("fake")) as world:
        for epoch in (5, 4):
            async with raw_peer(world) as peer:
                await peer.send(HELLO, Dial(epoch, "fake"))
                await peer.receive(Hello if epoch == 5 else Refuse)
                if epoch == 5:
                    await peer.send(Dial(5, "fake"))
                    await peer.receive(Refuse)


async def test_a_frame_longer_than_announced_ends_the_stream_before_it_is_received(world: Pair) -> None:
    async with raw_peer(world) as peer:
        long = Push("r", 1, 1, 0, 0, 16, CONFIG.frame_bytes + 1)
        refusal = await refused_by(peer, encode([HELLO, Dial(1, "fake"), long]))
        assert str(CONFIG.frame_bytes + 1) in refusal.message


async def test_a_second_stream_of_the_same_worker_takes_the_place_of_the_first(world: Pair) -> None:
    async with raw_peer(world) as first, raw_peer(world) as second:
        await first.send(HELLO)
        await first.receive(Hello)
        await second.send(HELLO)
        await second.receive(Hello)
        await first.receive(Refuse)


# Manifests.


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        (Offer("r", 1, 21, b"d" * 16), "tokens: 20 announced here, 21 offered"),
        (Offer("r", 1, 2**31, b"d" * 16), "tokens: 20 announced here"),
        (Offer("r", 1, 20, b"d" * 16), "digest"),
    ],
)
async def test_a_manifest_that_was_not_announced_is_refused_before_any_allocation(
    world: Pair, offer: Offer, reason: str
) -> None:
    world.expect(KEY, TOKENS)
    async with raw_peer(world) as peer:
        await peer.send(HELLO, Dial(1, "fake"), offer)
        nack = await peer.receive(Nack)
        assert isinstance(nack, Nack)
        assert nack.code is Code.MANIFEST
        assert reason in nack.message
        assert not world.receiving.reservations
        await world.ends.until(lambda: KEY in world.ends.import_failed)


BLOCK_BYTES, LAYER_BYTES = LAYOUT.block_bytes, LAYOUT.block_bytes // LAYOUT.layers
WRONG: dict[str, Push | Finish] = {
    "past the end": Push("r", 1, 1, 0, 16, 16, BLOCK_BYTES),
    "2 G of tokens": Push("r", 1, 1, 0, 0, 2**31, BLOCK_BYTES),
    "from token 2 G on": Push("r", 1, 1, 0, 2**31, 16, BLOCK_BYTES),
    "half a block": Push("r", 1, 1, 0, 0, 7, 7 * LAYOUT.token_bytes),
    "other bytes than tokens": Push("r", 1, 1, 0, 0, 16, BLOCK_BYTES + 1),
    "no first block": Push("r", 1, 1, 0, 16, 4, 4 * LAYOUT.token_bytes),
    "the second frame first": Push("r", 1, 1, 1, 0, 16, BLOCK_BYTES),
    "the second half first": Push("r", 1, 1, 0, 0, 16, LAYER_BYTES * 2, 1, 2),
    "half of the layers, and all bytes": Push("r", 1, 1, 0, 0, 16, BLOCK_BYTES, 0, 2),
    "more parts than layers": Push("r", 1, 1, 0, 0, 16, LAYER_BYTES, 0, 4),
    "frame 2 G": Push("r", 1, 1, 2**31, 0, 16, BLOCK_BYTES),
    "no frames": Finish("r", 1, 1, 7, 0, 20 * LAYOUT.token_bytes),
    "2 G frames": Finish("r", 1, 1, 7, 2**31, 20 * LAYOUT.token_bytes),
    "no bytes": Finish("r", 1, 1, 7, 0, 0),
    "2**53 bytes": Finish("r", 1, 1, 7, 2, 2**53),
}


@pytest.mark.parametrize("name", WRONG)
async def test_an_invalid_push_or_finish_is_refused_and_the_blocks_are_released(world: Pair, name: str) -> None:
    world.expect(KEY, TOKENS)
    async with raw_peer(world) as peer:
        await peer.send(HELLO, Dial(1, "fake"), Offer("r", 1, 20, tokens_digest(TOKENS)))
        await peer.receive(Grant)
        await peer.send(WRONG[name])
        nack = await peer.receive(Nack)
        assert isinstance(nack, Nack)
        assert nack.code is Code.PROTOCOL
        await world.released()
        assert not world.ends.imported


# To a prefill worker.

Control = Callable[[AsyncIterator[bytes], "grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[None]]


@asynccontextmanager
async def answered_by(world: Pair, control: Control) -> AsyncIterator[None]:
    """The pair's sender takes a service with this control stream for the decode worker."""
    server, honest = grpc.aio.server(), list(world.sender.peers)
    handlers = {"Control": grpc.stream_stream_rpc_method_handler(control)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    world.sender.peers.update([replace(honest[0], address=f"{HOST}:{port}")])
    yield
    await server.stop(None)
    world.sender.peers.update(honest)


async def test_a_prefill_worker_fails_hand_offs_to_a_broken_peer_and_goes_on() -> None:
    """The peer sends an invalid batch after its hello, or refuses the stream as one does that can't read a hello."""
    sent: list[bytes | None] = [None]

    async def control(requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        if sent[-1] is None:
            await anext(aiter(requests))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not msgpack: Unpack failed: incomplete input")
        await context.write(
            encode([LocalWorker(RECEIVER, CacheLayout.of(LAYOUT), "fingerprint").hello(SENDER, CONFIG)])
        )
        await context.write(sent[-1])
        async for _ in requests:
            pass

    async with pair(TransferConfig(frame_timeout_seconds=10.0), transports=links_of("fake")) as world:
        batches = {name: batch for name, (batch, _) in INVALID.items() if not name.startswith("truncated")}
        async with answered_by(world, control):
            for number, (name, batch) in enumerate([("a refusal", None), *batches.items()]):
                sent.append(batch)
                code, reason = await world.fails((f"r{number}", 1), TOKENS)
                assert code is (Code.PROTOCOL if batch is not None else Code.INCOMPATIBLE), (name, reason)
                assert batch is not None or f"version {VERSION} of the protocol" in reason
        await still_works(world)


async def test_leases_of_many_hand_offs_are_renewed_in_messages_of_bounded_size() -> None:
    keys = [(f"r{number}", 1) for number in range(2 * MAX_KEYS + 1)]
    renewed: list[Key] = []

    async def control(requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        async for batch in requests:
            renewed.extend(key for message in decode(batch) if isinstance(message, Renew) for key in message.keys)

    config = TransferConfig(lease_seconds=2.0)
    async with pair(config, transports=links_of("fake")) as world, answered_by(world, control):
        for key in keys:
            world.sender.begin(key, RECEIVER, prompt(5))
        await world.ends.until(lambda: len(renewed) >= len(keys))
    assert renewed[: len(keys)] == keys


async def test_a_layer_of_a_block_that_fits_into_no_frame_is_refused_at_start() -> None:
    layout = KVLayout(layers=2, kv_heads=1024, head_dim=512, block_size=128, dtype="float32")
    worker = setup(SENDER, KVPool(LAYOUT, 1), PeerTable(), CONFIG, {})
    worker = replace(worker, local=replace(worker.local, cache=CacheLayout.of(layout)))
    with pytest.raises(ValueError, match=rf"{layout.block_bytes} bytes.*{MAX_FRAME_BYTES}"):
        HandoffClient(worker, SendingHost(Ends()))
