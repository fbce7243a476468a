"""Sender and receiver over real gRPC: bytes equal, counts exact, and every end releases all that was held."""

import asyncio
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.messages import Code
from kvrelay.transfer.transports.base import LinkError
from kvrelay.transfer.transports.nixl import NixlLink, nixl_missing
from support.fake_transport import Fault
from support.handoff import FIRST_TOKEN, LAYOUT, RECEIVER, Pair, blocks_of, content, links_of, pair, prompt, raw
from support.late_writes import LateWrites

pytestmark = pytest.mark.anyio
CONFIG = TransferConfig(frame_timeout_seconds=10.0)
SMALL_FRAMES = replace(CONFIG, frame_bytes=65536)
BLOCK = LAYOUT.block_size
FRAME = 65536 // LAYOUT.block_bytes
"""Blocks of one small frame."""
KEY = ("r", 1)
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 19 * BLOCK + 3)
LARGE = KVLayout(layers=5, kv_heads=4, head_dim=32, block_size=32, dtype="float32")
"""A layout with 160 KiB a block: three frames of up to 64 KiB, by layers."""
TRANSPORTS = ["shm", "tcp", "fake", pytest.param("gloo", marks=pytest.mark.more)]
without_nixl = pytest.mark.skipif(nixl_missing() is not None, reason=f"nixl: {nixl_missing()}")


@pytest.mark.parametrize("layout", [LAYOUT, LARGE], ids=["blocks smaller than frames", "larger"])
@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_kv_arrives_and_every_byte_is_counted(kind: str, layout: KVLayout) -> None:
    """KV that the decode worker has already isn't sent again."""
    async with pair(SMALL_FRAMES, layout=layout, transports=links_of(kind), blocks=64) as world:
        raw(world.source).random_(0, 256)
        for number, count in enumerate(LENGTHS):
            blocks = list(range(layout.blocks_for(count)))
            await world.arrives((f"r{number}", 1), count, blocks, chunk_blocks=3)
        raw(world.target).zero_()
        count, blocks = 5 * layout.block_size, list(range(5))
        for have in (2 * layout.block_size, count):
            await world.arrives((f"have {have}", 1), count, blocks, have)
            there = world.ends.imported[f"have {have}", 1][0].hold.blocks
            assert not content(world.target, there, have).any(), "tokens that were there already were overwritten"
            raw(world.target).zero_()


