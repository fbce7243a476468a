"""Damaged hand-offs: bytes that differ from those that the sender read never become KV, and nothing leaks.

`KVRELAY_SEED=n` runs only case n of the seeded ones.
"""

import asyncio
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.frames.checks import CHECKSUM_BYTES
from kvrelay.transfer.protocol.messages import Code, Key
from kvrelay.transfer.transports.base import ByteStream, Link, Rendezvous, Transport
from kvrelay.transfer.transports.registry import available_transports
from support.fake_transport import FakeTransport, Fault
from support.handoff import FIRST_TOKEN, HOST, RECEIVER, Pair, blocks_of, content, pair, prompt, raw
from support.handoff import LAYOUT as BIG
from support.loopback import Crossing, Loopback

CASES, MANY_CASES = 2_800, 10_000
SLICES = 10
SEED = os.environ.get("KVRELAY_SEED")
FRAME_BLOCKS = 2
LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=4, block_size=4, dtype="float32")
# As many bytes a token, scales included.
LAYOUTS = (LAYOUT, replace(LAYOUT, head_dim=14, dtype="int8"))
POOL = 32
REFUSED = {Code.CORRUPT, Code.PROTOCOL, Code.LINK}

Damage = Callable[[random.Random, list[Crossing], list[Crossing]], None]
"""Function that changes the frames on the link (at least two); it gets those of the attempt before, too."""


def pick(rng: random.Random, crossings: list[Crossing]) -> Crossing:
    return crossings[rng.randrange(len(crossings))]


def data_of(crossing: Crossing) -> bytearray:
    return bytearray(crossing.data or b"")


