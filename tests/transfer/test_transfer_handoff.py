"""KVSender and importer over real gRPC: bytes equal, counts exact, and every end releases all that was held."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import torch

from kvrelay.transfer import failpoints
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.messages import Code, Key
from kvrelay.transfer.peers import Peer
from kvrelay.transfer.transports.base import Transport
from kvrelay.transfer.transports.registry import available_transports
from support.fake_transport import FakeTransport, Fault
from support.handoff import LAYOUT, RECEIVER, SENDER, Pair, content, pair, raw

CONFIG = TransferConfig(frame_timeout_seconds=1.0)
BLOCK = LAYOUT.block_size
BLOCK_BYTES = LAYOUT.block_bytes


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())


def tokens(count: int) -> list[int]:
    return [token * 7 % 1000 for token in range(count)]


def blocks_of(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + LAYOUT.blocks_for(count)))


async def settled(world: Pair, key: Key) -> None:
    """Waits until both ends have said how it ended, and nothing is held for it."""
    ends = world.ends
    await ends.until(lambda: key in ends.exported or key in ends.export_failed)
    await ends.until(lambda: key in ends.imported or key in ends.import_failed)
    await ends.until(lambda: not world.sending.leaked and not world.receiving.leaked)


def check_equal(world: Pair, key: Key, blocks: list[int], count: int) -> None:
    reservation, first_token, stats = world.ends.imported[key]
    assert first_token == 7
    assert torch.equal(content(world.source, blocks, count), content(world.target, reservation.hold.blocks, count))
    assert world.ends.exported[key].nbytes == stats.nbytes


def links_of(kind: str) -> tuple[dict[str, Transport], dict[str, Transport]]:
    """The transports of the two ends."""
    if kind == "fake":
        fake = FakeTransport()
        return {kind: fake}, {kind: fake}
    return available_transports("127.0.0.1", kind), available_transports("127.0.0.1", kind)


@pytest.mark.parametrize("kind", ["tcp", "shm", "gloo", "fake"])
def test_kv_arrives_and_every_byte_is_counted(kind: str) -> None:
    async def test() -> None:
        config = replace(CONFIG, frame_bytes=max(65536, 4 * BLOCK_BYTES))
        async with pair(config, transports=links_of(kind)) as world:
            raw(world.source).random_(0, 256)
            for number, count in enumerate((1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 19 * BLOCK + 3)):
                key = (f"r{number}", 1)
                world.announce(key, tokens(count))
                world.compute(key, blocks_of(count), chunk_blocks=3)
                await settled(world, key)
                check_equal(world, key, blocks_of(count), count)
                # 2 x layers x tokens x kv_heads x head_dim x dtype
                assert world.ends.exported[key].nbytes == 2 * 3 * count * 2 * 8 * 4
                world.receiving.free += world.ends.imported[key][0].hold.blocks

    run(test)


def test_what_the_decode_worker_has_is_not_sent_again() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            raw(world.source).random_(0, 256)
            count = 5 * BLOCK
            for have in (0, 2 * BLOCK, count):
                key = (f"have {have}", 1)
                world.announce(key, tokens(count), have)
                world.compute(key, blocks_of(count))
                await settled(world, key)
                reservation, _, stats = world.ends.imported[key]
                assert stats.nbytes == (count - have) * LAYOUT.token_bytes
                blocks = reservation.hold.blocks
                assert torch.equal(
                    content(world.target, blocks, count, have), content(world.source, blocks_of(count), count, have)
                )
                assert not content(world.target, blocks, have).any(), "what was there already was written over"
                raw(world.target).zero_()

    run(test)


def test_many_at_once_in_any_order_of_the_two_notices() -> None:
    async def test() -> None:
        async with pair(replace(CONFIG, frame_bytes=65536), blocks=512) as world:
            raw(world.source).random_(0, 256)
            keys, start = [], 0
            for number in range(24):
                count = 1 + number * 13
                key = (f"r{number}", 1 + number % 3)
                keys.append((key, blocks_of(count, start), count))
                start += LAYOUT.blocks_for(count)
                if number % 2:
                    world.announce(key, tokens(count))
                else:
                    world.exporter.begin(key, RECEIVER, tokens(count))
                if number % 5 == 0:
                    await asyncio.sleep(0)
            for key, blocks, count in keys:
                world.compute(key, blocks)
                if key not in world.receiving.need:
                    world.expect(key, tokens(count))
            for key, blocks, count in keys:
                await settled(world, key)
                check_equal(world, key, blocks, count)

    run(test)


def test_offers_wait_for_room_first_come_first_served() -> None:
    async def test() -> None:
        async with pair(CONFIG, blocks=8) as world:
            order = []
            for number, need in enumerate((8, 6, 2, 8)):
                key = (f"r{number}", 1)
                world.announce(key, tokens(need * BLOCK))
                world.compute(key, blocks_of(need * BLOCK))
            for _ in range(4):
                await world.ends.until(lambda: len(world.ends.imported) > len(order))
                for key in list(world.ends.imported)[len(order) :]:
                    order.append(key[0])
                    world.receiving.free += world.ends.imported[key][0].hold.blocks
                    world.importer.blocks_freed()
                if len(order) == 4:
                    break
            assert sorted(order[1:3]) == ["r1", "r2"]
            assert (order[0], order[3]) == ("r0", "r3")

    run(test)


def test_no_room_in_time_is_told_to_both_ends() -> None:
    async def test() -> None:
        async with pair(replace(CONFIG, grant_timeout_seconds=0.2), blocks=4) as world:
            world.announce(("big", 1), tokens(5 * BLOCK))
            world.compute(("big", 1), blocks_of(5 * BLOCK))
            await settled(world, ("big", 1))
            assert world.ends.export_failed["big", 1][0] is Code.NO_CAPACITY
            assert world.ends.import_failed["big", 1][0] is Code.NO_CAPACITY
            world.announce(("small", 1), tokens(3))
            world.compute(("small", 1), blocks_of(3))
            await settled(world, ("small", 1))
            assert ("small", 1) in world.ends.imported

    run(test)


@pytest.mark.parametrize("by", ["prefill", "decode"])
@pytest.mark.parametrize("when", ["announced", "no room", "prefilling", "transferring"])
def test_a_cancel_frees_both_ends_by_notice(by: str, when: str) -> None:
    async def test() -> None:
        # Deadlines so long that nothing here can end by one of them; frames that never end by themselves.
        slow = replace(CONFIG, lease_seconds=60, frame_bytes=65536)
        fake = {"fake": FakeTransport(lambda number: Fault("delay", 0.4))}
        async with pair(slow, blocks=64, transports=(fake, fake)) as world:
            key, count = ("r", 1), 20 * BLOCK
            if when == "no room":
                world.receiving.free.clear()
            world.announce(key, tokens(count))
            if when == "prefilling":
                world.exporter.progress(key, world.sending.hold(blocks_of(8 * BLOCK)))
            if when == "transferring":
                world.compute(key, blocks_of(count))
            if when in ("prefilling", "transferring"):
                await world.ends.until(lambda: key in world.receiving.reservations)
            started = asyncio.get_running_loop().time()
            (world.exporter if by == "prefill" else world.importer).cancel(key)
            other = world.ends.import_failed if by == "prefill" else world.ends.export_failed
            await world.ends.until(lambda: key in other)
            if when == "announced" or when == "no room":
                world.compute(key, blocks_of(count))
            await world.ends.until(lambda: not world.sending.leaked and not world.receiving.leaked)
            assert asyncio.get_running_loop().time() - started < 0.5
            assert other[key][0] is Code.CANCELLED
            assert not world.ends.imported

    run(test)


@pytest.mark.parametrize("by", ["prefill", "decode"])
def test_a_cancel_before_the_other_notice_frees_the_other_end(by: str) -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            key = ("r", 1)
            if by == "decode":
                world.importer.cancel(key)
                world.exporter.begin(key, RECEIVER, tokens(5))
                await world.ends.until(lambda: key in world.ends.export_failed)
            else:
                world.exporter.begin(key, RECEIVER, tokens(5))
                await asyncio.sleep(0.05)
                world.exporter.cancel(key)
                await asyncio.sleep(0.05)
                world.expect(key, tokens(5))
                await world.ends.until(lambda: key in world.ends.import_failed)
            assert (world.ends.export_failed | world.ends.import_failed)[key][0] is Code.CANCELLED

    run(test)


@pytest.mark.parametrize("number", [0, 2, 4])
def test_a_flipped_bit_is_never_committed(number: int) -> None:
    async def test() -> None:
        fake = {"fake": FakeTransport(lambda index: Fault("corrupt") if index == number else None)}
        async with pair(replace(CONFIG, frame_bytes=65536), transports=(fake, fake)) as world:
            raw(world.source).random_(0, 256)
            count = 4 * (65536 // BLOCK_BYTES) * BLOCK + 5
            world.announce(("r", 1), tokens(count))
            world.compute(("r", 1), blocks_of(count), chunk_blocks=65536 // BLOCK_BYTES)
            await settled(world, ("r", 1))
            assert not world.ends.imported
            assert world.ends.export_failed["r", 1][0] is Code.CORRUPT
            assert world.ends.import_failed["r", 1][0] is Code.CORRUPT
            bad = world.receiving.reservations["r", 1].hold.blocks[number * (65536 // BLOCK_BYTES)]
            assert not raw(world.target)[bad].any(), "a corrupt frame has touched the pool"
            world.announce(("r", 2), tokens(count))
            world.compute(("r", 2), blocks_of(count))
            await settled(world, ("r", 2))
            check_equal(world, ("r", 2), blocks_of(count), count)

    run(test)


@pytest.mark.parametrize("kind", ["tcp", "shm", "gloo"])
def test_a_frame_that_nobody_wants_any_more_leaves_the_link_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that is announced twice: the second one is received and dropped, and the next one is not taken for it."""
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("transfer.frame,index=1,request=r0:duplicate"))

    async def test() -> None:
        async with pair(replace(CONFIG, frame_bytes=2**20), blocks=512, transports=links_of(kind)) as world:
            raw(world.source).random_(0, 256)
            count = 240 * BLOCK
            for number in range(2):
                key = (f"r{number}", 1)
                world.announce(key, tokens(count))
                world.compute(key, blocks_of(count), chunk_blocks=100)
                await settled(world, key)
                check_equal(world, key, blocks_of(count), count)
            assert world.exporter.epoch(RECEIVER[1]) == 1, "the link was lost on the way"

    run(test)