@without_nixl
@pytest.mark.parametrize("lent", [True, False])
@pytest.mark.parametrize("scattered", [True, False])
async def test_nixl_sends_blocks_from_where_they_lie_unless_the_pool_cannot_be_lent(
    scattered: bool, lent: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, call = KVPool(LAYOUT, 256), NixlLink._call

    def refusing(link: NixlLink, name: str, *arguments: Any) -> Any:
        if name == "register_memory" and arguments[0] is source.bytes:
            raise LinkError("nixl: no registration")
        return call(link, name, *arguments)

    if not lent:
        monkeypatch.setattr(NixlLink, "_call", refusing)
    async with pair(SMALL_FRAMES, transports=links_of("nixl"), source=source) as world:
        raw(world.source).random_(0, 256)
        for number, count in enumerate(LENGTHS):
            size = LAYOUT.blocks_for(count)
            blocks = random.Random(count).sample(range(256), size) if scattered else list(range(40, 40 + size))
            await world.arrives((f"r{number}", 1), count, blocks, chunk_blocks=3)
        sent = sum(stats.nbytes for stats in world.ends.exported.values())
        if lent:
            partial = sum(count % BLOCK for count in LENGTHS) * LAYOUT.token_bytes
            assert sent - partial <= world.sender.in_place_bytes <= sent
        else:
            assert world.sender.in_place_bytes == 0
            assert caplog.text.count("frames are copied before they are sent") == 1, "once for a link"


# Steps that compute KV while it is being handed over.


async def test_a_frame_waits_for_no_later_step_than_its_own() -> None:
    async with pair(SMALL_FRAMES) as world:
        # Each step computes as much as one frame carries.
        count, early, late = 2 * FRAME * BLOCK, LateWrites(), LateWrites()
        raw(world.source).fill_(9)
        world.announce(KEY, prompt(count))
        world.sender.progress(KEY, world.sending.hold(blocks_of(count)[:FRAME]), early)
        world.sender.progress(KEY, world.sending.hold(blocks_of(count)[FRAME:]), late)
        early.end()
        await world.ends.until(lambda: (raw(world.target) == 9).all(1).sum() == FRAME)
        assert not late.ended
        late.end()
        world.sender.finished(KEY, FIRST_TOKEN, world.sending.hold(blocks_of(count)))
        await world.settled(KEY)
        world.check_equal(KEY, blocks_of(count), count)


async def test_the_time_of_a_hand_off_begins_when_its_first_frame_is_computed() -> None:
    async with pair() as world:
        late, blocks = LateWrites(), blocks_of(40)
        world.announce(KEY, prompt(40))
        world.sender.progress(KEY, world.sending.hold(blocks), late)
        await world.ends.until(lambda: KEY in world.receiving.reservations)
        await asyncio.sleep(0.2)
        computed = time.monotonic()
        late.end()
        world.sender.finished(KEY, FIRST_TOKEN, world.sending.hold(blocks))
        await world.settled(KEY)
        stats = world.ends.exported[KEY]
        assert stats.handoff_seconds <= stats.transfer_seconds < time.monotonic() - computed


# Free blocks.


async def test_offers_wait_for_free_blocks_first_come_first_served() -> None:
    async with pair(CONFIG, blocks=8) as world:
        order: list[str] = []
        for number, need in enumerate((8, 6, 2, 8)):
            world.announce((f"r{number}", 1), prompt(need * BLOCK))
            world.compute((f"r{number}", 1), blocks_of(need * BLOCK))
        while len(order) < 4:
            await world.ends.until(lambda: len(world.ends.imported) > len(order))
            for key in list(world.ends.imported)[len(order) :]:
                order.append(key[0])
                world.reuse(key)
        assert sorted(order[1:3]) == ["r1", "r2"]
        assert (order[0], order[3]) == ("r0", "r3")


async def test_a_cancelled_offer_that_waited_lets_the_next_one_in() -> None:
    """The next offer needs fewer blocks, so it gets in although none is freed."""
    async with pair(CONFIG, blocks=4) as world:
        for key, count in ((("big", 1), 5 * BLOCK), (("small", 1), 3)):
            world.announce(key, prompt(count))
            world.compute(key, blocks_of(count))
            await world.ends.until(lambda key=key: key in world.receiving.waited)
        world.receiver.cancel(("big", 1))
        await world.settled(("small", 1))
        assert ("small", 1) in world.ends.imported


async def test_without_free_blocks_in_time_the_hand_off_fails_at_both_ends() -> None:
    async with pair(replace(CONFIG, grant_timeout_seconds=0.2), blocks=4) as world:
        assert (await world.fails(KEY, prompt(5 * BLOCK)))[0] is Code.NO_CAPACITY
        await world.settled(KEY)
        assert world.ends.import_failed[KEY][0] is Code.NO_CAPACITY
        await world.arrives(("small", 1), 3)


async def test_a_decode_worker_that_cannot_reserve_any_more_fails_the_hand_off_at_both_ends() -> None:
    async with pair(CONFIG) as world:
        ended = RuntimeError("the engine has ended")
        world.receiving.reserve = lambda _, answer, **more: world.receiver.runtime.post(answer, ended)  # type: ignore[method-assign]
        assert (await world.fails(KEY, prompt(20)))[0] is Code.CLOSED
        await world.settled(KEY)
        assert str(ended) in world.ends.import_failed[KEY][1]
        assert not world.receiver.active


# Cancels.


@pytest.mark.parametrize("by", ["prefill", "decode"])
@pytest.mark.parametrize("when", ["announced", "no blocks", "prefilling", "transferring"])
async def test_a_cancel_frees_both_ends_at_once(by: str, when: str) -> None:
    # Nothing here can end by a deadline, and frames take longer than the test allows.
    patient = replace(SMALL_FRAMES, lease_seconds=60, frame_timeout_seconds=60.0)
    async with pair(patient, blocks=64, script=lambda number: Fault("delay", 60.0)) as world:
        count = 20 * BLOCK
        if when == "no blocks":
            world.receiving.free.clear()
        world.announce(KEY, prompt(count))
        if when == "prefilling":
            world.sender.progress(KEY, world.sending.hold(blocks_of(8 * BLOCK)))
        if when == "transferring":
            world.compute(KEY, blocks_of(count))
        if when in ("prefilling", "transferring"):
            await world.ends.until(lambda: KEY in world.receiving.reservations)
        started = asyncio.get_running_loop().time()
        (world.sender if by == "prefill" else world.receiver).cancel(KEY)
        other = world.ends.import_failed if by == "prefill" else world.ends.export_failed
        await world.ends.until(lambda: KEY in other)
        if when in ("announced", "no blocks"):
            world.compute(KEY, blocks_of(count))
        await world.released()
        assert asyncio.get_running_loop().time() - started < 10.0
        assert other[KEY][0] is Code.CANCELLED
        assert not world.ends.imported


@pytest.mark.parametrize("by", ["prefill", "decode"])
async def test_a_cancel_before_the_announcement_or_offer_frees_the_other_end(by: str) -> None:
    async with pair(CONFIG) as world:
        if by == "decode":
            world.receiver.cancel(KEY)
            world.sender.begin(KEY, RECEIVER, prompt(5))
        else:
            world.sender.begin(KEY, RECEIVER, prompt(5))
            await world.ends.until(lambda: world.receiver.active)
            world.sender.cancel(KEY)
            await world.ends.until(lambda: not world.receiver.active)
            world.expect(KEY, prompt(5))
        failed = world.ends.export_failed if by == "decode" else world.ends.import_failed
        await world.ends.until(lambda: KEY in failed)
        assert failed[KEY][0] is Code.CANCELLED


# Blocks belong to one thread at a time, and to nobody after their release.


async def test_a_pool_that_raises_fails_the_hand_off_and_the_next_one_works() -> None:
    class Broken(KVPool):
        broken = True

        def write(self, *frame: Any) -> None:
            if self.broken:
                raise ValueError("no such block")
            super().write(*frame)

    pool = Broken(LAYOUT, 8)
    async with pair(blocks=8, transports=links_of("fake"), target=pool) as world:
        raw(world.source).random_(0, 256)
        world.announce(KEY, prompt(3 * BLOCK))
        world.compute(KEY, [0, 1, 2])
        await world.settled(KEY)
        assert world.ends.export_failed[KEY][0] is Code.LINK
        pool.broken = False
        await world.arrives(("r", 2), 3 * BLOCK)


# Links that are lost.


@pytest.mark.parametrize("kind", ["fail", "drop"])
async def test_after_a_lost_link_the_next_one_takes_over_all_but_the_stuck_hand_off(kind: str) -> None:
    fault, numbers = (Fault("fail"), (1, 6)) if kind == "fail" else (Fault("drop"), (1,))
    # The next link must open in this time as well; only a frame that is dropped waits for it to pass.
    config = replace(SMALL_FRAMES, frame_timeout_seconds=10.0 if kind == "fail" else 1.0)
    async with pair(config, blocks=512, script=lambda index: fault if index in numbers else None) as world:
        raw(world.source).random_(0, 256)
        count = 4 * FRAME * BLOCK + 5
        size, keys = LAYOUT.blocks_for(count), [(f"r{number}", 1) for number in range(3)]
        for number, key in enumerate(keys):
            world.announce(key, prompt(count))
            world.compute(key, blocks_of(count, number * size))
        await world.settled(*keys)
        stuck = keys[:1] if kind == "drop" else []
        assert list(world.ends.export_failed) == list(world.ends.import_failed) == stuck
        assert all(code is Code.LINK for code, _ in world.ends.export_failed.values())
        for number in range(len(stuck), 3):
            world.check_equal(keys[number], blocks_of(count, number * size), count)
        assert world.sender.epoch(RECEIVER.incarnation) > 1


# Damage; `test_simulation.py` has every kind of it.


STORM = ("corrupt", "truncate", "replay", "fail", "drop", "delay")


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.more), pytest.param(3, marks=pytest.mark.more)])
async def test_a_storm_of_faults_and_cancels_leaves_no_wrong_byte_and_no_leak(seed: int) -> None:
    """Every request arrives in some attempt, unless its client cancels it."""
    rng = random.Random(seed)
    first, faults, codes = rng.randrange(8), set[str](), set[Code]()
    requests = 120

    def script(index: int) -> Fault | None:
        at, rest = divmod(first + index, 8)
        if rest:
            return None
        faults.add(STORM[at % len(STORM)])
        return Fault(STORM[at % len(STORM)], 0.01)  # type: ignore[arg-type]  # a literal

    async def hand_over(world: Pair, request: str) -> bool:
        """Whether the client cancelled it."""
        await asyncio.sleep(rng.random() * 0.5)
        ends, count = world.ends, rng.randrange(1, 20 * BLOCK)
        blocks = rng.sample(range(96), LAYOUT.blocks_for(count))
        for attempt in range(1, 200):
            key = request, attempt
            world.announce(key, prompt(count))
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.05)
                rng.choice((world.sender, world.receiver)).cancel(key)
                world.compute(key, blocks)
                return True
            world.compute(key, blocks, chunk_blocks=rng.randrange(1, 9))
            await ends.until(lambda key=key: key in ends.imported or key in ends.import_failed, 60)
            if key in ends.imported:
                there = ends.imported[key][0].hold.blocks
                assert torch.equal(content(world.source, blocks, count), content(world.target, there, count))
                world.reuse(key)
                return False
            codes.add(ends.import_failed[key][0])
        pytest.fail(f"{request} did not arrive: {codes}")

    async with pair(replace(SMALL_FRAMES, frame_timeout_seconds=0.5), blocks=96, script=script) as world:
        raw(world.source).random_(0, 256)
        arrived = world.ends.imported
        cancelled = await asyncio.gather(*(hand_over(world, f"r{number}") for number in range(requests)))
        await world.released()
        for key in arrived:
            if cancelled[int(key[0][1:])]:
                world.reuse(key)  # the commit was first
        assert len(world.receiving.free) == 96
        assert len(arrived) >= requests - sum(cancelled) >= 30
        assert not world.sender.active
        assert not world.receiver.active
    assert faults == {*STORM}
    assert Code.CORRUPT in codes
