"""The control stream: what a hostile, confused or old peer says changes nothing and ends nobody."""

import asyncio
from collections.abc import Callable, Coroutine

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.decode_worker.reservation_queue import ReservationQueue
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.internal.v1.handoff_pb2 import ControlRequest
from kvrelay.prefill_worker.kv_sender import KVSender
from kvrelay.transfer.control import MAX_PENDING, LocalWorker, Outbox, renewals
from kvrelay.transfer.messages import (
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
    Nack,
    Offer,
    Push,
    Refuse,
    Renew,
    Wait,
    decode,
    encode,
)
from kvrelay.transfer.peers import Peer, PeerTable
from support.handoff import LAYOUT, RECEIVER, SENDER, Ends, ExportSide
from support.raw_peer import CONFIG, HELLO, fake_pair, still_works, stranger


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(test())


@pytest.mark.parametrize("frame", [b"", b"\xff" * 100, b"\x93" * 1000, encode([Renew(())])])
def test_a_stream_that_does_not_begin_with_hello_is_refused(frame: bytes) -> None:
    async def test() -> None:
        async with fake_pair() as world, stranger(world) as peer:
            await peer.call.write(ControlRequest(frame=frame))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await peer.hear(Hello)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await still_works(world)

    run(test)


@pytest.mark.parametrize(
    ("worker", "incarnation", "code"),
    [("prefill-9", "p-incarnation", Code.UNKNOWN_PEER), ("prefill-0", "another", Code.UNKNOWN_PEER)],
)
def test_who_is_not_a_member_is_refused(worker: str, incarnation: str, code: Code) -> None:
    async def test() -> None:
        async with fake_pair() as world, stranger(world) as peer:
            await peer.say(LocalWorker(worker, incarnation, LAYOUT, "fingerprint").hello(RECEIVER[1], CONFIG))
            refusal = await peer.hear(Refuse)
            assert isinstance(refusal, Refuse)
            assert refusal.code is code
            await still_works(world)

    run(test)


def test_who_means_another_incarnation_is_refused() -> None:
    async def test() -> None:
        async with fake_pair() as world, stranger(world) as peer:
            await peer.say(LocalWorker(*SENDER, LAYOUT, "fingerprint").hello("an older one", CONFIG))
            refusal = await peer.hear(Refuse)
            assert isinstance(refusal, Refuse)
            assert refusal.code is Code.UNKNOWN_PEER
            await still_works(world)

    run(test)


@pytest.mark.parametrize("bad", [b"\xff", encode([Ack("r", 1, 1)]), encode([Wait("r", 1)])])
def test_nonsense_later_on_ends_the_stream_with_the_reason(bad: bytes) -> None:
    async def test() -> None:
        async with fake_pair() as world, stranger(world) as peer:
            await peer.say(HELLO)
            await peer.hear(Hello)
            await peer.call.write(ControlRequest(frame=bad))
            refusal = await peer.hear(Refuse)
            assert isinstance(refusal, Refuse)
            assert refusal.code is Code.PROTOCOL
            await still_works(world)

    run(test)


def test_what_is_said_of_unknown_attempts_changes_nothing() -> None:
    async def test() -> None:
        async with fake_pair() as world, stranger(world) as peer:
            await peer.say(HELLO)
            await peer.say(
                Renew((("nobody", 1),)),
                Abort("nobody", 1, Code.CANCELLED, ""),
                Finish("nobody", 1, 1, 7, 1, 1),
                Push("nobody", 1, 1, 0, 0, 16, 100, 0, 1),
            )
            world.expect(("r", 1), list(range(20)))
            await peer.say(Offer("r", 1, 21, b"0" * 16))
            nack = await peer.hear(Nack)
            assert isinstance(nack, Nack)
            assert nack.key == ("r", 1)
            assert not world.receiving.reservations
            assert world.importer.dropped >= 3

    run(test)


def test_an_epoch_is_dialled_once() -> None:
    async def test() -> None:
        async with fake_pair() as world:
            async with stranger(world) as peer:
                await peer.say(HELLO, Dial(5, "fake"))
                await peer.hear(Hello)
                await peer.say(Dial(5, "fake"))
                assert isinstance(await peer.hear(Refuse), Refuse)
            async with stranger(world) as peer:
                await peer.say(HELLO, Dial(4, "fake"))
                assert isinstance(await peer.hear(Refuse), Refuse)

    run(test)


