"""Frames: how the KV of a token range moves from the blocks of one pool, through a link, into the blocks of another.

On the link a frame is its bytes (`kvrelay.engine.kv.pool` has their order), followed by a checksum or a MAC (`checks`).

    link carries             sender                                 receiver
    memory (link.stream)     hashes and sends piece by piece,       receives and hashes piece by piece, straight into
                             straight out of the blocks             the reserved blocks, which nobody reads before the
                                                                    commit; a partial last block goes through a buffer
    buffers only, or other   copies the blocks to the link's        receives into the link's buffer, verifies, and
    layouts, or a GPU's      buffer (or converts them to 8 bits),   then copies (or converts) into the blocks
                             hashes, sends
    a GPU's memory           one kernel copies and sums; its        receives into the link's buffer; one kernel copies
                             stream is waited for once. It may be   into the reserved blocks and sums, which is compared
                             queued behind the step that computes
                             the blocks (`prepare`)
    a pool (link.lender)     only sums, if the blocks lie in few    as before: both ways arrive as the same bytes
                             runs, and sends them where they lie
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress

import torch
from torch import Tensor

from kvrelay.engine.kv.pool import TORCH_DTYPES, KVPool
from kvrelay.engine.kv.writes import WRITTEN, KVWrites
from kvrelay.engine.states import StatesLayout
from kvrelay.transfer.failpoints import failpoint
from kvrelay.transfer.frames.checks import ChecksumKind, FrameCheck, trailer_bytes
from kvrelay.transfer.frames.places import ConvertedFrame, FrameBuffer, NarrowedFrame, PoolFrame, StatesFrame
from kvrelay.transfer.protocol.events import Frame, Outcome
from kvrelay.transfer.protocol.messages import Key, Push
from kvrelay.transfer.protocol.ports import RECEIVER, SENDER, BlockClaim, FrameTask
from kvrelay.transfer.protocol.routes import Route
from kvrelay.transfer.transports.base import ByteStream, Link, Pending, beside

PIECE_BYTES = 2**19
"""Number of bytes that are hashed at once: they are still in the core's cache when they are sent, or were just
received."""


def pieces(runs: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes in the same order, in groups of at most PIECE_BYTES."""
    group: list[memoryview] = []
    size = 0
    for run in runs:
        while len(run):
            part = run[: PIECE_BYTES - size]
            group.append(part)
            size += len(part)
            run = run[len(part) :]
            if size == PIECE_BYTES:
                yield group
                group, size = [], 0
    if group:
        yield group


def announce(key: Key, frame: Frame) -> Push:
    """The message that announces a frame."""
    return Push(
        *key, frame.epoch, frame.index, frame.first, frame.tokens, frame.nbytes, *frame.part, frame.states, frame.track
    )


class FrameJob:
    """Common part of sending and receiving: the end of a frame is reported exactly once."""

    def __init__(
        self,
        key: Key,
        frame: Frame,
        claim: BlockClaim,
        place: FrameBuffer,
        kind: ChecksumKind,
        on_end: Callable[[Outcome], object],
    ) -> None:
        """
        Args:
            claim: lets this job's thread touch the blocks.
            on_end: called once with the outcome; this end doesn't touch the blocks after that.
        """
        self.key = key
        self._frame = frame
        self._claim = claim
        self._place = place
        self._kind = kind
        self._on_end = on_end
        self._open = False

    @property
    def written(self) -> KVWrites:
        """See `kvrelay.transfer.links.links.Job`."""
        return self._claim.written

    def _check(self, link: Link) -> FrameCheck:
        return FrameCheck(self._kind, link.mac_key, self.key, self._frame)

    def _close(self, outcome: Outcome) -> None:
        """Closes the claim: this thread no longer touches the blocks."""
        if self._open:
            self._open = False
            self._on_end(outcome)

    def fail(self, message: str) -> None:
        """See `kvrelay.transfer.links.links.Job`."""
        self._open = self._open or self._claim.close()
        self._close(Outcome.LOST)


