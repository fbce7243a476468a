"""Prefill on CPU: rows of several tokens, one by one, in tiles of queries that read only the keys they may see.

keys of the row     | cached | this step's ...                    |
tile 0  (queries)            [a0 ..... b0)     reads keys up to b0
tile 1                              [b0 ..... b1)   up to b1, from b0 - window + 1 on if there is a window
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvrelay.engine.attention.pages import Gathered, Pages
from kvrelay.engine.batch import ForwardBatch

TILE = 64
"""Queries of a tile. Smaller ones skip more of the triangle that isn't seen, larger ones make fewer calls."""


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Some successive queries of a row."""

    first: int
    """Of its queries, among the row's tokens of this step."""
    last: int
    key_first: int
    """Of its keys, among the keys that the row reads."""
    key_last: int
    mask: Tensor | None
    """[queries, keys] to add to the scores; None if the plain triangle is seen."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillRow:
    """One row of several tokens."""

    first: int
    """Of its tokens, among the step's."""
    last: int
    pages: Tensor | None
    """int64 [blocks] of its context; None if all of that is in this step, so that nothing need be gathered."""
    room: Gathered | None
    tiles: tuple[Tile, ...]

    def run(self, pages: Pages, layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """Fills the row's part of `out` [T, H * D] from the step's query [T, H, D], key and value [T, Hkv, D]."""
        if self.pages is None or self.room is None:
            keys, values = key[self.first : self.last], value[self.first : self.last]
        else:
            pages.gather(layer, self.pages, self.room)
            shape = (-1, pages.kv_heads, pages.head_dim)
            keys, values = self.room.keys.view(shape), self.room.values.view(shape)
        group = query.shape[1] // pages.kv_heads
        grouped = (-1, pages.kv_heads, group, pages.head_dim)
        queries = query[self.first : self.last].view(grouped).permute(1, 2, 0, 3)
        result = out[self.first : self.last].view(grouped).permute(1, 2, 0, 3)
        keys = keys.transpose(0, 1)[:, None].expand(-1, group, -1, -1)
        values = values.transpose(0, 1)[:, None].expand(-1, group, -1, -1)
        for tile in self.tiles:
            result[:, :, tile.first : tile.last] = scaled_dot_product_attention(
                queries[:, :, tile.first : tile.last],
                keys[:, :, tile.key_first : tile.key_last],
                values[:, :, tile.key_first : tile.key_last],
                tile.mask,
                is_causal=tile.mask is None,
            )


class Bands:
    """Masks of all tiles, cut out of one matrix per window.

    Query t of a tile whose first query has `before` seen keys ahead of it sees its own key, at column before + t, and
    those in the window before that. In a matrix where `before` is as large as it gets, every tile's mask is a slice.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._bands: dict[int, Tensor] = {}

    def mask(self, window: int, before: int, queries: int) -> Tensor:
        """[queries, before + queries]: 0 where a query sees the key, else minus infinity."""
        band = self._bands.get(window)
        if band is None or band.shape[1] < before + TILE:
            self._bands[window] = band = self._make(window, 1 << (before + TILE).bit_length())
        most = band.shape[1] - TILE
        return band[:queries, most - before : most + queries]

    def _make(self, window: int, columns: int) -> Tensor:
        distance = torch.arange(TILE)[:, None] + (columns - TILE) - torch.arange(columns)
        unseen = distance < 0
        if window:
            unseen |= distance >= window
        return torch.zeros(TILE, columns, dtype=self._dtype).masked_fill_(unseen, -torch.inf)


def plan_prefill(pages: Pages, bands: Bands, batch: ForwardBatch, row: int, window: int) -> PrefillRow:
    """The plan of row `row` of the batch; `window` as in `Traits.windows`."""
    start, length = int(batch.starts[row]), int(batch.lengths[row])
    last = int(batch.last[row]) + 1
    indices = room = None
    offset = 0
    if start:
        block_first = max(0, start - window + 1) // pages.block_size if window else 0
        block_last = (start + length - 1) // pages.block_size
        indices = pages.page_indices(batch.block_tables[row, block_first : block_last + 1])
        room = pages.room(len(indices))
        offset = block_first * pages.block_size
    tiles = []
    for first in range(0, length, TILE):
        queries = min(TILE, length - first)
        position = start + first
        seen_first = max(0, position - window + 1) if window else 0
        plain = position == seen_first and not 0 < window < queries
        mask = None if plain else bands.mask(window, position - seen_first, queries)
        tiles.append(Tile(first, first + queries, seen_first - offset, position + queries - offset, mask))
    return PrefillRow(last - length, last, indices, room, tuple(tiles))
