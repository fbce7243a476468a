"""Frames of KV on a GPU: their copies are only queued, so a frame counts as verified, and its memory is reused, once
all that was queued for it is done.

Here a recorder notes the order of operations, waits for the device, and reports; a GPU test beside it has the real
queue.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvrelay.engine.kv.layout import ALL_LAYERS, KVLayout, LayerPart
from kvrelay.engine.kv.pool import KVPool, gpu_checksum
from kvrelay.engine.kv.writes import WRITTEN, EventWaiter, KVWrites
from kvrelay.engine.runner.gpu_step import StreamWrites
from kvrelay.transfer.frames.checks import ChecksumKind, FrameCheck
from kvrelay.transfer.frames.frames import ConvertedFrame, FrameBuffer, PoolFrame, ReceiveJob, SendJob
from kvrelay.transfer.protocol.events import Frame, Outcome
from kvrelay.transfer.protocol.ports import BlockClaim
from support.late_writes import LateWrites
from support.launches import Launch, Launches

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, block_size=8, dtype="float16", order="HND")
OTHER = KVLayout(layers=3, kv_heads=2, head_dim=8, block_size=4, dtype="float32", order="NHD")
KEY = ("r", 1)
TOKENS, TABLE = 21, [4, 1, 6]
SETTLED, REPORTED = "the device is waited for", "the end of the frame is reported"
XXH3, MIX64 = ChecksumKind.XXH3, ChecksumKind.MIX64
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class RecordedPool(KVPool):
    """A pool whose frames go by kernels, as on a GPU, and which notes its waits."""

    def __init__(self, launches: Launches) -> None:
        super().__init__(LAYOUT, 8)
        self._by_kernel = True
        self.launches = launches

    def settle(self) -> None:
        self.launches.all.append(Launch(SETTLED, lambda: (), (), ()))


def kernel_pool() -> KVPool:
    """A pool of random bytes whose frames go by kernels: on a GPU if there is one, else interpreted."""
    pool = KVPool(LAYOUT, 8, DEVICE)
    pool._by_kernel = True
    pool.bytes.random_(0, 256)
    return pool


class BufferLink:
    """A link that has received a frame, or records one."""

    stream = None
    mac_key = None

    def __init__(self, data: torch.Tensor | None = None, lender: "Lending | None" = None) -> None:
        self.lender = lender
        self._data = data

    def recv(self, into: torch.Tensor) -> None:
        if self._data is not None:
            into.copy_(self._data)

    def send(self, data: torch.Tensor) -> str:
        return "sent"


class Lending:
    """A lender, and what it lends."""

    def __init__(self, most_runs: int) -> None:
        self.most_runs = most_runs
        self.lent: list[torch.Tensor] = []

    def lend(self, memory: torch.Tensor) -> bool:
        self.lent.append(memory)
        return True


def frame_of(tokens: int, layout: KVLayout = LAYOUT, part: LayerPart = ALL_LAYERS) -> Frame:
    return Frame(1, 0, 0, tokens, layout.nbytes(tokens, part), part)


def on_link(layout: KVLayout, seed: int = 1) -> tuple[Frame, torch.Tensor]:
    """A frame with its checksum, from a pool of `layout`."""
    source, frame = KVPool(layout, 16), frame_of(TOKENS, layout)
    source.tensor.copy_(torch.randn(source.tensor.shape, generator=torch.Generator().manual_seed(seed)))
    data = torch.empty(frame.nbytes, dtype=torch.uint8)
    source.read(list(range(layout.blocks_for(TOKENS))), 0, TOKENS, data)
    end = FrameCheck(XXH3, None, KEY, frame).of(data)
    return frame, torch.cat([data, torch.frombuffer(bytearray(end), dtype=torch.uint8)])


def place(pool: KVPool, layout: KVLayout, frame: Frame, table: Sequence[int] = TABLE) -> FrameBuffer:
    if layout == pool.layout:
        return PoolFrame(pool, table, frame)
    return ConvertedFrame(pool, layout, table, frame, 0)


def touched(launch: Launch, *memory: torch.Tensor) -> bool:
    storages = {tensor.untyped_storage().data_ptr() for tensor in memory}
    return any(tensor.untyped_storage().data_ptr() in storages for tensor in launch.given)


@pytest.mark.parametrize("layout", [LAYOUT, OTHER], ids=["as it is", "converted"])
@interpreted
def test_what_is_received_has_settled_when_it_is_reported(layout: KVLayout) -> None:
    frame, data = on_link(layout)
    buffer = torch.empty(len(data), dtype=torch.uint8)
    with Launches() as launches:
        pool = RecordedPool(launches)
        begun = len(launches.all)

        def ended(outcome: Outcome) -> None:
            assert outcome is Outcome.VERIFIED
            launches.all.append(Launch(REPORTED, lambda: (), (), ()))

        job = ReceiveJob(KEY, frame, BlockClaim(), place(pool, layout, frame), XXH3, ended)
        job.begin(BufferLink(data), buffer)  # type: ignore[arg-type]  # the parts of a link that the job uses
        job.done(buffer)
    order = launches.all[begun:]
    names = [launch.name for launch in order]
    settled = len(names) - 1 - names[::-1].index(SETTLED)
    assert settled < names.index(REPORTED)
    assert any(touched(launch, pool.tensor) for launch in order[:settled]), "the recorder sees the copies"
    assert not any(touched(launch, pool.tensor, buffer) for launch in order[settled:])


@interpreted
def test_blocks_are_given_back_once_their_copy_has_settled() -> None:
    frame = frame_of(TOKENS)
    buffer = torch.empty(frame.nbytes + 16, dtype=torch.uint8)
    with Launches() as launches:
        pool = RecordedPool(launches)

        def read() -> None:
            launches.all.append(Launch(REPORTED, lambda: (), (), ()))

        job = SendJob(KEY, frame, BlockClaim(), place(pool, LAYOUT, frame), XXH3, print, read)
        job.begin(BufferLink(), buffer)  # type: ignore[arg-type]  # as above
    names = [launch.name for launch in launches.all]
    assert names.index(SETTLED) < names.index(REPORTED)
    assert not any(touched(launch, pool.tensor) for launch in launches.all[names.index(REPORTED) :])


@interpreted
@pytest.mark.more
def test_no_frame_needs_a_kernel_that_the_warm_up_has_not_compiled() -> None:
    with Launches() as warm:
        pool = RecordedPool(warm)
        before = pool.tensor.fill_(3).clone()
        pool.warm_up()
    assert torch.equal(pool.tensor, before)
    compiled = {launch.specialization for launch in warm.kernels}
    assert len(compiled) == 4, "a checksum, both copies with their sums, and a sum in place"
    for tokens in (1, 8, 21, 24):
        buffer = torch.empty(LAYOUT.nbytes(tokens), dtype=torch.uint8)
        with Launches() as launches:
            pool = RecordedPool(launches)
            for part in (ALL_LAYERS, LayerPart(1, 3), LayerPart(2, 3)):
                size = pool.read(TABLE, 0, tokens, buffer, part)
                pool.write(TABLE, 0, tokens, buffer[:size], part)
                pool.read_summed(TABLE, 0, tokens, buffer, part)
                pool.write_summed(TABLE, 0, tokens, buffer[:size], part)
                pool.sum_in_place(TABLE, 0, tokens, buffer, part)
            gpu_checksum(buffer)
        assert {launch.specialization for launch in launches.kernels} <= compiled


def through_kernels(source: KVPool, target: KVPool, harm: int | None = None) -> list[Outcome]:
    """The outcome of a frame that goes from one pool to another, byte `harm` of which is changed on the link."""
    frame, outcomes = frame_of(TOKENS), list[Outcome]()
    sent, buffer = (torch.empty(frame.nbytes + 8, dtype=torch.uint8, device=source.bytes.device) for _ in range(2))
    send = SendJob(KEY, frame, BlockClaim(), place(source, LAYOUT, frame), MIX64, print, bool)
    send.begin(BufferLink(), sent)  # type: ignore[arg-type]  # as above
    if harm is not None:
        sent[harm] ^= 4
    receive = ReceiveJob(KEY, frame, BlockClaim(), place(target, LAYOUT, frame), MIX64, outcomes.append)
    receive.begin(BufferLink(sent), buffer)  # type: ignore[arg-type]  # as above
    receive.done(buffer)
    return outcomes


def content(pool: KVPool) -> torch.Tensor:
    frame = torch.empty(LAYOUT.nbytes(TOKENS), dtype=torch.uint8)
    KVPool.read(pool, TABLE, 0, TOKENS, frame)
    return frame


@interpreted
def test_a_frame_is_copied_and_checked_in_one_pass() -> None:
    with Launches() as launches:
        source, target = RecordedPool(launches), RecordedPool(launches)
        assert through_kernels(source, target) == [Outcome.VERIFIED]
    assert [launch.name for launch in launches.all].count(SETTLED) == 2
    kernels = [launch.name for launch in launches.kernels]
    assert len(kernels) == 4, "at each end one for the whole blocks, and one for the sum of the partial last one"


def test_a_frame_between_two_gpus_arrives_unchanged() -> None:
    source, target = kernel_pool(), kernel_pool()
    assert through_kernels(source, target) == [Outcome.VERIFIED]
    assert torch.equal(content(target), content(source))


@pytest.mark.parametrize("harm", [0, LAYOUT.nbytes(16) - 1, LAYOUT.nbytes(TOKENS) - 1, LAYOUT.nbytes(TOKENS) + 3])
def test_a_byte_that_changes_between_two_gpus_is_found(harm: int) -> None:
    """The byte is in a whole block, in the partial last one, or in the checksum itself."""
    assert through_kernels(kernel_pool(), kernel_pool(), harm) == [Outcome.CORRUPT]


# Behind the step that computes the KV.


class Behind(LateWrites):
    """Writes that note who follows them."""

    follows = 0

    def follow(self) -> None:
        self.follows += 1


class QueuedPool(KVPool):
    """A pool whose copies run when they are waited for, as late as a GPU may."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, 8)
        self._by_kernel = True
        self.queued: list[Callable[[], object]] = []

    def settle(self) -> None:
        for run in self.queued:
            run()
        self.queued.clear()


