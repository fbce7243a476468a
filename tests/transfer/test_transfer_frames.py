"""Frames: blocks are touched by one thread at most, and never once they were said to be free."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.kv.layout import Layers
from kvrelay.engine.kv.pool import KVPool
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.events import Frame, Outcome
from kvrelay.transfer.frames import (
    BlockClaim,
    ChecksumKind,
    FrameBuffer,
    ReceiveJob,
    SendJob,
    checksum,
    identity,
    tokens_digest,
)
from kvrelay.transfer.messages import Code, Key, Push
from support.fake_transport import FakeTransport
from support.handoff import LAYOUT, Pair, content, pair, raw

WAIT = 10.0
KEY = ("r", 1)
FRAME = Frame(1, 0, 0, 4, 16)
PLACE = [field for field in fields(Frame) if field.name != "nbytes"]
"""What says which frame it is."""
COUNT = 3 * LAYOUT.block_size
BLOCKS = [0, 1, 2]


class SlowPool(KVPool):
    """Stops inside every read and write until it is let go."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, 8)
        self.inside = threading.Event()
        self.go = threading.Event()

    def _stop(self) -> None:
        self.inside.set()
        if not self.go.wait(WAIT):
            raise TimeoutError("nobody let the pool go")

    def read(
        self, blocks: Sequence[int], first_token: int, num_tokens: int, out: torch.Tensor, layers: Layers | None = None
    ) -> int:
        self._stop()
        return super().read(blocks, first_token, num_tokens, out, layers)

    def write(
        self, blocks: Sequence[int], first_token: int, num_tokens: int, data: torch.Tensor, layers: Layers | None = None
    ) -> None:
        self._stop()
        super().write(blocks, first_token, num_tokens, data, layers)


def test_a_guard_lets_one_in_or_is_closed_first() -> None:
    for _ in range(300):
        guard = BlockClaim()
        wins: list[str] = []
        start = threading.Barrier(4)

        def attempt(
            name: str, guard: BlockClaim = guard, wins: list[str] = wins, start: threading.Barrier = start
        ) -> None:
            start.wait(WAIT)
            if guard.enter() if name == "enter" else guard.close():
                wins.append(name)

        threads = [threading.Thread(target=attempt, args=(name,)) for name in ("enter", "enter", "close", "close")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert len(wins) == 1


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_digests_tell_token_lists_apart(one: list[int], other: list[int]) -> None:
    assert (tokens_digest(one) == tokens_digest(other)) == (one == other)
    assert len(tokens_digest(one)) == 16


def test_every_flipped_bit_changes_the_checksum() -> None:
    data = torch.arange(64, dtype=torch.uint8)
    whole = checksum(data)
    for index in range(64):
        for bit in range(8):
            data[index] ^= 1 << bit
            assert checksum(data) != whole
            data[index] ^= 1 << bit


class NoLink:
    """A link that takes everything and sends nothing."""

    stream = None

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, data: torch.Tensor) -> None:
        self.sent.append(bytes(data.numpy().tobytes()))

    def recv(self, into: torch.Tensor) -> None:
        into.fill_(3)


class Threes:
    """Where a frame of threes is, and where frames are said to be written."""

    def __init__(self, said: list[object]) -> None:
        self._said = said

    def nbytes(self) -> int:
        return FRAME.nbytes

    def runs(self) -> list[memoryview] | None:
        return None

    def tail(self) -> FrameBuffer | None:
        return None

    def read(self, out: torch.Tensor) -> None:
        out.fill_(3)

    def write(self, data: torch.Tensor) -> None:
        self._said.append(data.tolist())


def send_job(guard: BlockClaim, said: list[object]) -> SendJob:
    return SendJob(KEY, FRAME, guard, Threes(said), ChecksumKind.XXH3, said.append, lambda: said.append("read"))


def receive_job(guard: BlockClaim, said: list[object], seal: ChecksumKind = ChecksumKind.OFF) -> ReceiveJob:
    return ReceiveJob(KEY, FRAME, guard, Threes(said), seal, said.append)


def on_link(key: Key = KEY, frame: Frame = FRAME) -> torch.Tensor:
    """A frame of threes as it is on a link."""
    data = torch.full((16,), 3, dtype=torch.uint8)
    seal = (checksum(data) ^ identity(key, frame)).to_bytes(8, "little")
    return torch.cat([data, torch.frombuffer(bytearray(seal), dtype=torch.uint8)])


def test_a_frame_is_announced_and_sent_with_the_checksum_of_what_it_is() -> None:
    link, said, buffer = NoLink(), [], torch.zeros(32, dtype=torch.uint8)
    send_job(BlockClaim(), said).begin(link, buffer)  # type: ignore[arg-type]  # the parts of a link that the job uses
    assert said == ["read", Push("r", 1, 1, 0, 0, 4, 16, 0, 1)]
    assert link.sent == [on_link().numpy().tobytes()]


