"""Frames of hidden states: they lie in host memory beside the KV pool, at both ends."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.transfer.frames.checks import FrameCheck
from kvrelay.transfer.transports.base import Lender


class StatesFrame:
    """One frame; implements `kvrelay.transfer.frames.places.FrameBuffer`."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """`parts` are the frame's bytes in order: contiguous tensors."""
        self._parts = [part.view(torch.uint8).flatten() for part in parts]

    def nbytes(self) -> int:
        return sum(map(len, self._parts))

    def runs(self) -> list[memoryview]:
        return [memoryview(part.numpy().data) for part in self._parts]

    def tail(self) -> None:
        """`runs` leaves nothing out."""

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

    def queues(self, data: Tensor, check: FrameCheck) -> bool:
        return False

    def begin_read(self, data: Tensor, check: FrameCheck) -> None:
        raise RuntimeError("no GPU copies what lies in host memory")

    def lend(self, lender: Lender, data: Tensor, check: FrameCheck) -> None:
        """Returns None, because the frame doesn't lie in the pool that is lent."""

    def settle(self) -> None:
        """Does nothing, because nothing was queued."""

    def write_checked(self, data: Tensor, check: FrameCheck) -> None:
        """Returns None: the caller writes the frame and checks it apart."""
