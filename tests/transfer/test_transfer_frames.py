"""Frames: at most one thread touches blocks, and never after their release; other frames' bytes are refused."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.kv.pool import KVPool
from kvrelay.transfer.claim import BlockClaim, tokens_digest
from kvrelay.transfer.events import Frame, Outcome
from kvrelay.transfer.frames import ChecksumKind, FrameBuffer, ReceiveJob, SendJob, checksum, identity
from kvrelay.transfer.messages import Code, Key, Push
from support.fake_transport import FakeTransport
from support.handoff import LAYOUT, Pair, content, pair, raw

WAIT = 10.0
KEY = ("r", 1)
FRAME = Frame(1, 0, 0, 4, 16)
PLACE = [field for field in fields(Frame) if field.name != "nbytes"]
"""The fields that identify a frame."""
COUNT = 3 * LAYOUT.block_size
BLOCKS = [0, 1, 2]


class SlowPool(KVPool):
    """Blocks every read and write until `go` is set."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, 8)
        self.inside = threading.Event()
        self.go = threading.Event()

    def _stop(self) -> None:
        self.inside.set()
        if not self.go.wait(WAIT):
            raise TimeoutError("`go` was never set")

    def read(self, blocks: Sequence[int], first_token: int, num_tokens: int, out: torch.Tensor) -> int:
        self._stop()
        return super().read(blocks, first_token, num_tokens, out)

    def write(self, blocks: Sequence[int], first_token: int, num_tokens: int, data: torch.Tensor) -> None:
        self._stop()
        super().write(blocks, first_token, num_tokens, data)


def test_a_claim_lets_one_thread_in_or_is_closed_first() -> None:
    for _ in range(300):
        claim = BlockClaim()
        wins: list[str] = []
        start = threading.Barrier(4)

        def attempt(
            name: str, claim: BlockClaim = claim, wins: list[str] = wins, start: threading.Barrier = start
        ) -> None:
            start.wait(WAIT)
            if claim.enter() if name == "enter" else claim.close():
                wins.append(name)

        threads = [threading.Thread(target=attempt, args=(name,)) for name in ("enter", "enter", "close", "close")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert len(wins) == 1


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_equal_digests_are_of_equal_tokens(one: list[int], other: list[int]) -> None:
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
    """A link that records what is sent, and receives threes."""

    stream = None

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, data: torch.Tensor) -> None:
        self.sent.append(bytes(data.numpy().tobytes()))

    def recv(self, into: torch.Tensor) -> None:
        into.fill_(3)


class Threes:
    """A frame buffer that is read as threes, and reports what is written to it."""

    def __init__(self, calls: list[object]) -> None:
        self._calls = calls

    def nbytes(self) -> int:
        return FRAME.nbytes

    def runs(self) -> list[memoryview] | None:
        return None

    def tail(self) -> FrameBuffer | None:
        return None

    def read(self, out: torch.Tensor) -> None:
        out.fill_(3)

    def write(self, data: torch.Tensor) -> None:
        self._calls.append(data.tolist())


def send_job(claim: BlockClaim, calls: list[object]) -> SendJob:
    return SendJob(KEY, FRAME, claim, Threes(calls), ChecksumKind.XXH3, calls.append, lambda: calls.append("read"))


def receive_job(claim: BlockClaim, calls: list[object], kind: ChecksumKind = ChecksumKind.OFF) -> ReceiveJob:
    return ReceiveJob(KEY, FRAME, claim, Threes(calls), kind, calls.append)


def on_link(key: Key = KEY, frame: Frame = FRAME) -> torch.Tensor:
    """A frame of threes with its trailer, as on a link."""
    data = torch.full((16,), 3, dtype=torch.uint8)
    kind = (checksum(data) ^ identity(key, frame)).to_bytes(8, "little")
    return torch.cat([data, torch.frombuffer(bytearray(kind), dtype=torch.uint8)])


def test_a_frame_is_announced_and_sent_with_the_checksum_of_bytes_and_announcement() -> None:
    link, calls, buffer = NoLink(), [], torch.zeros(32, dtype=torch.uint8)
    send_job(BlockClaim(), calls).begin(link, buffer)  # type: ignore[arg-type]  # the parts of a link that the job uses
    assert calls == ["read", Push("r", 1, 1, 0, 0, 4, 16)]
    assert link.sent == [on_link().numpy().tobytes()]


def test_a_stopped_frame_is_neither_read_nor_announced_nor_reported_again() -> None:
    link, calls, claim = NoLink(), [], BlockClaim()
    job = send_job(claim, calls)
    assert claim.close()
    assert job.begin(link, torch.zeros(32, dtype=torch.uint8)) is None  # type: ignore[arg-type]  # as above
    job.fail("the link has ended")
    assert calls == []
    assert link.sent == []


def test_a_failed_link_reports_each_frame_once() -> None:
    calls: list[object] = []
    job = send_job(BlockClaim(), calls)
    job.fail("lost")
    job.fail("lost")
    assert calls == ["read"]
    calls.clear()
    receive = receive_job(BlockClaim(), calls)
    receive.fail("lost")
    receive.fail("lost")
    assert calls == [Outcome.LOST]


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
    calls: list[object] = []
    receive_job(BlockClaim(), calls, kind=ChecksumKind.XXH3).done(on_link(key, frame))
    intact = (key, frame) == (KEY, FRAME)
    assert calls == ([[3] * 16, Outcome.VERIFIED] if intact else [Outcome.CORRUPT])


def test_without_checksums_every_frame_is_accepted() -> None:
    calls: list[object] = []
    receive_job(BlockClaim(), calls).done(torch.full((32,), 3, dtype=torch.uint8))
    assert calls == [[3] * 16, Outcome.VERIFIED]


def test_a_stopped_frame_is_received_and_dropped() -> None:
    calls: list[object] = []
    claim = BlockClaim()
    job = receive_job(claim, calls)
    assert claim.close()
    job.done(torch.full((32,), 3, dtype=torch.uint8))
    assert calls == []


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_blocks_under_a_copy_are_released_after_it_and_not_before(side: str) -> None:
    async def test() -> None:
        slow = SlowPool()
        fake = {"fake": FakeTransport()}
        pools = {"source": slow} if side == "sender" else {"target": slow}
        async with pair(blocks=8, transports=(fake, fake), **pools) as world:
            world.announce(("r", 1), list(range(COUNT)))
            world.compute(("r", 1), BLOCKS)
            await world.ends.until(slow.inside.is_set)
            world.sender.cancel(("r", 1))
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

        def write(self, blocks: Sequence[int], first_token: int, num_tokens: int, data: torch.Tensor) -> None:
            if self.broken:
                raise ValueError("no such block")
            super().write(blocks, first_token, num_tokens, data)

    async def test() -> None:
        pool = Broken(LAYOUT, 8)
        fake = {"fake": FakeTransport()}
        async with pair(blocks=8, transports=(fake, fake), target=pool) as world:
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