class SendJob(FrameJob):
    """Announces a frame and sends it.

    An announced frame is sent even if its request has ended, because the other end has begun to receive it. The blocks
    are needed until they are copied to the link's buffer or, if the link carries memory, until they have been sent.
    """

    def __init__(
        self,
        key: Key,
        frame: Frame,
        claim: BlockClaim,
        place: FrameBuffer,
        kind: ChecksumKind,
        announce: Callable[[Push], None],
        on_read: Callable[[], None],
    ) -> None:
        """`on_read` is called once, when the blocks are no longer needed."""
        super().__init__(key, frame, claim, place, kind, lambda _: on_read())
        self._announce = announce
        self._prepared = False
        """Whether `_ready` queues its work on the thread's second stream."""
        self._lent: list[Tensor] | None = None
        """Memory of the pool that is sent in the buffer's place."""

    def prepare(self, link: Link, buffer: Tensor) -> None:
        queues = self.written.begun and link.stream is None and self._place.queues(buffer, self._check(link))
        if queues and self._claim.enter():
            self._open = self._prepared = True
            with beside():
                self.written.follow()
                self._ready(link, buffer)

    def fail(self, message: str) -> None:
        # The copy needs its blocks and its buffer until it has ended. If the device has failed, the engine reports it.
        if self._prepared:
            with suppress(RuntimeError):
                self._settle()
        self._claim.in_place = False
        super().fail(message)

    def begin(self, link: Link, buffer: Tensor) -> Pending | None:
        if not self._open and not self._claim.enter():
            return None
        self._open = True
        frame, stream, check = self._frame, link.stream, self._check(link)
        failpoint("transfer.read", self.key, index=frame.index)
        runs = self._place.runs() if stream is not None else None
        data = buffer[: frame.nbytes + check.nbytes]
        if runs is None:
            if not self._prepared:
                self._ready(link, buffer)
            self._settle()
            if self._lent is None:
                self._close(Outcome.VERIFIED)
        failpoint("transfer.frame", self.key, index=frame.index)
        self._announce(announce(self.key, frame))
        if link.lender is not None and self._lent is not None:
            return link.lender.send_runs(self._lent)
        if stream is None:
            return link.send(data)

        # Bytes of a stream are sent while they are waited for, so they follow those of earlier frames.
        def send(deadline: float) -> None:
            if runs is None:
                stream.write([memoryview(data.numpy().data)], deadline)
            else:
                self._stream(stream, runs, check, deadline)

        return Pending.in_wait(send)

    def done(self, buffer: Tensor) -> None:
        self._close(Outcome.VERIFIED)

    def _ready(self, link: Link, buffer: Tensor) -> None:
        """Copies the frame to the buffer as it is on the link, or makes ready to send it from where it lies."""
        check = self._check(link)
        data, nbytes = buffer[: self._frame.nbytes + check.nbytes], self._frame.nbytes
        if link.lender is not None:
            self._lent = self._place.lend(link.lender, data, check)
            self._claim.in_place = self._lent is not None
        if self._lent is not None:
            return
        if self._place.queues(data, check):
            self._place.begin_read(data, check)
            return
        self._place.read(data[:nbytes])
        if check.nbytes:
            data[nbytes:] = torch.frombuffer(bytearray(check.of(data[:nbytes])), dtype=torch.uint8)

    def _settle(self) -> None:
        """Waits for the work that `_ready` has queued."""
        with beside() if self._prepared else nullcontext():
            self._place.settle()
        self._prepared = False

    def _stream(self, stream: ByteStream, runs: Sequence[memoryview], check: FrameCheck, deadline: float) -> None:
        tail = self._place.tail()
        if tail is not None:
            rest = torch.empty(tail.nbytes(), dtype=torch.uint8)
            tail.read(rest)
            runs = [*runs, memoryview(rest.numpy().data)]
        running = check.begin()
        for piece in pieces(runs):
            for part in piece:
                running.update(part)
            stream.write(piece, deadline)
        stream.write([memoryview(running.trailer())], deadline)


class ReceiveJob(FrameJob):
    """Receives an announced frame and verifies it; the module's docstring says where the bytes go."""

    def __init__(
        self,
        key: Key,
        frame: Frame,
        claim: BlockClaim,
        place: FrameBuffer,
        kind: ChecksumKind,
        on_end: Callable[[Outcome], None],
    ) -> None:
        super().__init__(key, frame, claim, place, kind, on_end)
        self._checked: FrameCheck | None = None
        """The frame's check on the link of `begin`."""
        self._streamed: Outcome | None = None
        """Outcome of a frame whose bytes went to their blocks as they came."""

    def prepare(self, link: Link, buffer: Tensor) -> None:
        """Never called, because it reads no blocks."""

    def begin(self, link: Link, buffer: Tensor) -> Pending | None:
        # Even if the request has ended meanwhile: the other end sends what it has announced.
        stream, check = link.stream, self._check(link)
        self._checked = check
        if stream is None:
            return link.recv(buffer[: self._frame.nbytes + check.nbytes])
        return Pending.in_wait(lambda deadline: self._stream(stream, buffer, check, deadline))

    def _stream(self, stream: ByteStream, buffer: Tensor, check: FrameCheck, deadline: float) -> None:
        runs = self._place.runs()
        if runs is None or not self._claim.enter():
            stream.read([memoryview(buffer[: self._frame.nbytes + check.nbytes].numpy().data)], deadline)
            return
        self._open = True
        tail = self._place.tail()
        rest = None if tail is None else torch.empty(tail.nbytes(), dtype=torch.uint8)
        if rest is not None:
            runs.append(memoryview(rest.numpy().data))
        running = check.begin()
        for piece in pieces(runs):
            stream.read(piece, deadline)
            for part in piece:
                running.update(part)
        end = memoryview(bytearray(check.nbytes))
        stream.read([end], deadline)
        intact = FrameCheck.same(running.trailer(), bytes(end))
        if intact and tail is not None and rest is not None:
            tail.write(rest)
        self._streamed = Outcome.VERIFIED if intact else Outcome.CORRUPT

    def done(self, buffer: Tensor) -> None:
        failpoint("decode.after_frame", self.key, index=self._frame.index)
        if self._streamed is not None:
            self._close(self._streamed)
            return
        check, nbytes = self._checked, self._frame.nbytes
        if check is None:
            raise RuntimeError(f"{self.key}: frame {self._frame.index} ended before it began")
        if not self._claim.enter():
            return
        self._open = True
        # What isn't intact may be written: nobody reads the reserved blocks before the commit.
        intact = self._place.write_checked(buffer[: nbytes + check.nbytes], check)
        if intact is None:
            data, end = buffer[:nbytes], buffer[nbytes : nbytes + check.nbytes]
            intact = FrameCheck.same(check.of(data), bytes(end.cpu().numpy().data))
            if intact:
                self._place.write(data)
        self._close(Outcome.VERIFIED if intact else Outcome.CORRUPT)


