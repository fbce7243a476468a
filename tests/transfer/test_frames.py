"""Frames: at most one thread touches blocks, and never after their release; other frames' bytes are refused."""

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.kv.layout import LayerPart
from kvrelay.transfer.frames.checks import ChecksumKind, FrameCheck
from kvrelay.transfer.frames.frames import ReceiveJob, SendJob
from kvrelay.transfer.frames.places import StatesFrame
from kvrelay.transfer.protocol.events import Frame, Outcome, tokens_digest
from kvrelay.transfer.protocol.messages import Key, Push
from kvrelay.transfer.protocol.ports import BlockClaim

WAIT = 10.0
KEY, FRAME = ("r", 1), Frame(1, 0, 0, 4, 16)
OTHERS = [
    (("r", 2), FRAME),
    (("s", 1), FRAME),
    *((KEY, replace(FRAME, **{name: getattr(FRAME, name) + 1})) for name in ("epoch", "index", "first", "tokens")),
    *((KEY, replace(FRAME, part=LayerPart(number, 2))) for number in range(2)),
    (KEY, replace(FRAME, states=True)),
    (KEY, replace(FRAME, track=1)),
]
"""Frames with as many bytes as FRAME, of other hand-offs and for other places."""
MAC_KEY = b"k" * 32
XXH3, OFF = ChecksumKind.XXH3, ChecksumKind.OFF
of_each_kind = pytest.mark.parametrize("mac_key", [None, MAC_KEY], ids=["checksum", "mac"])


def test_a_claim_lets_one_thread_in_or_is_closed_first() -> None:
    for _ in range(300):
        claim, wins, start = BlockClaim(), list[str](), threading.Barrier(4)

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
def test_every_flipped_bit_changes_the_trailer(mac_key: bytes | None) -> None:
    data = torch.arange(64, dtype=torch.uint8)
    check = FrameCheck(XXH3, mac_key, KEY, FRAME)
    whole = check.of(data)
    assert len(whole) == check.nbytes
    for index in range(64):
        for bit in range(8):
            data[index] ^= 1 << bit
            assert not check.same(check.of(data), whole)
            data[index] ^= 1 << bit


@of_each_kind
@given(data=st.binary(min_size=1, max_size=64), cut=st.integers(0, 64))
def test_a_trailer_is_that_of_the_bytes_however_they_come(mac_key: bytes | None, data: bytes, cut: int) -> None:
    check = FrameCheck(XXH3, mac_key, KEY, FRAME)
    running = check.begin()
    running.update(memoryview(data)[:cut])
    running.update(memoryview(data)[cut:])
    assert running.trailer() == check.of(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def test_a_mac_can_not_be_made_without_the_links_key() -> None:
    data = torch.arange(64, dtype=torch.uint8)
    macs = {FrameCheck(kind, key, KEY, FRAME).of(data) for kind in ChecksumKind for key in (MAC_KEY, b"l" * 32)}
    assert len(macs) == 2, "it depends on the link's key, and on no checksum's kind"


class Sides:
    """Jobs of one frame of threes, on a link of buffers; the receiver's memory is zero at first."""

    stream = None
    lender = None

    def __init__(self, mac_key: bytes | None = None, kind: ChecksumKind = XXH3) -> None:
        self.mac_key = mac_key
        self.sent: list[torch.Tensor] = []
        self.calls: list[object] = []
        self.claim = BlockClaim()
        self.memory = torch.zeros(FRAME.nbytes, dtype=torch.uint8)
        threes, rest = StatesFrame([torch.full_like(self.memory, 3)]), self.calls.append
        self.send_job = SendJob(KEY, FRAME, self.claim, threes, kind, rest, lambda: rest("read"))
        self.receive_job = ReceiveJob(KEY, FRAME, self.claim, StatesFrame([self.memory]), kind, rest)

    def send(self, data: torch.Tensor) -> None:
        self.sent.append(data.clone())

    def recv(self, into: torch.Tensor) -> None:
        into.copy_(self.sent[0])

    def receives(self, key: Key = KEY, frame: Frame = FRAME, kind: ChecksumKind = XXH3) -> list[object]:
        """The receiver's report of a frame of threes that was sent as this one."""
        data, buffer = torch.full_like(self.memory, 3), torch.zeros(32, dtype=torch.uint8)
        end = bytearray(FrameCheck(kind, self.mac_key, key, frame).of(data))
        self.sent = [torch.cat([data, torch.tensor(list(end), dtype=torch.uint8)])]
        self.receive_job.begin(self, buffer)  # type: ignore[arg-type]  # the parts of a link that the job uses
        self.receive_job.done(buffer)
        return self.calls


@of_each_kind
def test_a_frame_is_announced_and_sent_with_the_check_of_bytes_and_announcement(mac_key: bytes | None) -> None:
    sides = Sides(mac_key)
    sides.send_job.begin(sides, torch.zeros(32, dtype=torch.uint8))  # type: ignore[arg-type]  # as above
    assert sides.calls == ["read", Push("r", 1, 1, 0, 0, 4, 16)]
    (data,) = sides.sent
    assert bytes(data) == b"\3" * 16 + FrameCheck(XXH3, mac_key, KEY, FRAME).of(data[:16])


def test_a_stopped_frame_is_neither_read_nor_announced_nor_reported_again() -> None:
    sides = Sides()
    assert sides.claim.close()
    assert sides.send_job.begin(sides, torch.zeros(32, dtype=torch.uint8)) is None  # type: ignore[arg-type]  # as above
    sides.send_job.fail("the link has ended")
    assert sides.calls == sides.sent == []


def test_a_failed_link_reports_each_frame_once() -> None:
    sending, receiving = Sides(), Sides()
    for _ in range(2):
        sending.send_job.fail("lost")
        receiving.receive_job.fail("lost")
    assert sending.calls == ["read"]
    assert receiving.calls == [Outcome.LOST]


@pytest.mark.parametrize(("key", "frame"), [(KEY, FRAME), *OTHERS])
@of_each_kind
def test_only_bytes_of_this_very_frame_are_written(mac_key: bytes | None, key: Key, frame: Frame) -> None:
    sides = Sides(mac_key)
    intact = (key, frame) == (KEY, FRAME)
    assert sides.receives(key, frame) == [Outcome.VERIFIED if intact else Outcome.CORRUPT]
    assert (sides.memory == (3 if intact else 0)).all()


def test_without_checksums_every_frame_is_accepted() -> None:
    sides = Sides(kind=OFF)
    assert sides.receives(*OTHERS[0], kind=OFF) == [Outcome.VERIFIED]
    assert (sides.memory == 3).all()


def test_a_stopped_frame_is_received_and_dropped() -> None:
    sides = Sides()
    assert sides.claim.close()
    assert sides.receives() == []
    assert not sides.memory.any()
