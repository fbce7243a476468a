"""Decode on CPU: rows of one token each, batched with others whose contexts are about as long.

The queries that share a KV head stand in for the sequence dimension, so that torch's attention reads each key once:

    query [B, Hkv, G, D]    keys, values [B, Hkv, N, D]    out [B, Hkv, G, D]        H = Hkv * G
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvrelay.engine.attention.pages import Gathered, Indices, Pages
from kvrelay.engine.batch import ForwardBatch

GROUP_BYTES = 8 * 2**20
"""Keys and values that a group of several rows gathers at most: they should stay in the CPU's cache."""
ALIKE_BLOCKS = 8
"""Contexts of up to so many blocks go together, whatever their lengths."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGroup:
    """B rows, their contexts padded to N tokens."""

    tokens: Tensor | None
    """int64 [B] their places among the step's tokens; None if they are all of them."""
    pages: Tensor
    """int64 [B * blocks]."""
    room: Gathered
    keys: Tensor
    """[B, Hkv, N, D], a view of `room`."""
    values: Tensor
    mask: Tensor | None
    """[B, 1, 1, N] to add to the scores; None if all is seen."""

    def run(self, pages: Pages, layer: int, query: Tensor, out: Tensor) -> None:
        """Fills the group's rows of `out` [T, H * D] from `query` [T, H, D]."""
        if self.tokens is not None:
            query = query.index_select(0, self.tokens)
        pages.gather(layer, self.pages, self.room)
        rows, kv_heads, _, dim = self.keys.shape
        grouped = query.view(rows, kv_heads, -1, dim)
        result = scaled_dot_product_attention(grouped, self.keys, self.values, self.mask).view(rows, -1)
        if self.tokens is not None:
            out.index_copy_(0, self.tokens, result)
        else:
            out.copy_(result)


def plan_decode(pages: Pages, batch: ForwardBatch, rows: Indices, window: int) -> list[DecodeGroup]:
    """Groups for the rows `rows` of the batch, which have one token each; `window` as in `Traits.windows`."""
    contexts = batch.starts[rows] + 1
    seen_first = np.maximum(contexts - window, 0) if window else np.zeros_like(contexts)
    block_first, block_last = seen_first // pages.block_size, (contexts - 1) // pages.block_size
    groups = []
    for members in _alike(block_last - block_first + 1, pages):
        row, first, last = rows[members], block_first[members], block_last[members]
        width = int((last - first).max()) + 1
        # Beyond its last block a row repeats it: what it reads there is masked, and must be its own.
        blocks = np.minimum(first[:, None] + np.arange(width), last[:, None])
        offset = first * pages.block_size
        groups.append(
            _group(
                pages,
                None if len(row) == len(batch.row_of) else batch.last[row],
                batch.block_tables[row[:, None], blocks],
                seen_first[members] - offset,
                contexts[members] - offset,
            )
        )
    return groups


def _group(pages: Pages, tokens: Indices | None, blocks: Indices, first: Indices, last: Indices) -> DecodeGroup:
    """The group that gathers `blocks` [B, W] and sees tokens `first` to `last` - 1 [B] of them."""
    room = pages.room(blocks.size)
    begin, end = int(first.min()), int(last.max())
    shape = (len(blocks), -1, pages.kv_heads, pages.head_dim)
    mask = None
    if (first != begin).any() or (last != end).any():
        places = np.arange(begin, end)
        unseen = (places < first[:, None]) | (places >= last[:, None])
        mask = torch.zeros(unseen.shape, dtype=room.keys.dtype).masked_fill_(torch.from_numpy(unseen), -torch.inf)
        mask = mask[:, None, None]
    return DecodeGroup(
        tokens=None if tokens is None else torch.from_numpy(tokens),
        pages=pages.page_indices(blocks),
        room=room,
        keys=room.keys.view(shape)[:, begin:end].transpose(1, 2),
        values=room.values.view(shape)[:, begin:end].transpose(1, 2),
        mask=mask,
    )


def _alike(blocks: Indices, pages: Pages) -> Iterator[Indices]:
    """Splits rows that read `blocks` [R] blocks each into groups that waste at most about half of what they gather."""
    order = np.argsort(-blocks, kind="stable")
    most = GROUP_BYTES // (2 * pages.page_elements * pages.pool.tensor.element_size())
    begin = 0
    for index, row in enumerate(order):
        longest = int(blocks[order[begin]])
        uneven = longest > ALIKE_BLOCKS and 2 * int(blocks[row]) < longest
        if index > begin and (uneven or (index - begin + 1) * longest > most):
            yield np.sort(order[begin:index])
            begin = index
    if len(order):
        yield np.sort(order[begin:])
