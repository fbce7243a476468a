"""Frames: at most one thread touches blocks, and never after their release; other frames' bytes are refused."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.kv.layout import LayerPart
from kvrelay.engine.kv.pool import KVPool
from kvrelay.transfer.frames.checks import ChecksumKind, FrameCheck
from kvrelay.transfer.frames.frames import FrameBuffer, ReceiveJob, SendJob
from kvrelay.transfer.protocol.events import Frame, Outcome, tokens_digest
from kvrelay.transfer.protocol.messages import Code, Key, Push
from kvrelay.transfer.protocol.ports import BlockClaim
from support.fake_transport import FakeTransport
from support.handoff import LAYOUT, Pair, content, pair, raw

WAIT = 10.0
KEY = ("r", 1)
FRAME = Frame(1, 0, 0, 4, 16)
PLACES = [
    *(replace(FRAME, **{name: getattr(FRAME, name) + 1}) for name in ("epoch", "index", "first", "tokens")),
    replace(FRAME, part=LayerPart(0, 2)),
    replace(FRAME, part=LayerPart(1, 2)),
]
"""Frames with as many bytes as FRAME, for other places."""
COUNT = 3 * LAYOUT.block_size
BLOCKS = [0, 1, 2]
MAC_KEY = b"k" * 32
of_each_kind = pytest.mark.parametrize(
    ("kind", "mac_key"), [(ChecksumKind.XXH3, None), (ChecksumKind.XXH3, MAC_KEY)], ids=["checksum", "mac"]
)


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

    def read(self, *frame: Any) -> int:
        self._stop()
        return super().read(*frame)

    def write(self, *frame: Any) -> None:
        self._stop()
        super().write(*frame)


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


@of_each_kind
def test_every_flipped_bit_changes_the_trailer(kind: ChecksumKind, mac_key: bytes | None) -> None:
    data = torch.arange(64, dtype=torch.uint8)
    check = FrameCheck(kind, mac_key, KEY, FRAME)
    whole = check.of(data)
    assert len(whole) == check.nbytes
    for index in range(64):
        for bit in range(8):
            data[index] ^= 1 << bit
            assert not check.same(check.of(data), whole)
            data[index] ^= 1 << bit


@of_each_kind
@given(data=st.binary(min_size=1, max_size=64), cut=st.integers(0, 64))
def test_a_trailer_is_that_of_the_bytes_however_they_come(
    kind: ChecksumKind, mac_key: bytes | None, data: bytes, cut: int
) -> None:
    check = FrameCheck(kind, mac_key, KEY, FRAME)
    running = check.begin()
    running.update(memoryview(data)[:cut])
    running.update(memoryview(data)[cut:])
    assert running.trailer() == check.of(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def test_a_mac_can_not_be_made_without_the_links_key() -> None:
    data = torch.arange(64, dtype=torch.uint8)
    macs = {FrameCheck(kind, key, KEY, FRAME).of(data) for kind in ChecksumKind for key in (MAC_KEY, b"l" * 32)}
    assert len(macs) == 2, "it depends on the link's key, and on no checksum's kind"


class NoLink:
    """A link that records what is sent, and receives `data`; threes by default."""

    stream = None
    lender = None

    def __init__(self, mac_key: bytes | None = None, data: torch.Tensor | None = None) -> None:
        self.mac_key = mac_key
        self.sent: list[bytes] = []
        self._data = data

    def send(self, data: torch.Tensor) -> None:
        self.sent.append(bytes(data.numpy().tobytes()))

    def recv(self, into: torch.Tensor) -> None:
        into.copy_(torch.full_like(into, 3) if self._data is None else self._data)


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

    def queues(self, data: torch.Tensor, check: FrameCheck) -> bool:
        return False

    def begin_read(self, data: torch.Tensor, check: FrameCheck) -> None: ...

    def lend(self, lender: object, data: torch.Tensor, check: FrameCheck) -> None: ...

    def settle(self) -> None: ...

    def write_checked(self, data: torch.Tensor, check: FrameCheck) -> bool | None:
        return None


def send_job(claim: BlockClaim, calls: list[object]) -> SendJob:
    return SendJob(KEY, FRAME, claim, Threes(calls), ChecksumKind.XXH3, calls.append, lambda: calls.append("read"))


def receive_job(claim: BlockClaim, calls: list[object], kind: ChecksumKind = ChecksumKind.OFF) -> ReceiveJob:
    return ReceiveJob(KEY, FRAME, claim, Threes(calls), kind, calls.append)


def on_link(
    key: Key = KEY, frame: Frame = FRAME, kind: ChecksumKind = ChecksumKind.XXH3, mac_key: bytes | None = None
) -> torch.Tensor:
    """A frame of threes with its trailer, as on a link."""
    data = torch.full((16,), 3, dtype=torch.uint8)
    end = FrameCheck(kind, mac_key, key, frame).of(data)
    return torch.cat([data, torch.frombuffer(bytearray(end), dtype=torch.uint8)])


def received(job: ReceiveJob, link: NoLink) -> None:
    """Runs the job on a link."""
    buffer = torch.zeros(32, dtype=torch.uint8)
    job.begin(link, buffer)  # type: ignore[arg-type]  # the parts of a link that the job uses
    job.done(buffer)


@of_each_kind
def test_a_frame_is_announced_and_sent_with_the_check_of_bytes_and_announcement(
    kind: ChecksumKind, mac_key: bytes | None
) -> None:
    link, calls, buffer = NoLink(mac_key), [], torch.zeros(32, dtype=torch.uint8)
    send_job(BlockClaim(), calls).begin(link, buffer)  # type: ignore[arg-type]  # the parts of a link that the job uses
    assert calls == ["read", Push("r", 1, 1, 0, 0, 4, 16)]
    assert link.sent == [on_link(kind=kind, mac_key=mac_key).numpy().tobytes()]


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
        *((KEY, frame) for frame in PLACES),
    ],
)
@of_each_kind
def test_only_bytes_of_this_very_frame_are_written(
    kind: ChecksumKind, mac_key: bytes | None, key: Key, frame: Frame
) -> None:
    calls: list[object] = []
    link = NoLink(mac_key, on_link(key, frame, kind, mac_key))
    received(receive_job(BlockClaim(), calls, kind=kind), link)
    intact = (key, frame) == (KEY, FRAME)
    assert calls == ([[3] * 16, Outcome.VERIFIED] if intact else [Outcome.CORRUPT])


def test_without_checksums_every_frame_is_accepted() -> None:
    calls: list[object] = []
    received(receive_job(BlockClaim(), calls), NoLink())
    assert calls == [[3] * 16, Outcome.VERIFIED]


def test_a_stopped_frame_is_received_and_dropped() -> None:
    calls: list[object] = []
    claim = BlockClaim()
    job = receive_job(claim, calls)
    assert claim.close()
    received(job, NoLink())
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

        def write(self, *frame: Any) -> None:
            if self.broken:
                raise ValueError("no such block")
            super().write(*frame)

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