class DrainJob:
    """Receives and discards an announced frame that no attempt takes, so that the frames behind it can arrive."""

    key: Key | None = None
    written: KVWrites = WRITTEN

    def __init__(self, nbytes: int, kind: ChecksumKind) -> None:
        self._nbytes = nbytes
        self._kind = kind

    def begin(self, link: Link, buffer: Tensor) -> Pending | None:
        into, stream = buffer[: self._nbytes + trailer_bytes(self._kind, link.mac_key)], link.stream
        if stream is None:
            return link.recv(into)
        return Pending.in_wait(lambda deadline: stream.read([memoryview(into.numpy().data)], deadline))

    def prepare(self, link: Link, buffer: Tensor) -> None:
        """Never called."""

    def done(self, buffer: Tensor) -> None:
        """Discards the bytes."""

    def fail(self, message: str) -> None:
        """Does nothing, because no attempt waits for the frame."""


class PoolFrames:
    """Makes the jobs of one worker's links: they read frames from its KV pool, or write frames to it."""

    def __init__(self, pools: Sequence[KVPool], checksum: bool) -> None:
        """`pools` are those of the model's tracks, or this rank's parts of them."""
        self._pools = pools
        self._checksum = checksum

    def block_size(self, track: int) -> int:
        """Tokens of a block in this rank's pool of the track."""
        return self._pools[track].layout.block_size

    def _kind(self, route: Route) -> ChecksumKind:
        return ChecksumKind.of(self._checksum, route.on_gpus)

    def _pool(self, route: Route, rank: int) -> KVPool:
        """The part of this rank's pool that goes the route, as its end of this `rank` has it: SENDER or RECEIVER."""
        return self._pools[route.track].slice(*route.places[rank])

    @property
    def _is_cuda(self) -> bool:
        return self._pools[0].bytes.is_cuda

    def send(self, task: FrameTask, announce: Callable[[Push], None], on_read: Callable[[], None]) -> SendJob:
        """See `SendJob`."""
        frame, place = task.frame, FrameBuffer()
        if frame.states:
            place = StatesFrame(task.place)
        else:
            pool, wire = self._pool(task.route, SENDER), task.route.layout
            narrowed = wire != pool.layout
            place = NarrowedFrame(pool, wire, task.place, frame) if narrowed else PoolFrame(pool, task.place, frame)
        return SendJob(task.key, frame, task.claim, place, self._kind(task.route), announce, on_read)

    def receive(self, task: FrameTask, keep: int, on_end: Callable[[Outcome], None]) -> ReceiveJob:
        """See `ReceiveJob`. The first `keep` tokens have their KV here already."""
        frame, place = task.frame, FrameBuffer()
        if frame.states:
            place = StatesFrame([task.place])
        else:
            pool, wire = self._pool(task.route, RECEIVER), task.route.layout
            alike = pool.layout.conversion(wire) is None
            place = PoolFrame(pool, task.place, frame) if alike else ConvertedFrame(pool, wire, task.place, frame, keep)
        return ReceiveJob(task.key, frame, task.claim, place, self._kind(task.route), on_end)

    def make_states(self, layout: StatesLayout, tokens: int) -> Tensor:
        """[tokens, layers, hidden] host memory for the hidden states of so many tokens, uninitialized; pinned if a GPU
        is to read them, so that nobody waits for that.
        """
        shape = tokens, len(layout.layers), layout.hidden_size
        return torch.empty(shape, dtype=TORCH_DTYPES[layout.dtype], pin_memory=self._is_cuda)

    def drain(self, nbytes: int, route: Route) -> DrainJob:
        """See `DrainJob`."""
        return DrainJob(nbytes, self._kind(route))