@pytest.mark.parametrize("kind", ["tcp", "shm", "gloo", "lossy"])
@pytest.mark.parametrize("borders", [(1,), (2,), (1, 2), (1, 2, 3)])
def test_the_last_chunk_arrives_by_groups_of_layers(kind: str, borders: tuple[int, ...]) -> None:
    """A layer has its bytes when it is said to be computed, and not before."""
    lossy = FakeTransport(lambda index: Fault("fail") if index in (1, 4) else None)

    async def test() -> None:
        transports = ({"fake": lossy}, {"fake": lossy}) if kind == "lossy" else links_of(kind)
        async with pair(replace(CONFIG, frame_bytes=65536), transports=transports) as world:
            for number, (count, before) in enumerate(((7, 0), (3 * BLOCK, 0), (45 * BLOCK + 3, 20), (30 * BLOCK, 29))):
                key, blocks = (f"r{number}", 1), blocks_of(count)
                kv = torch.rand(world.source.tensor.shape, generator=torch.Generator().manual_seed(number))
                world.source.tensor.zero_()
                world.source.tensor[blocks[:before]] = kv[blocks[:before]]
                world.announce(key, tokens(count))
                if before:
                    world.exporter.progress(key, world.sending.hold(blocks[:before]))
                hold = world.sending.hold(blocks[before:])
                for layers in borders:
                    world.source.tensor[blocks[before:], :layers] = kv[blocks[before:], :layers]
                    world.exporter.layers_computed(key, layers, hold if layers == borders[0] else None)
                    await asyncio.sleep(0.005)
                world.source.tensor[blocks[before:]] = kv[blocks[before:]]
                world.exporter.finished(key, 7, world.sending.hold(blocks))
                await settled(world, key)
                check_equal(world, key, blocks, count)
                world.receiving.free += world.ends.imported[key][0].hold.blocks

    run(test)