def flip_bits(rng: random.Random, now: list[Crossing], before: list[Crossing]) -> None:
    crossing = pick(rng, now)
    data = data_of(crossing)
    for position in rng.sample(range(len(data)), rng.choice((1, 1, 2, 7, len(data) // 2))):
        data[position] ^= 1 << rng.randrange(8)
    crossing.data = bytes(data)


def cut_short(rng: random.Random, now: list[Crossing], before: list[Crossing]) -> None:
    """The rest of the bytes are others, as after a write that stopped."""
    crossing = pick(rng, now)
    data = data_of(crossing)
    kept = rng.randrange(len(data))
    crossing.data = bytes(data[:kept]) + bytes(byte ^ 0x5A for byte in data[kept:])


def lose_the_end(rng: random.Random, now: list[Crossing], before: list[Crossing]) -> None:
    crossing = pick(rng, now)
    crossing.data = bytes(data_of(crossing)[: -rng.choice((1, 8, 100))])


def swap(rng: random.Random, now: list[Crossing], before: list[Crossing]) -> None:
    """Two frames' bytes arrive in the other order."""
    one = rng.randrange(len(now) - 1)
    now[one].data, now[one + 1].data = now[one + 1].data, now[one].data


def swap_whole(rng: random.Random, now: list[Crossing], before: list[Crossing]) -> None:
    """Two frames are announced and sent in the other order."""
    one = rng.randrange(len(now) - 1)
    now[one], now[one + 1] = now[one + 1], now[one]


def replay(rng: random.Random, now: list[Crossing], before: list[Crossing]) -> None:
    """A frame's bytes arrive again in the place of a later frame's."""
    later = rng.randrange(1, len(now))
    now[later].data = now[rng.randrange(later)].data


def replay_between(rng: random.Random, now: list[Crossing], before: list[Crossing]) -> None:
    """A frame's bytes arrive twice, so that all later frames are one place late."""
    one = rng.randrange(len(now) - 1)
    now.insert(one + 1, Crossing(None, now[one].data))


def leave_out(rng: random.Random, now: list[Crossing], before: list[Crossing]) -> None:
    """Leaves out the bytes of a frame that is announced."""
    pick(rng, now).data = None


def leave_out_whole(rng: random.Random, now: list[Crossing], before: list[Crossing]) -> None:
    """Leaves out a frame and its announcement."""
    now.remove(pick(rng, now))


def old_attempts_bytes(rng: random.Random, now: list[Crossing], before: list[Crossing]) -> None:
    """Bytes that verified in the attempt before, at the same place."""
    one = rng.randrange(len(now))
    now[one].data = before[one].data


def old_attempts_frame(rng: random.Random, now: list[Crossing], before: list[Crossing]) -> None:
    """Announcement and bytes of the attempt before."""
    one = rng.randrange(len(now))
    now[one] = before[one]


def old_epochs_frame(rng: random.Random, now: list[Crossing], before: list[Crossing]) -> None:
    """The right bytes, with the trailer of another link."""
    crossing = pick(rng, now)
    assert crossing.push is not None
    crossing.push = replace(crossing.push, epoch=crossing.push.epoch + 1)


def other_place(rng: random.Random, now: list[Crossing], before: list[Crossing]) -> None:
    """The announcement names another place than that of the bytes."""
    crossing = pick(rng, now)
    assert crossing.push is not None
    crossing.push = replace(crossing.push, first=crossing.push.first + LAYOUT.block_size)


def noise(rng: random.Random, now: list[Crossing], before: list[Crossing]) -> None:
    crossing = pick(rng, now)
    crossing.data = rng.randbytes(len(crossing.data or b""))


DAMAGES: list[Damage] = [
    flip_bits,
    cut_short,
    lose_the_end,
    swap,
    swap_whole,
    replay,
    replay_between,
    leave_out,
    leave_out_whole,
    old_attempts_bytes,
    old_attempts_frame,
    old_epochs_frame,
    other_place,
    noise,
]


def damaged(number: int, source: KVPool, target: KVPool, streams: bool) -> set[Code]:
    """One case: attempt 1 arrives; attempt 2, with other bytes, is damaged once, on its first link.

    A frame lost with its link may arrive over the next one. Whatever is committed must be right.
    """
    rng = random.Random(number)
    damage = DAMAGES[number % len(DAMAGES)]
    loopback = Loopback(source, target, FRAME_BLOCKS, streams)
    tokens = rng.randrange(FRAME_BLOCKS * LAYOUT.block_size + 1, 12 * LAYOUT.block_size)
    size = LAYOUT.blocks_for(tokens)
    blocks, into = rng.sample(range(POOL), size), rng.sample(range(POOL), size)
    crossed: list[Crossing] = []
    torch.manual_seed(number)

    def watch(epoch: int, crossings: list[Crossing]) -> None:
        crossed[:] = [replace(crossing) for crossing in crossings]

    def spoil(epoch: int, crossings: list[Crossing]) -> None:
        if epoch == 1:
            intact = [replace(crossing) for crossing in crossings]
            damage(rng, crossings, crossed)
            assert crossings != intact

    raw(source).random_(0, 256)
    first = loopback.hand_over(("r", 1), blocks, into, tokens, watch)
    assert first.committed == [FIRST_TOKEN]
    raw(source).random_(0, 256)
    raw(target).zero_()
    handed = loopback.hand_over(("r", 2), blocks, into, tokens, spoil)
    assert loopback.sender.over
    assert loopback.receiver.over
    assert handed.released == handed.holds, "a hold was not released exactly once"
    if handed.committed:
        assert handed.committed == [FIRST_TOKEN]
        assert handed.epochs > 1, "the damage was not noticed"
        assert torch.equal(content(source, blocks, tokens), content(target, into, tokens))
    else:
        assert set(handed.codes) <= REFUSED
    return set(handed.codes)


def run_cases(numbers: Iterable[int]) -> None:
    codes: set[Code] = set()
    pairs = [(KVPool(layout, POOL), KVPool(layout, POOL)) for layout in LAYOUTS]
    for number in numbers:
        pools = pairs[number // (3 * len(DAMAGES)) % len(LAYOUTS)]
        try:
            codes |= damaged(number, *pools, streams=number % 3 == 0)
        except BaseException as error:
            error.add_note(f"KVRELAY_SEED={number}: {DAMAGES[number % len(DAMAGES)].__name__}")
            raise
    assert codes or SEED is not None


def test_no_damage_is_committed() -> None:
    run_cases(range(CASES) if SEED is None else [int(SEED)])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SLICES))
def test_no_damage_of_many_is_committed(part: int) -> None:
    run_cases(range(CASES + part, MANY_CASES, SLICES))


CONFIG = TransferConfig(frame_bytes=65536, frame_timeout_seconds=10.0)
FRAME = 65536 // BIG.block_bytes
"""Blocks of one frame."""


@pytest.mark.parametrize("number", [0, 2, 4])
def test_a_flipped_bit_is_never_committed(number: int) -> None:
    async def test() -> None:
        fake = {"fake": FakeTransport(lambda index: Fault("corrupt") if index == number else None)}
        async with pair(CONFIG, transports=(fake, fake)) as world:
            raw(world.source).random_(0, 256)
            count = 4 * FRAME * BIG.block_size + 5
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
            count = 40 * BIG.block_size + 5
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
        count = rng.randrange(1, 20 * BIG.block_size)
        blocks = rng.sample(range(96), BIG.blocks_for(count))
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
