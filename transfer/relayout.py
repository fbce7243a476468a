"""KV of one layout written into a pool of another: block size, dtype and NHD/HND may differ.

The sender ships what lies in its pool, and the receiver converts. Frames begin and end at the sender's block borders,
so one may fill a part of a block here; what is said of blocks in `kvrelay.transfer.frames` holds for these too.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import TORCH_DTYPES
from kvrelay.transfer.events import Frame
from kvrelay.transfer.frames import FrameBuffer, KVBytes


class ConvertedFrame:
    """A frame of the sender's layout in the blocks of a pool of another."""

    def __init__(self, pool: KVBytes, theirs: KVLayout, table: Sequence[int], frame: Frame, keep: int) -> None:
        """The first `keep` tokens have their KV here already, in blocks that others may share: it stays as it is."""
        self._pool = pool
        self._theirs = theirs
        self._table = table
        self._frame = frame
        self._keep = keep

    def nbytes(self) -> int:
        return self._frame.nbytes

    def runs(self) -> list[memoryview] | None:
        return None

    def tail(self) -> FrameBuffer | None:
        return None

    def read(self, out: Tensor) -> None:
        raise NotImplementedError("nothing is sent in another worker's layout")

    def write(self, data: Tensor) -> None:
        """Values are those of torch's `.to()`. The rest of the last token's block becomes zero."""
        frame, size = self._frame, self._pool.layout.block_size
        mine = _by_slot(self._pool.tensor[:, frame.layer : frame.layer + frame.layers], self._pool.layout)
        table = torch.tensor(self._table, device=mine.device)
        first, end = frame.first, frame.first + frame.tokens
        if end <= self._keep:
            return
        if end % size:
            mine[int(table[end // size]), end % size :] = 0
        for values in _by_token(self._theirs, frame, data[: frame.nbytes]):
            skip = min(len(values), max(0, self._keep - first))
            at = torch.arange(first + skip, first + len(values), device=mine.device)
            mine[table[at // size], at % size] = values[skip:].to(mine.device, mine.dtype)
            first += len(values)


def _by_slot(blocks: Tensor, layout: KVLayout) -> Tensor:
    """View [block, slot, layer, k|v, head, dim] of `blocks` [block, layer, k|v, *inner]."""
    return blocks.permute((0, 3, 1, 2, 4, 5) if layout.order == "NHD" else (0, 4, 1, 2, 3, 5))


def _by_token(layout: KVLayout, frame: Frame, data: Tensor) -> Iterator[Tensor]:
    """The frame's values, [token, layer, k|v, head, dim]: of its whole blocks, then of a partial last one."""
    heads, dim, size = layout.kv_heads, layout.head_dim, layout.block_size
    numbers = data.view(TORCH_DTYPES[layout.dtype])
    for slots, blocks in ((size, frame.tokens // size), (frame.tokens % size, 1)):
        count = slots * blocks * frame.layers * 2 * heads * dim
        if count:
            inner = (slots, heads, dim) if layout.order == "NHD" else (heads, slots, dim)
            part = numbers[:count].view(blocks, frame.layers, 2, *inner)
            yield _by_slot(part, layout).reshape(blocks * slots, frame.layers, 2, heads, dim)
            numbers = numbers[count:]
