"""Damaged hand-offs over real links; `test_simulation.py` has every kind of damage."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.frames.checks import CHECKSUM_BYTES
from kvrelay.transfer.protocol.messages import Code, Key
from kvrelay.transfer.transports.base import ByteStream, Link, Rendezvous, Transport
from kvrelay.transfer.transports.registry import available_transports
from support.fake_transport import FakeTransport, Fault
from support.handoff import HOST, LAYOUT, RECEIVER, Pair, blocks_of, content, pair, prompt, raw

CONFIG = TransferConfig(frame_bytes=65536, frame_timeout_seconds=10.0)
FRAME = 65536 // LAYOUT.block_bytes
"""Blocks of one frame."""


@pytest.mark.parametrize("number", [0, 2, 4])
def test_a_flipped_bit_is_never_committed(number: int) -> None:
    async def test() -> None:
        fake = {"fake": FakeTransport(lambda index: Fault("corrupt") if index == number else None)}
        async with pair(CONFIG, transports=(fake, fake)) as world:
            raw(world.source).random_(0, 256)
            count = 4 * FRAME * LAYOUT.block_size + 5
            world.announce(("r", 1), prompt(count))
            world.compute(("r", 1), blocks_of(count), chunk_blocks=FRAME)
            await world.settled(("r", 1))
            assert not world.ends.imported
            assert world.ends.export_failed["r", 1][0] is Code.CORRUPT
            assert world.ends.import_failed["r", 1][0] is Code.CORRUPT
            bad = world.receiving.reservations["r", 1].hold.blocks[number * FRAME]
            assert not raw(world.target)[bad].any(), "a corrupt frame was written to the pool"
            world.announce(("r", 2), prompt(count))
            world.compute(("r", 2), blocks_of(count))
            await world.settled(("r", 2))
            world.check_equal(("r", 2), blocks_of(count), count)
            assert world.sender.epoch(RECEIVER.incarnation) == 2, "after a corrupt frame the link must be replaced"

    asyncio.run(test())


class FlippingStream:
    """Flips a bit of one frame as it is written, or after it was read."""

    def __init__(self, stream: ByteStream, number: int) -> None:
        self._stream = stream
        self._left = number

    def _hit(self, runs: Sequence[memoryview]) -> bool:
        self._left -= sum(map(len, runs)) > CHECKSUM_BYTES
        return self._left == -1

    def write(self, runs: Sequence[memoryview], deadline: float) -> None:
        if self._hit(runs):
            data = bytearray(b"".join(runs))
            data[len(data) // 2] ^= 1
            runs, self._left = [memoryview(data)], -2
        self._stream.write(runs, deadline)

    def read(self, runs: Sequence[memoryview], deadline: float) -> None:
        self._stream.read(runs, deadline)
        if self._hit(runs):
            runs[0][len(runs[0]) // 2] ^= 1
            self._left = -2


class FlippingLink:
    def __init__(self, link: Link, number: int) -> None:
        assert link.stream is not None
        self._link = link
        self.stream = FlippingStream(link.stream, number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


class FlippingTransport:
    """A real transport whose first link at this end carries one flipped bit, in frame `number`."""

    def __init__(self, transport: Transport, number: int) -> None:
        self._transport = transport
        self._number = number
        self.name, self.scope = transport.name, transport.scope

    def connect(self, meeting: Rendezvous, rank: int, timeout: float) -> Link:
        link = self._transport.connect(meeting, rank, timeout)
        number, self._number = self._number, -1
        return FlippingLink(link, number) if number >= 0 else link


@pytest.mark.parametrize("kind", ["tcp", "shm"])
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_bit_flipped_in_place_fails_the_hand_off_and_harms_no_later_one(kind: str, side: str) -> None:
    """Bytes go straight into the reserved blocks: these are released unread, and the next request may get them."""
    ends = [available_transports(HOST, kind) for _ in range(2)]
    flipping = ends[side == "receiver"]
    flipping[kind] = FlippingTransport(flipping[kind], 2)

    async def test() -> None:
        async with pair(CONFIG, blocks=48, transports=(ends[0], ends[1])) as world:
            raw(world.source).random_(0, 256)
            count = 40 * LAYOUT.block_size + 5
            for name in ("bad", "good"):
                world.announce((name, 1), prompt(count))
                world.compute((name, 1), blocks_of(count), chunk_blocks=7)
                await world.settled((name, 1))
            assert list(world.ends.imported) == [("good", 1)]
            assert world.ends.export_failed["bad", 1][0] is Code.CORRUPT
            world.check_equal(("good", 1), blocks_of(count), count)

    asyncio.run(test())


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_a_storm_of_faults_and_cancels_leaves_no_wrong_byte_and_no_leak(seed: int) -> None:
    """Every request arrives in some attempt, unless its client cancels it."""
    rng = random.Random(seed)
    kinds = ("corrupt", "truncate", "replay", "fail", "drop", "delay")
    frames, faults = itertools.count(rng.randrange(8)), Counter[str]()
    codes: set[Code] = set()
    cancelled: set[Key] = set()

    def script(index: int) -> Fault | None:
        at, rest = divmod(next(frames), 8)
        if rest:
            return None
        kind = kinds[at % len(kinds)]
        faults[kind] += 1
        return Fault(kind, 0.01)

    async def hand_over(world: Pair, request: str) -> None:
        await asyncio.sleep(rng.random() * 0.5)
        ends = world.ends
        count = rng.randrange(1, 20 * LAYOUT.block_size)
        blocks = rng.sample(range(96), LAYOUT.blocks_for(count))
        for attempt in range(1, 200):
            key = request, attempt
            world.announce(key, prompt(count))
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.05)
                cancelled.add(key)
                rng.choice((world.sender, world.receiver)).cancel(key)
                world.compute(key, blocks)
                return
            world.compute(key, blocks, chunk_blocks=rng.randrange(1, 9))
            await ends.until(lambda key=key: key in ends.imported or key in ends.import_failed, 60)
            if key in ends.imported:
                there = ends.imported[key][0].hold.blocks
                assert torch.equal(content(world.source, blocks, count), content(world.target, there, count))
                world.reuse(key)
                return
            codes.add(ends.import_failed[key][0])
        pytest.fail(f"{request} did not arrive: {codes}")

    async def test() -> None:
        fake = {"fake": FakeTransport(script)}
        config = TransferConfig(frame_bytes=65536, frame_timeout_seconds=0.5)
        async with pair(config, blocks=96, transports=(fake, fake)) as world:
            raw(world.source).random_(0, 256)
            await asyncio.gather(*(hand_over(world, f"r{number}") for number in range(120)))
            await world.ends.until(lambda: not world.sending.leaked and not world.receiving.leaked)
            for key in cancelled & world.ends.imported.keys():
                world.reuse(key)  # the commit was first
            assert len(world.receiving.free) == 96
            arrived = world.ends.imported.keys()
            assert len(arrived | cancelled) == 120, "one end for each request"
            assert len(arrived) >= 30
            assert not world.sender.active
            assert not world.receiver.active

    asyncio.run(test())
    assert faults.keys() == {*kinds}
    assert Code.CORRUPT in codes
