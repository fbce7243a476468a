"""Invalid batches and manifests: refused at once, before anything is allocated, and both workers go on serving.

`KVRELAY_SEED=n` runs only mutation n.
"""

import asyncio
import os
import random
import statistics
import time
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import msgpack
import psutil
import pytest
import test_transfer_processes as processes
from test_transfer_processes import KEY, SendingSide

from kvrelay.internal.v1.handoff_pb2 import HandoffBatch, HandoffMessage
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.events import tokens_digest
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.messages import (
    MAX_BATCH_BYTES,
    MAX_KEYS,
    MAX_MESSAGES,
    SERVICE,
    VERSION,
    Abort,
    Ack,
    CloseLink,
    Code,
    Dial,
    Finish,
    Grant,
    Meet,
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
from kvrelay.transfer.protocol.packing import WireError
from support.fake_transport import FakeTransport
from support.handoff import LAYOUT, RECEIVER, SENDER, pair
from support.handoff_process import ReceivingProcess, receiving_process
from support.raw_peer import CONFIG, HELLO, RawPeer, control, fake_pair, raw_peer, still_works

MUTATIONS = 12_000
ON_THE_WIRE = 300
SEED = os.environ.get("KVRELAY_SEED")
TOKENS = list(range(20))
CPU_SECONDS = 1e-3
PEAK_BYTES = 2 * 2**20
"""Bytes of memory for refusing a batch: a small multiple of the longest batch, whatever lengths it claims."""

OFFER: dict[str, Any] = {"request": "r", "attempt": 1, "tokens": 20, "digest": b"0123456789abcdef"}
GIGABYTE = b"\x80\x80\x80\x80\x04"
"""Length of a gigabyte, as protobuf encodes it."""


def packed(*messages: HandoffMessage) -> bytes:
    return HandoffBatch(messages=messages).SerializeToString()


def offer(**changes: object) -> bytes:
    return packed(HandoffMessage(offer=OFFER | changes))


def hello(**layout: Any) -> bytes:
    batch = HandoffBatch.FromString(encode([HELLO]))
    batch.messages[0].hello.layout.MergeFrom(HandoffMessage.Layout(**layout))
    return batch.SerializeToString()


def in_batch(message: bytes) -> bytes:
    return b"\x12" + bytes([len(message)]) + message


def in_offer(*fields: bytes) -> bytes:
    """An offer of these bytes."""
    content = b"".join(fields)
    return in_batch(b"\x32" + bytes([len(content)]) + content)


def renewals(*keys: dict[str, object]) -> HandoffMessage:
    return HandoffMessage(renew={"keys": keys})


KEY_OF_R: dict[str, object] = {"request": "r", "attempt": 1}
SOUND = HandoffMessage.Offer(**OFFER).SerializeToString()
INVALID: dict[str, bytes] = {
    "empty": b"",
    "tokens: text": in_offer(SOUND, b"\x1a\x0220"),
    "tokens: negative": in_offer(SOUND, b"\x18" + b"\xff" * 9 + b"\x01"),
    "tokens: a float": in_offer(SOUND, b"\x1d\x00\x00\xa0\x41"),
    "tokens: a double": in_offer(SOUND, b"\x19" + b"\x00" * 8),
    "tokens: 2**32 - 1": offer(tokens=2**32 - 1),
    "tokens: 2**63": in_offer(SOUND, b"\x18" + b"\x80" * 9 + b"\x01"),
    "tokens: a block table": in_offer(SOUND, b"\x1a\x03\x00\x01\x02"),
    "tokens: twice": in_offer(SOUND, b"\x18\x14"),
    "tokens: not the shortest form": in_offer(SOUND.replace(b"\x18\x14", b"\x18\x94\x00")),
    "block table beside": in_offer(SOUND, b"\x2a\x03\x00\x01\x02"),
    "attempt: 0": offer(attempt=0),
    "attempt: 2**32": in_offer(SOUND.replace(b"\x10\x01", b"\x10\x80\x80\x80\x80\x10")),
    "digest: short": offer(digest=b"0123"),
    "digest: long": offer(digest=b"0" * 2**14),
    "request: a number": in_offer(b"\x08\x01", SOUND),
    "request: long": offer(request="r" * 2**14),
    "request: no UTF-8": offer().replace(b"\x0a\x01r", b"\x0a\x01\xff"),
    "a field missing": offer(tokens=None),
    "another kind": in_batch(b"\x7a\x00"),
    "two kinds": in_batch(HandoffMessage(offer=OFFER).SerializeToString() + b"\x3a\x00"),
    "one kind twice": in_batch(HandoffMessage(offer=OFFER).SerializeToString() * 2),
    "layers: 0": hello(layers=0),
    "layers: 2**32 - 1": hello(layers=2**32 - 1),
    "dtype: int4": hello(dtype="int4"),
    "order: DHN": hello(order="DHN"),
    "block size: 0": hello(block_size=0),
    "bytes of 1 GB": in_offer(SOUND[:9], b"\x22", GIGABYTE),
    "a message of 1 GB": in_batch(b"\x32" + GIGABYTE),
    "a batch of 1 GB": b"\x12" + GIGABYTE,
    "groups to the end": b"\x1b" * MAX_BATCH_BYTES,
    "a group": in_offer(SOUND, b"\x2b\x2c"),
    "trailing": offer() + b"\x00",
    "a message of a version up to 6": b"\x0a" + bytes(msgpack.packb(msgpack.packb([{"type": "Wait"}])))[1:],
    "no messages": packed(),
    "too many messages": packed(*[HandoffMessage(ack={})] * (MAX_MESSAGES + 1)),
    "the longest of nothing": b"\x12\x00" * (MAX_BATCH_BYTES // 2),
    "the longest of unknown fields": b"\x18\x00" * (MAX_BATCH_BYTES // 2),
    "too long": b"\x12\x00" * (MAX_BATCH_BYTES // 2 + 1),
    "the longest list": packed(renewals(*[{}] * (MAX_BATCH_BYTES // 2 - 8))),
    "many keys": packed(*[renewals(*[KEY_OF_R] * MAX_KEYS)] * MAX_MESSAGES),
    "many keys, and what is wrong": packed(
        renewals(*[KEY_OF_R] * MAX_KEYS), *[HandoffMessage(offer=OFFER)] * (MAX_MESSAGES - 2), HandoffMessage()
    ),
    "all but the last message right": packed(
        *[HandoffMessage(offer=OFFER)] * (MAX_MESSAGES - 1), HandoffMessage(offer=OFFER | {"attempt": 0})
    ),
    "a long list of long texts": packed(renewals(*[{"request": "r" * 900, "attempt": 1}] * MAX_KEYS)),
} | {f"truncated to {length}": offer()[:length] for length in range(1, len(offer()))}


def cpu_seconds(batch: bytes) -> float:
    """CPU seconds in which this thread refuses `batch`; the median of nine tries."""
    times = []
    for _ in range(9):
        started = time.thread_time()
        with pytest.raises(WireError):
            decode(batch)
        times.append(time.thread_time() - started)
    return statistics.median(times)


def test_every_invalid_batch_is_refused_in_little_time() -> None:
    costs = {name: cpu_seconds(batch) for name, batch in INVALID.items()}
    worst = max(costs, key=costs.__getitem__)
    print(
        f"{len(costs)} batches: median {statistics.median(costs.values()) * 1e6:.0f} us of CPU, at most"
        f" {costs[worst] * 1e6:.0f} us ({worst})"
    )
    assert costs[worst] < CPU_SECONDS, worst


def test_nothing_is_allocated_by_a_claimed_length() -> None:
    tracemalloc.start()
    try:
        for name, batch in INVALID.items():
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(WireError):
                decode(batch)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < PEAK_BYTES, f"{name}: {peak} bytes"
    finally:
        tracemalloc.stop()


VALID: list[list[Message]] = [
    [HELLO],
    [Dial(1, "fake"), Meet(1, "wire", b"0123"), Offer("r", 1, 20, b"0123456789abcdef")],
    [Push("r", 1, 1, 0, 0, 16, LAYOUT.block_bytes)] * 3 + [Finish("r", 1, 1, 7, 3, 20)],
    [Renew((("r", 1), ("s", 2)))],
    [Abort("r", 1, Code.CANCELLED, "cancelled by the sender"), CloseLink(1, "")],
    [Wait("r", 1), Grant("r", 1, 1, 0), Ack("r", 1, 1), Nack("r", 1, Code.NO_CAPACITY, "full")],
    [Refuse(Code.INCOMPATIBLE, "layout.layers: 4 here, 3 there")],
]


def mutated(number: int) -> bytes:
    """A valid batch with a few bytes changed, left out, doubled or inserted."""
    rng = random.Random(number)
    batch = bytearray(encode(VALID[number % len(VALID)]))
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(batch))
        match rng.randrange(6):
            case 0:
                batch[at] = rng.randrange(256)
            case 1:
                batch[at] ^= 1 << rng.randrange(8)
            case 2:
                del batch[at : at + rng.randrange(1, 9)]
            case 3:
                batch[at:at] = batch[at : at + rng.randrange(1, 9)]
            case 4:
                batch[at:at] = rng.randbytes(rng.randrange(1, 6))
            case 5:
                batch[at:at] = rng.choice((b"\x0a", b"\x12", b"\x22", b"\x32")) + GIGABYTE
        if not batch:
            break
    return bytes(batch)


def test_mutated_batches_are_messages_or_wire_errors_in_little_time() -> None:
    times, refused = [], 0
    for number in range(MUTATIONS) if SEED is None else [int(SEED)]:
        batch = mutated(number)
        started = time.thread_time()
        try:
            messages = decode(batch)
        except WireError:
            times.append(time.thread_time() - started)
            refused += 1
            continue
        except BaseException as error:
            error.add_note(f"KVRELAY_SEED={number}: {batch!r}")
            raise
        assert decode(encode(messages)) == messages, f"KVRELAY_SEED={number}"
    if SEED is None:
        median, most = statistics.median(times), max(times)
        print(f"{refused} refused: median {median * 1e6:.0f} us of CPU, at most {most * 1e6:.0f} us")
        assert refused > MUTATIONS // 2
        assert median < CPU_SECONDS / 4
        # One of thousands may include a garbage collection.
        assert statistics.quantiles(times, n=1000)[-1] < CPU_SECONDS


# To a decode worker.


async def refused_by(peer: RawPeer, *batches: bytes) -> Refuse:
    """The refusal with which a decode worker answers these batches."""
    for batch in batches:
        await peer.call.write(batch)
    refusal = await peer.receive(Refuse)
    assert isinstance(refusal, Refuse)
    return refusal


def test_a_decode_worker_refuses_each_invalid_batch_and_goes_on() -> None:
    async def test() -> None:
        async with fake_pair() as world:
            key = ("r", 1)
            world.expect(key, TOKENS)
            for name, batch in INVALID.items():
                async with raw_peer(world) as peer:
                    refusal = await refused_by(peer, encode([HELLO]), batch)
                    assert refusal.code is Code.PROTOCOL, name
                assert not world.receiving.reservations, name
            await still_works(world)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"layout": replace(LAYOUT, layers=LAYOUT.layers + 1)}, Code.INCOMPATIBLE, "layers"),
        ({"layout": replace(LAYOUT, head_dim=LAYOUT.head_dim * 2)}, Code.INCOMPATIBLE, "head_dim"),
        ({"layout": replace(LAYOUT, kv_heads=LAYOUT.kv_heads * 2)}, Code.INCOMPATIBLE, "kv_heads"),
        ({"fingerprint": "another model"}, Code.INCOMPATIBLE, "fingerprint"),
        ({"version": 2**31}, Code.INCOMPATIBLE, "version"),
        ({"checksum": False}, Code.INCOMPATIBLE, "checksum"),
        ({"incarnation": "another"}, Code.UNKNOWN_PEER, "not a member"),
        ({"peer_incarnation": "another"}, Code.UNKNOWN_PEER, "incarnation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_worker_that_differs_is_refused_with_the_field(change: dict[str, object], code: Code, field: str) -> None:
    async def test() -> None:
        async with fake_pair() as world:
            async with raw_peer(world) as peer:
                refusal = await refused_by(peer, encode([replace(HELLO, **change)]))  # type: ignore[arg-type]  # as named
                assert refusal.code is code
                assert field in refusal.message
            await still_works(world)

    asyncio.run(test())


def test_a_sender_of_the_version_before_protobuf_is_told_the_version() -> None:
    batch = bytes(msgpack.packb([{"type": "Hello", "version": 6, "worker": SENDER.name}]))

    async def test() -> None:
        async with fake_pair() as world:
            async with raw_peer(world) as peer:
                await peer.call.write(b"\x0a" + bytes([len(batch)]) + batch)
                with pytest.raises(grpc.aio.AioRpcError, match=f"version {VERSION} of the protocol") as error:
                    await peer.receive(Refuse)
                assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await still_works(world)

    asyncio.run(test())


MANIFESTS: dict[str, tuple[list[Message], str]] = {
    "more tokens than announced": ([Offer("r", 1, 21, b"d" * 16)], "tokens: 20 announced here, 21 offered"),
    "2 G of tokens": ([Offer("r", 1, 2**31, b"d" * 16)], "tokens: 20 announced here"),
    "other tokens": ([Offer("r", 1, 20, b"d" * 16)], "digest"),
}
BLOCK = LAYOUT.block_size
PUSHES: dict[str, Push] = {
    "past the end": Push("r", 1, 1, 0, 16, 16, LAYOUT.block_bytes),
    "2 G of tokens": Push("r", 1, 1, 0, 0, 2**31, LAYOUT.block_bytes),
    "from token 2 G on": Push("r", 1, 1, 0, 2**31, 16, LAYOUT.block_bytes),
    "half a block": Push("r", 1, 1, 0, 0, 7, 7 * LAYOUT.token_bytes),
    "other bytes than tokens": Push("r", 1, 1, 0, 0, 16, LAYOUT.block_bytes + 1),
    "the second frame first": Push("r", 1, 1, 1, 0, 16, LAYOUT.block_bytes),
    "the second half first": Push("r", 1, 1, 0, 0, 16, LAYOUT.block_bytes // 3 * 2, 1, 2),
    "half of the layers, and all bytes": Push("r", 1, 1, 0, 0, 16, LAYOUT.block_bytes, 0, 2),
    "more parts than layers": Push("r", 1, 1, 0, 0, 16, LAYOUT.block_bytes // 3, 0, 4),
    "frame 2 G": Push("r", 1, 1, 2**31, 0, 16, LAYOUT.block_bytes),
}
FINISHES: dict[str, Finish] = {
    "no frames": Finish("r", 1, 1, 7, 0, 20 * LAYOUT.token_bytes),
    "2 G frames": Finish("r", 1, 1, 7, 2**31, 20 * LAYOUT.token_bytes),
    "no bytes": Finish("r", 1, 1, 7, 0, 0),
    "2**53 bytes": Finish("r", 1, 1, 7, 2, 2**53),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_was_not_announced_is_refused_before_any_allocation(name: str) -> None:
    messages, reason = MANIFESTS[name]

    async def test() -> None:
        async with fake_pair() as world, raw_peer(world) as peer:
            world.expect(("r", 1), TOKENS)
            await peer.send(HELLO, Dial(1, "fake"), *messages)
            nack = await peer.receive(Nack)
            assert isinstance(nack, Nack)
            assert nack.code is Code.MANIFEST
            assert reason in nack.message
            assert not world.receiving.reservations
            await world.ends.until(lambda: ("r", 1) in world.ends.import_failed)
            peer.call.cancel()
            await still_works(world)

    asyncio.run(test())


@pytest.mark.parametrize("message", [*PUSHES.values(), *FINISHES.values()], ids=[*PUSHES, *FINISHES])
def test_an_invalid_push_or_finish_is_refused_and_the_blocks_are_released(message: Push | Finish) -> None:
    async def test() -> None:
        async with fake_pair() as world, raw_peer(world) as peer:
            world.expect(("r", 1), TOKENS)
            await peer.send(HELLO, Dial(1, "fake"), Offer("r", 1, 20, tokens_digest(TOKENS)))
            await peer.receive(Grant)
            await peer.send(message)
            nack = await peer.receive(Nack)
            assert isinstance(nack, Nack)
            assert nack.code is Code.PROTOCOL
            await world.ends.until(lambda: not world.receiving.leaked)
            assert not world.ends.imported
            peer.call.cancel()
            await still_works(world)

    asyncio.run(test())


def test_mutated_batches_end_no_decode_process() -> None:
    """The decode process survives every batch, and afterwards takes a valid hand-off."""

    async def send_all(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            refused = set[grpc.StatusCode]()
            for number in range(ON_THE_WIRE):
                peer = control(channel)
                await peer.send(HELLO)
                await peer.call.write(mutated(number))
                await peer.call.done_writing()
                async with asyncio.timeout(20):
                    try:
                        while await peer.call.read() is not grpc.aio.EOF:
                            pass
                    except grpc.aio.AioRpcError as error:
                        refused.add(error.code())
            assert refused <= {grpc.StatusCode.INVALID_ARGUMENT}

    async def test(decode: ReceivingProcess) -> None:
        memory = psutil.Process(decode.process.pid).memory_info
        before = memory().rss
        await send_all(decode.peer.address)
        assert memory().rss - before < 64 * 2**20
        prefill = SendingSide(decode)
        await prefill.hand_over(KEY)
        assert decode.reported()[KEY] == prefill.digest
        await prefill.client.close()

    with receiving_process(processes.CONFIG) as decode:
        asyncio.run(test(decode))


# To a prefill worker.


class BrokenService:
    """A decode worker that sends an invalid batch after its hello; without a batch, it refuses the stream as one does
    that can't read a hello."""

    def __init__(self) -> None:
        self.batch: bytes | None = None

    async def control(self, requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        if self.batch is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not msgpack: Unpack failed: incomplete input")
        await context.write(encode([LocalWorker(RECEIVER, LAYOUT, "fingerprint").hello(SENDER, CONFIG)]))
        await context.write(self.batch)
        async for _ in requests:
            pass


def test_a_prefill_worker_fails_hand_offs_to_a_broken_peer_and_goes_on() -> None:
    async def test() -> None:
        fake = {"fake": FakeTransport()}
        patient = TransferConfig(frame_timeout_seconds=10.0)
        async with pair(patient, transports=(fake, fake)) as world:
            server = grpc.aio.server()
            broken = BrokenService()
            handlers = {"Control": grpc.stream_stream_rpc_method_handler(broken.control)}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            honest = list(world.sender.peers)
            batches = {name: batch for name, batch in INVALID.items() if not name.startswith("truncated")}
            for number, (name, batch) in enumerate([("a refusal", None), *batches.items()]):
                broken.batch = batch
                world.sender.peers.update([replace(honest[0], address=f"127.0.0.1:{port}")])
                key = (f"r{number}", 1)
                world.sender.begin(key, RECEIVER, TOKENS)
                world.compute(key, [0, 1])
                await world.ends.until(lambda key=key: key in world.ends.export_failed)
                code, reason = world.ends.export_failed[key]
                assert code is (Code.PROTOCOL if batch is not None else Code.INCOMPATIBLE), name
                assert batch is not None or f"version {VERSION} of the protocol" in reason
                await world.ends.until(lambda: not world.sending.leaked)
            await server.stop(None)
            world.sender.peers.update(honest)
            await still_works(world)

    asyncio.run(test())