def test_a_stopped_frame_is_neither_read_nor_announced_nor_reported_again() -> None:
    link, said, guard = NoLink(), [], BlockClaim()
    job = send_job(guard, said)
    assert guard.close()
    assert job.begin(link, torch.zeros(32, dtype=torch.uint8)) is None  # type: ignore[arg-type]  # as above
    job.fail("the link has ended")
    assert said == []
    assert link.sent == []


def test_a_failed_link_reports_each_frame_once() -> None:
    said: list[object] = []
    job = send_job(BlockClaim(), said)
    job.fail("lost")
    job.fail("lost")
    assert said == ["read"]
    said.clear()
    receive = receive_job(BlockClaim(), said)
    receive.fail("lost")
    receive.fail("lost")
    assert said == [Outcome.LOST]


@pytest.mark.parametrize(
    ("key", "frame"),
    [
        (KEY, FRAME),
        (("r", 2), FRAME),
        (("s", 1), FRAME),
        *((KEY, replace(FRAME, **{field.name: getattr(FRAME, field.name) + 1})) for field in PLACE),
    ],
)
def test_only_bytes_of_this_very_frame_are_written(key: Key, frame: Frame) -> None:
    said: list[object] = []
    receive_job(BlockClaim(), said, seal=ChecksumKind.XXH3).done(on_link(key, frame))
    intact = (key, frame) == (KEY, FRAME)
    assert said == ([[3] * 16, Outcome.VERIFIED] if intact else [Outcome.CORRUPT])


def test_without_checksums_a_frame_is_taken_as_it_comes() -> None:
    said: list[object] = []
    receive_job(BlockClaim(), said).done(torch.full((32,), 3, dtype=torch.uint8))
    assert said == [[3] * 16, Outcome.VERIFIED]


def test_a_stopped_frame_is_received_and_dropped() -> None:
    said: list[object] = []
    guard = BlockClaim()
    job = receive_job(guard, said)
    assert guard.close()
    job.done(torch.full((32,), 3, dtype=torch.uint8))
    assert said == []


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_blocks_under_a_copy_are_released_after_it_and_not_before(side: str) -> None:
    async def test() -> None:
        slow = SlowPool()
        fake = {"fake": FakeTransport()}
        pools = {"source": slow} if side == "sender" else {"target": slow}
        async with pair(TransferConfig(), blocks=8, transports=(fake, fake), **pools) as world:
            world.announce(("r", 1), list(range(COUNT)))
            world.compute(("r", 1), BLOCKS)
            await world.ends.until(slow.inside.is_set)
            world.exporter.cancel(("r", 1))
            await world.ends.until(lambda: ("r", 1) in world.ends.import_failed)
            await asyncio.sleep(0.05)
            held(world, side)
            slow.go.set()
            await world.ends.until(lambda: not world.sending.leaked and not world.receiving.leaked)

    def held(world: Pair, side: str) -> None:
        released = [hold.releases for hold in world.sending.holds]
        reservation = world.receiving.reservations["r", 1].hold.releases
        assert (released, reservation) == (([0, 0], 1) if side == "sender" else ([1, 1], 0))

    asyncio.run(test())


def test_a_pool_that_raises_fails_the_hand_off_and_the_next_one_works() -> None:
    class Broken(KVPool):
        broken = True

        def write(
            self,
            blocks: Sequence[int],
            first_token: int,
            num_tokens: int,
            data: torch.Tensor,
            layers: Layers | None = None,
        ) -> None:
            if self.broken:
                raise ValueError("no such block")
            super().write(blocks, first_token, num_tokens, data, layers)

    async def test() -> None:
        pool = Broken(LAYOUT, 8)
        fake = {"fake": FakeTransport()}
        async with pair(TransferConfig(), blocks=8, transports=(fake, fake), target=pool) as world:
            raw(world.source).random_(0, 256)
            world.announce(("r", 1), list(range(COUNT)))
            world.compute(("r", 1), BLOCKS)
            await world.ends.until(
                lambda: ("r", 1) in world.ends.export_failed and ("r", 1) in world.ends.import_failed
            )
            await world.ends.until(lambda: not world.sending.leaked and not world.receiving.leaked)
            assert world.ends.export_failed["r", 1][0] is Code.LINK
            pool.broken = False
            world.announce(("r", 2), list(range(COUNT)))
            world.compute(("r", 2), BLOCKS)
            await world.ends.until(lambda: ("r", 2) in world.ends.imported)
            reservation = world.ends.imported["r", 2][0]
            assert torch.equal(content(pool, reservation.hold.blocks, COUNT), content(world.source, BLOCKS, COUNT))

    asyncio.run(test())