def test_a_frame_longer_than_announced_ends_the_stream_before_it_is_received() -> None:
    async def test() -> None:
        async with fake_pair() as world, stranger(world) as peer:
            await peer.say(HELLO, Dial(1, "fake"), Push("r", 1, 1, 0, 0, 16, CONFIG.frame_bytes + 1, 0, 1))
            refusal = await peer.hear(Refuse)
            assert isinstance(refusal, Refuse)
            assert str(CONFIG.frame_bytes + 1) in refusal.message

    run(test)


def test_a_second_stream_of_the_same_worker_takes_the_place_of_the_first() -> None:
    async def test() -> None:
        async with fake_pair() as world, stranger(world) as first:
            await first.say(HELLO)
            await first.hear(Hello)
            async with stranger(world) as second:
                await second.say(HELLO)
                await second.hear(Hello)
                assert isinstance(await first.hear(Refuse), Refuse)

    run(test)


def test_messages_that_come_together_leave_together_and_in_order() -> None:
    async def test() -> None:
        outbox = Outbox()
        messages = [Ack("r", number + 1, 1) for number in range(MAX_MESSAGES + 5)]
        outbox.put(*messages)
        outbox.close()
        outbox.put(Ack("late", 1, 1))
        frames = [decode(frame) async for frame in outbox.frames()]
        assert [len(frame) for frame in frames] == [MAX_MESSAGES, 5]
        assert [message for frame in frames for message in frame] == messages

    run(test)


def test_a_peer_that_never_reads_is_given_up() -> None:
    async def test() -> None:
        outbox = Outbox()
        for _ in range(MAX_PENDING + 1):
            outbox.put(Wait("r", 1))
        assert outbox.closed

    run(test)


def test_signs_of_life_fit_into_messages() -> None:
    keys = [(f"r{number}", 1) for number in range(2 * MAX_KEYS + 1)]
    messages = renewals(keys)
    assert [key for message in messages for key in message.keys] == keys
    for message in messages:
        assert decode(encode([message])) == [message]
    assert renewals([]) == []


def test_a_name_has_one_incarnation_at_a_time() -> None:
    table = PeerTable([Peer("decode-0", "a", "host:1")])
    assert table.get("decode-0", "a") == Peer("decode-0", "a", "host:1")
    assert table.get("decode-0", "b") is None
    table.update([Peer("decode-0", "b", "host:2"), Peer("decode-1", "c", "host:3")])
    assert table.get("decode-0", "a") is None
    assert Peer("decode-0", "a", "host:1") not in table
    assert [peer.address for peer in table] == ["host:2", "host:3"]
    assert len(table) == 2


def test_a_block_that_fits_into_no_frame_is_refused_at_start() -> None:
    layout = KVLayout(layers=128, kv_heads=32, head_dim=128, block_size=128, dtype="float32")
    local = LocalWorker("prefill-0", "p", layout, "fingerprint")
    with pytest.raises(ValueError, match=rf"{layout.block_bytes} bytes.*{MAX_FRAME_BYTES}"):
        KVSender(local, KVPool(LAYOUT, 1), PeerTable(), CONFIG, {}, ExportSide(Ends()))


@given(st.lists(st.tuples(st.sampled_from(("ask", "refuse", "leave")), st.integers(0, 5)), max_size=60))
def test_nobody_passes_who_waits_for_room(steps: list[tuple[str, int]]) -> None:
    queue, waiting = ReservationQueue(), list[Key]()
    for step, number in steps:
        key = (f"r{number}", 1)
        if step == "ask":
            may = not waiting or key in waiting
            assert queue.must_wait(key) == (not may)
            if not may:
                waiting.append(key)
        elif step == "refuse":
            queue.wait(key)
            if key not in waiting:
                waiting.append(key)
        else:
            assert queue.leave(key) == (key in waiting)
            waiting = [other for other in waiting if other != key]
        assert queue.first == (waiting[0] if waiting else None)
