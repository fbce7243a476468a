"""Sender and receiver over real gRPC: bytes equal, counts exact, and every end releases all that was held."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.frames.frames import SendJob
from kvrelay.transfer.protocol.messages import Code
from kvrelay.transfer.protocol.ports import BlockClaim
from support.fake_transport import FakeTransport, Fault
from support.handoff import LAYOUT, RECEIVER, Pair, blocks_of, content, links_of, pair, prompt, raw

CONFIG = TransferConfig(frame_timeout_seconds=1.0)
BLOCK = LAYOUT.block_size
BLOCK_BYTES = LAYOUT.block_bytes


@pytest.mark.parametrize("kind", ["tcp", "shm", "gloo", "fake"])
def test_kv_arrives_and_every_byte_is_counted(kind: str) -> None:
    async def test() -> None:
        config = replace(CONFIG, frame_bytes=max(65536, 4 * BLOCK_BYTES))
        async with pair(config, transports=links_of(kind)) as world:
            raw(world.source).random_(0, 256)
            for number, count in enumerate((1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 19 * BLOCK + 3)):
                key = (f"r{number}", 1)
                world.announce(key, prompt(count))
                world.compute(key, blocks_of(count), chunk_blocks=3)
                await world.settled(key)
                world.check_equal(key, blocks_of(count), count)
                # 2 x layers x tokens x kv_heads x head_dim x dtype
                assert world.ends.exported[key].nbytes == 2 * 3 * count * 2 * 8 * 4
                world.reuse(key)

    asyncio.run(test())


def test_what_the_decode_worker_has_is_not_sent_again() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            raw(world.source).random_(0, 256)
            count = 5 * BLOCK
            for have in (0, 2 * BLOCK, count):
                key = (f"have {have}", 1)
                world.announce(key, prompt(count), have)
                world.compute(key, blocks_of(count))
                await world.settled(key)
                reservation, _, stats = world.ends.imported[key]
                assert stats.nbytes == (count - have) * LAYOUT.token_bytes
                blocks = reservation.hold.blocks
                assert torch.equal(
                    content(world.target, blocks, count, have), content(world.source, blocks_of(count), count, have)
                )
                assert not content(world.target, blocks, have).any(), "tokens that were there already were overwritten"
                raw(world.target).zero_()

    asyncio.run(test())


def test_many_at_once_in_any_order_of_announcement_and_offer() -> None:
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
                    world.announce(key, prompt(count))
                else:
                    world.sender.begin(key, RECEIVER, prompt(count))
                if number % 5 == 0:
                    await asyncio.sleep(0)
            for key, blocks, count in keys:
                world.compute(key, blocks)
                if key not in world.receiving.need:
                    world.expect(key, prompt(count))
            for key, blocks, count in keys:
                await world.settled(key)
                world.check_equal(key, blocks, count)

    asyncio.run(test())


def test_offers_wait_for_free_blocks_first_come_first_served() -> None:
    async def test() -> None:
        async with pair(CONFIG, blocks=8) as world:
            order = []
            for number, need in enumerate((8, 6, 2, 8)):
                key = (f"r{number}", 1)
                world.announce(key, prompt(need * BLOCK))
                world.compute(key, blocks_of(need * BLOCK))
            for _ in range(4):
                await world.ends.until(lambda: len(world.ends.imported) > len(order))
                for key in list(world.ends.imported)[len(order) :]:
                    order.append(key[0])
                    world.reuse(key)
                if len(order) == 4:
                    break
            assert sorted(order[1:3]) == ["r1", "r2"]
            assert (order[0], order[3]) == ("r0", "r3")

    asyncio.run(test())


def test_without_free_blocks_in_time_the_hand_off_fails_at_both_ends() -> None:
    async def test() -> None:
        async with pair(replace(CONFIG, grant_timeout_seconds=0.2), blocks=4) as world:
            world.announce(("big", 1), prompt(5 * BLOCK))
            world.compute(("big", 1), blocks_of(5 * BLOCK))
            await world.settled(("big", 1))
            assert world.ends.export_failed["big", 1][0] is Code.NO_CAPACITY
            assert world.ends.import_failed["big", 1][0] is Code.NO_CAPACITY
            world.announce(("small", 1), prompt(3))
            world.compute(("small", 1), blocks_of(3))
            await world.settled(("small", 1))
            assert ("small", 1) in world.ends.imported

    asyncio.run(test())


def test_a_cancelled_offer_that_waited_lets_the_next_one_in() -> None:
    """The next offer needs fewer blocks, so it gets in although none is freed."""

    async def test() -> None:
        async with pair(CONFIG, blocks=4) as world:
            waiting = world.receiver._waiting._waiting
            for key, count in ((("big", 1), 5 * BLOCK), (("small", 1), 3)):
                world.announce(key, prompt(count))
                world.compute(key, blocks_of(count))
                await world.ends.until(lambda key=key: key in waiting)
            world.receiver.cancel(("big", 1))
            await world.settled(("small", 1))
            assert ("small", 1) in world.ends.imported

    asyncio.run(test())


def test_a_decode_worker_that_cannot_reserve_any_more_fails_the_hand_off_at_both_ends() -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            ended = RuntimeError("the engine has ended")
            world.receiving.reserve = lambda _, answer, **more: world.receiver.runtime.post(answer, ended)  # type: ignore[method-assign]
            world.announce(("r", 1), prompt(20))
            world.compute(("r", 1), blocks_of(20))
            await world.settled(("r", 1))
            assert world.ends.export_failed["r", 1][0] is Code.CLOSED
            assert str(ended) in world.ends.import_failed["r", 1][1]
            assert not world.receiver.active

    asyncio.run(test())


@pytest.mark.parametrize("by", ["prefill", "decode"])
@pytest.mark.parametrize("when", ["announced", "no blocks", "prefilling", "transferring"])
def test_a_cancel_frees_both_ends_at_once(by: str, when: str) -> None:
    async def test() -> None:
        # Nothing here can end by a deadline, and frames take longer than the test allows.
        slow = replace(CONFIG, lease_seconds=60, frame_bytes=65536)
        fake = {"fake": FakeTransport(lambda number: Fault("delay", 0.4))}
        async with pair(slow, blocks=64, transports=(fake, fake)) as world:
            key, count = ("r", 1), 20 * BLOCK
            if when == "no blocks":
                world.receiving.free.clear()
            world.announce(key, prompt(count))
            if when == "prefilling":
                world.sender.progress(key, world.sending.hold(blocks_of(8 * BLOCK)))
            if when == "transferring":
                world.compute(key, blocks_of(count))
            if when in ("prefilling", "transferring"):
                await world.ends.until(lambda: key in world.receiving.reservations)
            started = asyncio.get_running_loop().time()
            (world.sender if by == "prefill" else world.receiver).cancel(key)
            other = world.ends.import_failed if by == "prefill" else world.ends.export_failed
            await world.ends.until(lambda: key in other)
            if when == "announced" or when == "no blocks":
                world.compute(key, blocks_of(count))
            await world.ends.until(lambda: not world.sending.leaked and not world.receiving.leaked)
            assert asyncio.get_running_loop().time() - started < 0.5
            assert other[key][0] is Code.CANCELLED
            assert not world.ends.imported

    asyncio.run(test())


@pytest.mark.parametrize("by", ["prefill", "decode"])
def test_a_cancel_before_the_announcement_or_offer_frees_the_other_end(by: str) -> None:
    async def test() -> None:
        async with pair(CONFIG) as world:
            key = ("r", 1)
            if by == "decode":
                world.receiver.cancel(key)
                world.sender.begin(key, RECEIVER, prompt(5))
                await world.ends.until(lambda: key in world.ends.export_failed)
            else:
                world.sender.begin(key, RECEIVER, prompt(5))
                await asyncio.sleep(0.05)
                world.sender.cancel(key)
                await asyncio.sleep(0.05)
                world.expect(key, prompt(5))
                await world.ends.until(lambda: key in world.ends.import_failed)
            assert (world.ends.export_failed | world.ends.import_failed)[key][0] is Code.CANCELLED

    asyncio.run(test())


@pytest.mark.parametrize("kind", ["tcp", "shm", "gloo"])
def test_a_frame_that_no_attempt_takes_leaves_the_link_usable(kind: str) -> None:
    """A frame sent twice: the second one is received and discarded, and the next frame is not mistaken for it."""
    doubled = []

    def send_twice(world: Pair) -> None:
        links = world.sender.links
        submit = links.submit

        def submitted(peer: str, epoch: int, job: Any) -> None:
            submit(peer, epoch, job)
            if isinstance(job, SendJob) and (job.key, job._frame.index) == (("r0", 1), 1):
                doubled.append(job)
                again = BlockClaim(), job._place, job._kind, job._announce, lambda: None
                submit(peer, epoch, SendJob(job.key, job._frame, *again))

        links.submit = submitted  # type: ignore[method-assign]  # the second frame is this test's fault

    async def test() -> None:
        async with pair(replace(CONFIG, frame_bytes=2**20), blocks=512, transports=links_of(kind)) as world:
            send_twice(world)
            raw(world.source).random_(0, 256)
            count = 240 * BLOCK
            for number in range(2):
                key = (f"r{number}", 1)
                world.announce(key, prompt(count))
                world.compute(key, blocks_of(count), chunk_blocks=100)
                await world.settled(key)
                world.check_equal(key, blocks_of(count), count)
            assert world.sender.epoch(RECEIVER.incarnation) == 1, "the link was lost"
            assert doubled
            assert world.receiver.dropped

    asyncio.run(test())


@pytest.mark.parametrize("kind", ["fail", "drop"])
def test_after_a_lost_link_the_next_one_takes_over_all_but_the_stuck_hand_off(kind: str) -> None:
    async def test() -> None:
        fault, numbers = (Fault("fail"), (1, 6)) if kind == "fail" else (Fault("drop"), (1,))
        fake = {"fake": FakeTransport(lambda index: fault if index in numbers else None)}
        # The next link must open in this time as well; only a frame that is dropped waits for it to pass.
        config = replace(CONFIG, frame_bytes=65536, frame_timeout_seconds=10.0 if kind == "fail" else 0.5)
        async with pair(config, blocks=512, transports=(fake, fake)) as world:
            raw(world.source).random_(0, 256)
            count = 4 * (65536 // BLOCK_BYTES) * BLOCK + 5
            size = LAYOUT.blocks_for(count)
            for number in range(3):
                world.announce((f"r{number}", 1), prompt(count))
                world.compute((f"r{number}", 1), blocks_of(count, number * size))
            for number in range(3):
                await world.settled((f"r{number}", 1))
            stuck = [("r0", 1)] if kind == "drop" else []
            assert list(world.ends.export_failed) == list(world.ends.import_failed) == stuck
            assert all(code is Code.LINK for code, _ in world.ends.export_failed.values())
            for number in range(len(stuck), 3):
                world.check_equal((f"r{number}", 1), blocks_of(count, number * size), count)
            assert world.sender.epoch(RECEIVER.incarnation) > 1
            assert not world.sending.leaked
            assert not world.receiving.leaked

    asyncio.run(test())


def test_a_link_that_never_works_fails_the_request_in_bounded_time() -> None:
    async def test() -> None:
        fake = {"fake": FakeTransport(lambda index: Fault("fail"))}
        async with pair(CONFIG, transports=(fake, fake)) as world:
            world.announce(("r", 1), prompt(40))
            world.compute(("r", 1), blocks_of(40))
            await world.settled(("r", 1))
            assert world.ends.export_failed["r", 1][0] is Code.LINK

    asyncio.run(test())


def test_nothing_is_read_or_written_after_its_release() -> None:
    """Blocks are reused as soon as they are released; a late read or write would show as wrong bytes."""

    async def test() -> None:
        fake = {"fake": FakeTransport(lambda index: Fault("delay", 0.02))}
        async with pair(replace(CONFIG, frame_bytes=65536), blocks=24, transports=(fake, fake)) as world:
            for number in range(20):
                key = (f"r{number}", 1)
                raw(world.source).fill_(number)
                world.announce(key, prompt(20 * BLOCK))
                world.compute(key, blocks_of(20 * BLOCK))
                if number % 2:
                    await asyncio.sleep(0.01)
                    world.sender.cancel(key)
                    await world.ends.until(lambda key=key: key in world.ends.import_failed)
                    await world.ends.until(lambda: not world.sending.leaked and not world.receiving.leaked)
                    raw(world.target).zero_()
                    continue
                await world.settled(key)
                reservation = world.ends.imported[key][0]
                assert (content(world.target, reservation.hold.blocks, 20 * BLOCK) == number).all()
                world.receiving.free += reservation.hold.blocks

    asyncio.run(test())
