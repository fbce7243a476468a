"""Frames of hidden states: they lie in host memory beside the KV pool, at both ends."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.transfer.frames.places import FrameBuffer


class StatesFrame(FrameBuffer):
    """One frame of hidden states."""

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
