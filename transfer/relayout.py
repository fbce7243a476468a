"""KV of one layout written into a pool of another: block size, dtype and NHD/HND may differ.

The sender ships what is in its pool, and the receiver converts. Frames begin and end at the sender's block borders, so
a frame may fill only a part of a block here.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import TORCH_DTYPES, KVPool
from kvrelay.transfer.events import Frame


def convert(pool: KVPool, table: Sequence[int], theirs: KVLayout, frame: Frame, data: Tensor, keep: int) -> None:
    """Writes the frame in `data` (uint8, layout `theirs`) into the blocks `table` of `pool`.

    Values are those of torch's `.to()`. The slots of the last token's block behind that token become zero. The first
    `keep` tokens have their KV here already, in blocks that others may share: they stay untouched.
    """
    size = pool.layout.block_size
    layers = frame.part.layers(theirs.layers)
    mine = _by_slot(pool.tensor[:, layers.start : layers.stop], pool.layout)
    blocks = torch.tensor(table, device=mine.device)
    first, end = frame.first, frame.first + frame.tokens
    if end <= keep:
        return
    if end % size:
        mine[int(blocks[end // size]), end % size :] = 0
    for values in _by_token(theirs, frame, len(layers), data[: frame.nbytes]):
        skip = min(len(values), max(0, keep - first))
        at = torch.arange(first + skip, first + len(values), device=mine.device)
        mine[blocks[at // size], at % size] = values[skip:].to(mine.device, mine.dtype)
        first += len(values)
    # On a GPU the copies are only queued, while the engine reads on another stream and `data` is overwritten.
    pool.settle()


def _by_slot(blocks: Tensor, layout: KVLayout) -> Tensor:
    """View [block, slot, layer, k|v, head, dim] of `blocks` [block, layer, k|v, *inner]."""
    return blocks.permute((0, 3, 1, 2, 4, 5) if layout.order == "NHD" else (0, 4, 1, 2, 3, 5))


def _by_token(layout: KVLayout, frame: Frame, layers: int, data: Tensor) -> Iterator[Tensor]:
    """The values as [token, layer, k|v, head, dim]: first of the whole blocks, then of a partial last one."""
    heads, dim, size = layout.kv_heads, layout.head_dim, layout.block_size
    numbers = data.view(TORCH_DTYPES[layout.dtype])
    for slots, blocks in ((size, frame.tokens // size), (frame.tokens % size, 1)):
        count = slots * blocks * layers * 2 * heads * dim
        if count:
            inner = (slots, heads, dim) if layout.order == "NHD" else (heads, slots, dim)
            part = numbers[:count].view(blocks, layers, 2, *inner)
            yield _by_slot(part, layout).reshape(blocks * slots, layers, 2, heads, dim)
            numbers = numbers[count:]