class QueuedFrame(PoolFrame):
    def begin_read(self, data: torch.Tensor, check: FrameCheck) -> None:
        self._pool.queued.append(lambda: super(QueuedFrame, self).begin_read(data, check))  # type: ignore[attr-defined]  # it is a QueuedPool


@pytest.mark.parametrize("ends_by", ["a send", "a lost link"])
@interpreted
def test_a_prepared_copy_is_waited_for_once_and_its_blocks_are_kept_until_then(ends_by: str) -> None:
    pool, late, events = QueuedPool(), Behind(), list[str]()
    frame, claim = frame_of(TOKENS), BlockClaim(late)
    job = SendJob(
        KEY,
        frame,
        claim,
        QueuedFrame(pool, TABLE, frame),
        MIX64,
        lambda push: events.append("announced"),
        lambda: events.append("read"),
    )
    buffer = torch.zeros(frame.nbytes + 8, dtype=torch.uint8)
    job.prepare(BufferLink(), buffer)  # type: ignore[arg-type]  # as above
    assert (late.follows, len(pool.queued), events) == (1, 1, [])
    # The step's writes, after the copy was queued.
    pool.bytes.random_(0, 256)
    late.end()
    if ends_by == "a lost link":
        job.fail("lost")
        assert (pool.queued, events) == ([], ["read"])
        return
    assert job.begin(BufferLink(), buffer) == "sent"  # type: ignore[arg-type, comparison-overlap]
    assert (pool.queued, events) == ([], ["read", "announced"])
    assert torch.equal(buffer[: frame.nbytes], content(pool))


