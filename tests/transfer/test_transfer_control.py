"""The control stream: messages of a hostile, confused or outdated peer change nothing and end no process."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.decode_worker.reservation_queue import ReservationQueue
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.prefill_worker.handoff_client import HandoffClient
from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_KEYS,
    MAX_MESSAGES,
    Abort,
    Ack,
    Code,
    Dial,
    Finish,
    Hello,
    Key,
    Message,
    Nack,
    Offer,
    Push,
    Refuse,
    Renew,
    Wait,
    batches,
    decode,
    encode,
)
from kvrelay.transfer.protocol.outbox import MAX_PENDING, Outbox
from kvrelay.transfer.protocol.peers import Peer, PeerTable
from support.handoff import LAYOUT, RECEIVER, SENDER, Ends, SendingHost, pair, prompt, setup
from support.raw_peer import CONFIG, HELLO, fake_pair, raw_peer, still_works


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(test())


@pytest.mark.parametrize("batch", [b"", b"\xff" * 100, b"\x93" * 1000, encode([Renew((("r", 1),))])])
def test_a_stream_that_does_not_begin_with_hello_is_refused(batch: bytes) -> None:
    async def test() -> None:
        async with fake_pair() as world, raw_peer(world) as peer:
            await peer.call.write(batch)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await peer.receive(Hello)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await still_works(world)

    run(test)


@pytest.mark.parametrize(
    ("worker", "incarnation", "code"),
    [("prefill-9", "p-incarnation", Code.UNKNOWN_PEER), ("prefill-0", "another", Code.UNKNOWN_PEER)],
)
def test_a_worker_that_is_no_member_is_refused(worker: str, incarnation: str, code: Code) -> None:
    async def test() -> None:
        async with fake_pair() as world, raw_peer(world) as peer:
            await peer.send(LocalWorker(WorkerId(worker, incarnation), LAYOUT, "fingerprint").hello(RECEIVER, CONFIG))
            refusal = await peer.receive(Refuse)
            assert isinstance(refusal, Refuse)
            assert refusal.code is code
            await still_works(world)

    run(test)


def test_a_stream_for_another_incarnation_is_refused() -> None:
    async def test() -> None:
        async with fake_pair() as world, raw_peer(world) as peer:
            await peer.send(
                LocalWorker(SENDER, LAYOUT, "fingerprint").hello(WorkerId(RECEIVER.name, "an older one"), CONFIG)
            )
            refusal = await peer.receive(Refuse)
            assert isinstance(refusal, Refuse)
            assert refusal.code is Code.UNKNOWN_PEER
            await still_works(world)

    run(test)


@pytest.mark.parametrize("bad", [b"\xff", encode([Ack("r", 1, 1)]), encode([Wait("r", 1)])])
def test_a_later_invalid_batch_ends_the_stream_with_the_reason(bad: bytes) -> None:
    async def test() -> None:
        async with fake_pair() as world, raw_peer(world) as peer:
            await peer.send(HELLO)
            await peer.receive(Hello)
            await peer.call.write(bad)
            refusal = await peer.receive(Refuse)
            assert isinstance(refusal, Refuse)
            assert refusal.code is Code.PROTOCOL
            await still_works(world)

    run(test)


def test_messages_about_unknown_attempts_change_nothing() -> None:
    async def test() -> None:
        async with fake_pair() as world, raw_peer(world) as peer:
            await peer.send(HELLO)
            await peer.send(
                Renew((("nobody", 1),)),
                Abort("nobody", 1, Code.CANCELLED, ""),
                Finish("nobody", 1, 1, 7, 1, 1),
                Push("nobody", 1, 1, 0, 0, 16, 100),
            )
            world.expect(("r", 1), list(range(20)))
            await peer.send(Offer("r", 1, 21, b"0" * 16))
            nack = await peer.receive(Nack)
            assert isinstance(nack, Nack)
            assert nack.key == ("r", 1)
            assert not world.receiving.reservations
            assert world.receiver.dropped >= 3

    run(test)


def test_an_epoch_is_dialled_once() -> None:
    async def test() -> None:
        async with fake_pair() as world:
            async with raw_peer(world) as peer:
                await peer.send(HELLO, Dial(5, "fake"))
                await peer.receive(Hello)
                await peer.send(Dial(5, "fake"))
                assert isinstance(await peer.receive(Refuse), Refuse)
            async with raw_peer(world) as peer:
                await peer.send(HELLO, Dial(4, "fake"))
                assert isinstance(await peer.receive(Refuse), Refuse)

    run(test)


def test_a_frame_longer_than_announced_ends_the_stream_before_it_is_received() -> None:
    async def test() -> None:
        async with fake_pair() as world, raw_peer(world) as peer:
            await peer.send(HELLO, Dial(1, "fake"), Push("r", 1, 1, 0, 0, 16, CONFIG.frame_bytes + 1))
            refusal = await peer.receive(Refuse)
            assert isinstance(refusal, Refuse)
            assert str(CONFIG.frame_bytes + 1) in refusal.message

    run(test)


def test_a_second_stream_of_the_same_worker_takes_the_place_of_the_first() -> None:
    async def test() -> None:
        async with fake_pair() as world, raw_peer(world) as first:
            await first.send(HELLO)
            await first.receive(Hello)
            async with raw_peer(world) as second:
                await second.send(HELLO)
                await second.receive(Hello)
                assert isinstance(await first.receive(Refuse), Refuse)

    run(test)


def test_queued_messages_leave_in_order_in_few_batches() -> None:
    async def test() -> None:
        outbox = Outbox()
        messages = [Ack("r", number + 1, 1) for number in range(MAX_MESSAGES + 5)]
        outbox.put(*messages)
        outbox.close()
        outbox.put(Ack("late", 1, 1))
        batches = [decode(batch) async for batch in outbox.batches()]
        assert [len(batch) for batch in batches] == [MAX_MESSAGES, 5]
        assert [message for batch in batches for message in batch] == messages

    run(test)


def test_a_peer_that_never_reads_loses_its_stream() -> None:
    async def test() -> None:
        outbox = Outbox()
        for _ in range(MAX_PENDING + 1):
            outbox.put(Wait("r", 1))
        assert outbox.closed

    run(test)


def test_leases_of_many_hand_offs_are_renewed_in_messages_of_bounded_size() -> None:
    keys = [(f"r{number}", 1) for number in range(2 * MAX_KEYS + 1)]

    async def test() -> None:
        async with pair(TransferConfig(lease_seconds=60)) as world:
            for key in keys:
                world.sender.begin(key, RECEIVER, prompt(5))
            stream = next(iter(world.sender._pairs.values())).stream
            sent: list[Message] = []
            stream.put = lambda *messages: sent.extend(messages)  # type: ignore[method-assign]  # to see them
            world.sender._renewed = 0.0
            world.sender.tick()
            renewals = [message for message in sent if isinstance(message, Renew)]
            assert [key for message in renewals for key in message.keys] == keys
            assert [message for batch in batches(renewals) for message in decode(batch)] == renewals

    run(test)


def test_a_name_has_one_incarnation_at_a_time() -> None:
    table = PeerTable([Peer(WorkerId("decode-0", "a"), "host:1")])
    assert table.get(WorkerId("decode-0", "a")) == Peer(WorkerId("decode-0", "a"), "host:1")
    assert table.get(WorkerId("decode-0", "b")) is None
    table.update([Peer(WorkerId("decode-0", "b"), "host:2"), Peer(WorkerId("decode-1", "c"), "host:3")])
    assert table.get(WorkerId("decode-0", "a")) is None
    assert Peer(WorkerId("decode-0", "a"), "host:1") not in table
    assert [peer.address for peer in table] == ["host:2", "host:3"]
    assert len(table) == 2


def test_a_layer_of_a_block_that_fits_into_no_frame_is_refused_at_start() -> None:
    layout = KVLayout(layers=2, kv_heads=1024, head_dim=512, block_size=128, dtype="float32")
    worker = setup(SENDER, KVPool(LAYOUT, 1), PeerTable(), CONFIG, {})
    worker = replace(worker, local=replace(worker.local, layout=layout))

    async def test() -> None:
        with pytest.raises(ValueError, match=rf"{layout.block_bytes} bytes.*{MAX_FRAME_BYTES}"):
            HandoffClient(worker, SendingHost(Ends()))

    run(test)


@given(st.lists(st.tuples(st.sampled_from(("ask", "refuse", "leave")), st.integers(0, 5)), max_size=60))
def test_no_offer_overtakes_one_that_waits_for_free_blocks(steps: list[tuple[str, int]]) -> None:
    queue, waiting = ReservationQueue(), list[Key]()
    for step, number in steps:
        key = (f"r{number}", 1)
        if step == "ask":
            assert queue.passing(key) == (bool(waiting) and key != waiting[0])
        elif step == "refuse":
            queue.wait(key)
            if key not in waiting:
                waiting.append(key)
        else:
            assert queue.leave(key) == (key in waiting)
            waiting = [other for other in waiting if other != key]
        assert queue.first == (waiting[0] if waiting else None)
