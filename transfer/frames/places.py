"""Where a frame's bytes lie at one end of a link: in the blocks of a KV pool, which `FrameBuffer` reads and writes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.transfer.frames.checks import FrameCheck
from kvrelay.transfer.frames.relayout import convert, narrow
from kvrelay.transfer.protocol.events import Frame
from kvrelay.transfer.transports.base import Lender


class FrameBuffer:
    """Where a frame's bytes lie at one end: in the layout of this pool (`PoolFrame`), or another, which the receiver
    converts from (`ConvertedFrame`) or the sender to (`NarrowedFrame`); or beside the pool (`StatesFrame`).

    This class is for frames that go through a buffer, in host memory: they can't be accessed in place, and no GPU
    copies or checks them.
    """

    def runs(self) -> list[memoryview] | None:
        """The whole blocks in place, for links that carry memory; None if the frame can't be accessed like that."""
        return None

    def tail(self) -> "FrameBuffer | None":
        """The part that `runs` leaves out: a partial last block."""
        return None

    def nbytes(self) -> int:
        raise NotImplementedError

    def read(self, out: Tensor) -> None:
        """Copies the frame into the beginning of `out` (uint8)."""
        raise RuntimeError("a received frame can only be written")

    def write(self, data: Tensor) -> None:
        """Copies the frame from the beginning of `data` (uint8) into the blocks."""
        raise RuntimeError("a frame to send can only be read")

    def queues(self, data: Tensor, check: FrameCheck) -> bool:
        """Whether a GPU copies and checks the frame, so that `begin_read` can be used, and `lend` only queues."""
        return False

    def begin_read(self, data: Tensor, check: FrameCheck) -> None:
        """Queues on a GPU a copy of the frame and its trailer into `data`, in one pass; see `settle`."""
        raise RuntimeError("no GPU copies this frame")

    def lend(self, lender: Lender, data: Tensor, check: FrameCheck) -> list[Tensor] | None:
        """Memory to send in order to send the frame from where it lies: runs of the pool, and the end of `data`, into
        which a partial last block and the trailer are copied. None if it lies in too many runs, or can't be sent so.

        If `queues`, it only queues on a GPU; see `settle`.
        """
        return None

    def settle(self) -> None:
        """Waits for what this thread has queued on its current stream."""

    def write_checked(self, data: Tensor, check: FrameCheck) -> bool | None:
        """Copies a frame into the blocks, and verifies the trailer that follows it in `data`, in one pass.

        Returns whether the frame is intact; if it isn't, its bytes are in the blocks all the same. Returns None, and
        does nothing, if this frame can't be copied and verified in one pass.
        """
        return None