def test_a_frame_of_a_lost_link_was_not_sent_in_place() -> None:
    claim, frame = BlockClaim(Behind()), frame_of(16)
    job = SendJob(KEY, frame, claim, PoolFrame(kernel_pool(), [4, 1], frame), MIX64, print, bool)
    buffer = torch.zeros(frame.nbytes + 8, dtype=torch.uint8, device=DEVICE)
    job.prepare(BufferLink(lender=Lending(8)), buffer)  # type: ignore[arg-type]  # as above
    assert claim.in_place
    job.fail("lost")
    assert not claim.in_place


def test_a_frame_whose_copy_cannot_be_queued_can_be_stopped_until_its_step_ends() -> None:
    claim, frame = BlockClaim(LateWrites()), frame_of(16)
    job = SendJob(KEY, frame, claim, PoolFrame(KVPool(LAYOUT, 8), [4, 1], frame), XXH3, print, bool)
    job.prepare(BufferLink(), torch.zeros(frame.nbytes + 8, dtype=torch.uint8))  # type: ignore[arg-type]  # as above
    assert claim.close()


@pytest.mark.parametrize("kind", list(ChecksumKind))
@pytest.mark.parametrize("part", [ALL_LAYERS, LayerPart(1, 2)])
@pytest.mark.parametrize("table", [[2, 3, 4], [4, 1, 6], [5, 6, 1]])
@pytest.mark.parametrize("tokens", [16, 21, 24])
@pytest.mark.some(6)
def test_lent_parts_are_the_bytes_of_the_frame(
    table: list[int], tokens: int, part: LayerPart, kind: ChecksumKind
) -> None:
    """A frame is sent from where it lies, wherever its blocks lie. The sums are computed by kernels as on a GPU
    (MIX64), and on the CPU."""
    if kind is MIX64:
        pool = kernel_pool()
    else:
        pool = KVPool(LAYOUT, 8)
        pool.bytes.random_(0, 256)
    frame = frame_of(tokens, part=part)
    check, there = FrameCheck(kind, None, KEY, frame), PoolFrame(pool, table, frame)
    length, device = frame.nbytes + check.nbytes, pool.bytes.device
    expected, buffer = (torch.full((length,), 9, dtype=torch.uint8, device=device) for _ in range(2))
    if there.queues(expected, check):
        there.begin_read(expected, check)
    else:
        there.read(expected[: frame.nbytes])
        if check.nbytes:
            end = bytearray(check.of(expected[: frame.nbytes]))
            expected[frame.nbytes :] = torch.frombuffer(end, dtype=torch.uint8)
    lender = Lending(3)
    parts = there.lend(lender, buffer, check)  # type: ignore[arg-type]  # it is only made ready
    assert parts is not None
    assert torch.equal(torch.cat(parts), expected)
    assert lender.lent[0] is pool.bytes
    inside = [piece for piece in parts if piece.untyped_storage().data_ptr() == pool.bytes.untyped_storage().data_ptr()]
    assert sum(map(len, inside)) == LAYOUT.nbytes(tokens - tokens % LAYOUT.block_size, part)
    assert there.lend(Lending(len(inside) - 1), buffer, check) is None  # type: ignore[arg-type]  # it is only made ready


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("layout", [LAYOUT, OTHER], ids=["as it is", "converted"])
def test_on_a_gpu_another_stream_sees_what_was_reported(layout: KVLayout) -> None:
    """The link's thread has much work queued before the frame; a step on its own stream reads after the report."""
    frame, data = on_link(layout)
    pool, expected = KVPool(LAYOUT, 8, "cuda"), KVPool(LAYOUT, 8)
    place(expected, layout, frame).write(data)
    on_gpu, buffer = data.cuda(), torch.empty(len(data), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    reported = threading.Event()
    found: list[Any] = []

    def receive() -> None:
        torch.cuda._sleep(200_000_000)
        job = ReceiveJob(KEY, frame, BlockClaim(), place(pool, layout, frame), XXH3, lambda outcome: reported.set())
        job.begin(BufferLink(on_gpu), buffer)  # type: ignore[arg-type]  # as above
        job.done(buffer)
        buffer.zero_()

    thread = threading.Thread(target=receive)
    thread.start()
    assert reported.wait(60)
    with torch.cuda.stream(torch.cuda.Stream()):
        found.append(pool.tensor.cpu())
    thread.join(60)
    assert torch.equal(found[0], expected.tensor)


@pytest.mark.gpu
@gpu
def test_on_a_gpu_a_prepared_copy_follows_the_step_that_writes_its_blocks() -> None:
    """The copy is queued while the step still runs, on another stream, and has what the step wrote."""
    pool, result, frame, step = kernel_pool(), kernel_pool(), frame_of(TOKENS), torch.cuda.Stream()
    buffer = torch.zeros(frame.nbytes + 8, dtype=torch.uint8, device="cuda")

    def send(writes: KVWrites) -> bool:
        """Whether the writes had ended when the copy was queued."""
        job = SendJob(KEY, frame, BlockClaim(writes), place(pool, LAYOUT, frame), MIX64, print, bool)
        job.prepare(BufferLink(), buffer)  # type: ignore[arg-type]  # as above
        ended = writes.ended
        job.begin(BufferLink(), buffer)  # type: ignore[arg-type]  # as above
        return ended

    before = content(pool)
    # Kernels are compiled and memory is allocated now: later, either could wait for the step.
    assert send(WRITTEN)
    assert torch.equal(buffer[: frame.nbytes].cpu(), before)
    with torch.cuda.stream(step):
        torch.cuda._sleep(1_000_000_000)
        pool.bytes.copy_(result.bytes)
    writes = StreamWrites(step, EventWaiter("kv writes"))
    assert not send(writes)
    assert writes.ended
    assert torch.equal(buffer[: frame.nbytes].cpu(), content(result))
    assert not torch.equal(content(result), before)