@pytest.mark.parametrize("kind", ["tcp", "shm"])
@pytest.mark.parametrize("where", ["transfer.frame_bytes", "decode.after_frame"])
def test_what_arrives_in_place_and_is_wrong_is_nobodys(kind: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight into the reserved blocks: they go back unread, and the next request that gets them is not harmed."""
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse(f"{where},index=2,request=bad:corrupt(3)"))

    async def test() -> None:
        async with pair(replace(CONFIG, frame_bytes=65536), blocks=48, transports=links_of(kind)) as world:
            raw(world.source).random_(0, 256)
            count = 40 * BLOCK + 5
            for name in ("bad", "good"):
                key = (name, 1)
                world.announce(key, tokens(count))
                world.compute(key, blocks_of(count), chunk_blocks=7)
                await settled(world, key)
            assert world.ends.export_failed["bad", 1][0] is Code.CORRUPT
            assert list(world.ends.imported) == [("good", 1)]
            check_equal(world, ("good", 1), blocks_of(count), count)

    run(test)


@pytest.mark.parametrize("kind", ["fail", "drop"])
def test_a_lost_link_is_dialled_again_and_fails_only_the_request_that_it_was_stuck_at(kind: str) -> None:
    async def test() -> None:
        fault, numbers = (Fault("fail"), (1, 6)) if kind == "fail" else (Fault("drop"), (1,))
        fake = {"fake": FakeTransport(lambda index: fault if index in numbers else None)}
        config = replace(CONFIG, frame_bytes=65536, frame_timeout_seconds=0.3)
        async with pair(config, blocks=512, transports=(fake, fake)) as world:
            raw(world.source).random_(0, 256)
            count = 4 * (65536 // BLOCK_BYTES) * BLOCK + 5
            size = LAYOUT.blocks_for(count)
            for number in range(3):
                world.announce((f"r{number}", 1), tokens(count))
                world.compute((f"r{number}", 1), blocks_of(count, number * size))
            for number in range(3):
                await settled(world, (f"r{number}", 1))
            stuck = [("r0", 1)] if kind == "drop" else []
            assert list(world.ends.export_failed) == list(world.ends.import_failed) == stuck
            assert all(code is Code.LINK for code, _ in world.ends.export_failed.values())
            for number in range(len(stuck), 3):
                check_equal(world, (f"r{number}", 1), blocks_of(count, number * size), count)
            assert world.exporter.epoch(RECEIVER[1]) > 1
            assert not world.sending.leaked
            assert not world.receiving.leaked

    run(test)


def test_a_link_that_never_works_fails_the_request_in_bounded_time() -> None:
    async def test() -> None:
        fake = {"fake": FakeTransport(lambda index: Fault("fail"))}
        async with pair(CONFIG, transports=(fake, fake)) as world:
            world.announce(("r", 1), tokens(40))
            world.compute(("r", 1), blocks_of(40))
            await settled(world, ("r", 1))
            assert world.ends.export_failed["r", 1][0] is Code.LINK

    run(test)


def test_nothing_is_read_or_written_after_its_release() -> None:
    """Blocks are reused the moment they are released; a late read or write would show as wrong bytes."""

    async def test() -> None:
        fake = {"fake": FakeTransport(lambda index: Fault("delay", 0.02))}
        async with pair(replace(CONFIG, frame_bytes=65536), blocks=24, transports=(fake, fake)) as world:
            for number in range(20):
                key = (f"r{number}", 1)
                raw(world.source).fill_(number)
                world.announce(key, tokens(20 * BLOCK))
                world.compute(key, blocks_of(20 * BLOCK))
                if number % 2:
                    await asyncio.sleep(0.01)
                    world.exporter.cancel(key)
                    await world.ends.until(lambda key=key: key in world.ends.import_failed)
                    await world.ends.until(lambda: not world.sending.leaked and not world.receiving.leaked)
                    raw(world.target).zero_()
                    continue
                await settled(world, key)
                reservation = world.ends.imported[key][0]
                assert (content(world.target, reservation.hold.blocks, 20 * BLOCK) == number).all()
                world.receiving.free += reservation.hold.blocks

    run(test)


def test_another_prompt_under_the_same_name_is_refused_before_any_allocation() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            for number, there in enumerate((tokens(41), [*tokens(39), 1])):
                key = (f"r{number}", 1)
                world.expect(key, tokens(40))
                world.exporter.begin(key, RECEIVER, there)
                world.compute(key, blocks_of(len(there)))
                await world.ends.until(lambda key=key: key in world.ends.export_failed)
                assert world.ends.export_failed[key][0] is Code.MANIFEST
                assert not world.receiving.reservations

    run(test)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layers": 4}, "layout.layers: 4 here, 3 there"),
        ({"kv_heads": 1, "tp_size": 2}, "layout.tp_size: 2 here, 1 there"),
        ({"dtype": "bfloat16"}, "layout.dtype: bfloat16 here, float32 there; transfer.convert_dtype is off"),
        ({}, "checksum"),
    ],
)
def test_workers_that_differ_are_refused_with_the_field(change: dict[str, object], field: str) -> None:
    async def test() -> None:
        layout = replace(LAYOUT, **change)  # type: ignore[arg-type]  # the fields named by the parameters
        receiver = replace(CONFIG, checksum=bool(change), convert_dtype=False)
        async with pair(CONFIG, receiver_layout=layout, receiver_config=receiver) as world:
            world.announce(("r", 1), tokens(20))
            world.compute(("r", 1), blocks_of(20))
            await world.ends.until(lambda: ("r", 1) in world.ends.export_failed)
            code, message = world.ends.export_failed["r", 1]
            assert code is Code.INCOMPATIBLE
            assert not code.retryable
            assert field in message
            assert not world.receiving.reservations

    run(test)


def test_only_members_are_spoken_to() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            ends = world.ends
            world.exporter.begin(("to a stranger", 1), ("decode-9", "x"), tokens(5))
            world.exporter.begin(("to an old incarnation", 1), (RECEIVER[0], "x"), tokens(5))
            world.importer.expect(("from a stranger", 1), ("prefill-9", "x"), tokens(5))
            await ends.until(lambda: len(ends.export_failed) == 2 and len(ends.import_failed) == 1)
            world.receiver_peers.update([])
            world.exporter.begin(("as a stranger", 1), RECEIVER, tokens(5))
            await ends.until(lambda: ("as a stranger", 1) in ends.export_failed)
            codes = {code for code, _ in (ends.export_failed | ends.import_failed).values()}
            assert codes == {Code.UNKNOWN_PEER}

    run(test)


def test_a_restarted_decode_worker_is_not_taken_for_the_old_one() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            peer = world.sender_peers.get(*RECEIVER)
            assert peer is not None
            world.sender_peers.update([replace(peer, incarnation="an older one")])
            world.exporter.begin(("r", 1), (RECEIVER[0], "an older one"), tokens(5))
            await world.ends.until(lambda: ("r", 1) in world.ends.export_failed)
            code, message = world.ends.export_failed["r", 1]
            assert code is Code.UNKNOWN_PEER
            assert RECEIVER[1] in message

    run(test)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_peer_dropped_from_the_membership_frees_everything(side: str) -> None:
    async def test() -> None:
        async with pair(replace(CONFIG, lease_seconds=60)) as world:
            key = ("r", 1)
            world.announce(key, tokens(100))
            world.exporter.progress(key, world.sending.hold(blocks_of(48)))
            await world.ends.until(lambda: key in world.receiving.reservations)
            if side == "prefill":
                world.sender_peers.update([])
                world.exporter.peers_changed()
            else:
                world.receiver_peers.update([Peer(SENDER[0], "another incarnation", "")])
                world.importer.peers_changed()
            await settled(world, key)
            assert not world.ends.imported

    run(test)


def test_a_lost_decode_worker_frees_the_prefill_worker_and_the_next_attempt_finds_another() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world, pair(CONFIG) as other:
            key = ("r", 1)
            world.announce(key, tokens(100))
            world.exporter.progress(key, world.sending.hold(blocks_of(48)))
            await world.server.stop(None)
            await world.ends.until(lambda: key in world.ends.export_failed)
            await world.ends.until(lambda: not world.sending.leaked)
            assert world.ends.export_failed[key][0].retryable
            other.announce(("r", 2), tokens(100))
            other.compute(("r", 2), blocks_of(100))
            await settled(other, ("r", 2))
            assert ("r", 2) in other.ends.imported

    run(test)


def test_closing_an_end_fails_what_is_under_way_at_both() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            world.announce(("r", 1), tokens(100))
            world.exporter.progress(("r", 1), world.sending.hold(blocks_of(48)))
            await world.ends.until(lambda: ("r", 1) in world.receiving.reservations)
            await world.exporter.close()
            await settled(world, ("r", 1))
            world.exporter.start()

    run(test)


def test_an_end_that_closes_before_its_stream_has_begun_fails_the_hand_off_all_the_same() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            world.exporter.begin(("r", 1), RECEIVER, tokens(20))
            world.compute(("r", 1), blocks_of(20))
            world.sender_peers.update([])
            world.exporter.peers_changed()
            await world.ends.until(lambda: ("r", 1) in world.ends.export_failed and not world.sending.leaked)

    run(test)


def test_links_are_capped_and_the_idle_one_goes_first() -> None:
    async def test() -> None:
        async with pair(replace(CONFIG, max_links=1)) as world, pair(CONFIG) as other:
            second = next(iter(other.sender_peers))
            second = replace(second, name="decode-1", incarnation="d1")
            await other.importer.close()
            peers = [*world.sender_peers, second]
            world.sender_peers.update(peers)
            world.announce(("r", 1), tokens(20))
            world.exporter.begin(("s", 1), ("decode-1", "d1"), tokens(20))
            await world.ends.until(lambda: ("s", 1) in world.ends.export_failed)
            code, message = world.ends.export_failed["s", 1]
            assert code is Code.NO_CAPACITY
            assert "transfer.max_links" in message
            world.compute(("r", 1), blocks_of(20))
            await settled(world, ("r", 1))
            world.exporter.begin(("s", 2), ("decode-1", "d1"), tokens(20))
            await asyncio.sleep(0)
            assert ("s", 2) not in world.ends.export_failed
            other.importer.start()

    run(test)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_storm_of_faults_and_cancels_leaves_no_wrong_byte_and_no_leak(seed: int) -> None:
    rng = random.Random(seed)
    kinds = ("corrupt", "fail", "drop", "delay")

    def script(index: int) -> Fault | None:
        return Fault(rng.choice(kinds), 0.01) if rng.random() < 0.05 else None

    async def test() -> None:
        fake = {"fake": FakeTransport(script)}
        config = replace(CONFIG, frame_bytes=65536, frame_timeout_seconds=0.1)
        async with pair(config, blocks=96, transports=(fake, fake)) as world:
            raw(world.source).random_(0, 256)
            await asyncio.gather(*(one(world, (f"r{number}", 1)) for number in range(120)))
            await world.ends.until(lambda: not world.sending.leaked and not world.receiving.leaked)
            assert len(world.receiving.free) == 96
            assert len(world.ends.imported) > 40
            assert not world.exporter.active
            assert not world.importer.active

    async def one(world: Pair, key: Key) -> None:
        await asyncio.sleep(rng.random() * 0.5)
        count = rng.randrange(1, 20 * BLOCK)
        blocks = rng.sample(range(96), LAYOUT.blocks_for(count))
        world.announce(key, tokens(count))
        ends = world.ends
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random() * 0.05)
            rng.choice((world.exporter, world.importer)).cancel(key)
            world.compute(key, blocks)
            return
        world.compute(key, blocks, chunk_blocks=rng.randrange(1, 9))
        await ends.until(lambda: key in ends.imported or key in ends.import_failed, 30)
        if key in ends.imported:
            reservation = ends.imported[key][0]
            assert torch.equal(
                content(world.source, blocks, count), content(world.target, reservation.hold.blocks, count)
            )
            world.receiving.free += reservation.hold.blocks
            world.importer.blocks_freed()

    run(test)