class PoolFrame(FrameBuffer):
    """A frame in the blocks of a pool that has the sender's layout."""

    def __init__(self, pool: KVPool, table: Sequence[int], frame: Frame) -> None:
        """`table` is the sequence's block table, from its first token on."""
        self._pool = pool
        self._table = table
        self._frame = frame

    def nbytes(self) -> int:
        return self._frame.nbytes

    def runs(self) -> list[memoryview] | None:
        if self._pool.bytes.device.type != "cpu" or not self._pool.whole_planes:
            return None
        return self._pool.runs(self._table, self._frame.first, self._frame.tokens, self._frame.part)

    def tail(self) -> FrameBuffer | None:
        frame, layout = self._frame, self._pool.layout
        over = frame.tokens % layout.block_size
        if not over:
            return None
        first = frame.first + frame.tokens - over
        rest = replace(frame, first=first, tokens=over, nbytes=layout.nbytes(over, frame.part))
        return PoolFrame(self._pool, self._table, rest)

    def read(self, out: Tensor) -> None:
        self._pool.read(self._table, self._frame.first, self._frame.tokens, out, self._frame.part)

    def write(self, data: Tensor) -> None:
        self._pool.write(self._table, self._frame.first, self._frame.tokens, data, self._frame.part)

    def queues(self, data: Tensor, check: FrameCheck) -> bool:
        return check.on_gpu and self._pool.sums(data)

    def begin_read(self, data: Tensor, check: FrameCheck) -> None:
        frame = self._frame
        total = self._pool.read_summed(self._table, frame.first, frame.tokens, data[: frame.nbytes], frame.part)
        data[frame.nbytes :] = check.of_sum(total)

    def lend(self, lender: Lender, data: Tensor, check: FrameCheck) -> list[Tensor] | None:
        frame, pool, queues = self._frame, self._pool, self.queues(data, check)
        if not pool.whole_planes or not (queues or pool.bytes.device.type == "cpu"):
            return None
        runs = pool.regions(self._table, frame.first, frame.tokens, frame.part)
        if not 0 < len(runs) <= lender.most_runs or not lender.lend(pool.bytes):
            return None
        rest = data[sum(map(len, runs)) :]
        if queues:
            total = pool.sum_in_place(self._table, frame.first, frame.tokens, data[: frame.nbytes], frame.part)
            data[frame.nbytes :] = check.of_sum(total)
        else:
            tail, running = self.tail(), check.begin()
            if tail is not None:
                tail.read(rest)
            for run in (*runs, rest[: len(rest) - check.nbytes]):
                running.update(run.numpy().data)
            if check.nbytes:
                data[frame.nbytes :] = torch.frombuffer(bytearray(running.trailer()), dtype=torch.uint8)
        return [*runs, rest] if len(rest) else runs

    def settle(self) -> None:
        self._pool.settle()

    def write_checked(self, data: Tensor, check: FrameCheck) -> bool | None:
        if not self.queues(data, check):
            return None
        frame = self._frame
        total = self._pool.write_summed(self._table, frame.first, frame.tokens, data[: frame.nbytes], frame.part)
        intact = torch.equal(check.of_sum(total), data[frame.nbytes :])
        self._pool.settle()
        return intact


class OtherFrame(FrameBuffer):
    """Common part of frames whose layout on the link isn't that of this pool: they go through a buffer."""

    def __init__(self, pool: KVPool, wire: KVLayout, table: Sequence[int], frame: Frame) -> None:
        """`wire` is the layout on the link."""
        self._pool = pool
        self._wire = wire
        self._table = table
        self._frame = frame

    def nbytes(self) -> int:
        return self._frame.nbytes


class ConvertedFrame(OtherFrame):
    """A received frame of another layout: it is converted when it is written."""

    def __init__(self, pool: KVPool, wire: KVLayout, table: Sequence[int], frame: Frame, keep: int) -> None:
        """The first `keep` tokens have their KV here already, in blocks that others may share: they stay untouched."""
        super().__init__(pool, wire, table, frame)
        self._keep = keep

    def write(self, data: Tensor) -> None:
        convert(self._pool, self._table, self._wire, self._frame, data, self._keep)


class NarrowedFrame(OtherFrame):
    """A frame for a receiver that keeps KV in 8 bits: it is converted when it is read."""

    def read(self, out: Tensor) -> None:
        narrow(self._pool, self._table, self._wire, self._frame, out)


class StatesFrame(FrameBuffer):
    """A frame of hidden states, which lie in host memory beside the KV pool, at both ends."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """`parts` are the frame's bytes in order: contiguous tensors."""
        self._parts = [part.view(torch.uint8).flatten() for part in parts]

    def nbytes(self) -> int:
        return sum(map(len, self._parts))

    def runs(self) -> list[memoryview]:
        return [memoryview(part.numpy().data) for part in self._parts]

    def read(self, out: Tensor) -> None:
        for part, framed in self._pieces(out):
            framed[:] = part

    def write(self, data: Tensor) -> None:
        for part, framed in self._pieces(data):
            part[:] = framed

    def _pieces(self, data: Tensor) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Each part, and its place in `data`. NumPy copies them in this thread; torch would split them over threads."""
        rest = data.numpy()
        for part in self._parts:
            yield part.numpy(), rest[: len(part)]
            rest = rest[len(part) :]
