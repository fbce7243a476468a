"""Rows of several tokens by `flash_prefill`, which attends for tiles of `plan_tiles`."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kvrelay.engine.attention.base import AttentionInputs, to_device
from kvrelay.engine.attention.prefill import PlannedPrefill, Shapes
from kvrelay.engine.config import PrefillKernel
from kvrelay.kernels.triton.flash_prefill import choose_tile, flash_prefill, plan_tiles
from kvrelay.kernels.triton.launch import Repeat
from kvrelay.kernels.triton.paged import PagedKV


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTiles:
    """Implements `PlannedPrefill`."""

    prefill: "TritonPrefill"
    tables: Mapping[int, Tensor]
    """Block tables by window."""
    tiles: Mapping[int, Tensor]
    """Tiles by window; see `plan_tiles`."""

    def launch(self, query: Tensor, kv: PagedKV, window: int, out: Tensor) -> None:
        self.prefill.launch(query, kv, self.tables[window], self.tiles[window], window, out)


class TritonPrefill:
    """Implements `Prefill` for all GPUs, types and sizes."""

    name: PrefillKernel = "triton"

    def __init__(self, shapes: Shapes) -> None:
        layout = shapes.layout
        block_size = 0 if layout.scaled else layout.block_size
        self._shapes = shapes
        self._tile = choose_tile(layout.head_dim, shapes.dtype, block_size, shapes.architecture, shapes.group)
        self._launches: dict[tuple[int, int], Repeat] = {}
        """Launches of an earlier step by window and layer, to be repeated."""
        self._table_stride = 0
        """Stride of the block tables of `_launches`."""

    def plan(self, inputs: AttentionInputs, first: int) -> PlannedPrefill:
        """See `Prefill.plan`."""
        rows, shapes = range(first, len(inputs.lengths)), self._shapes
        tokens = self._tile.rows // shapes.group
        tiles = {
            window: to_device(plan_tiles(inputs.starts, inputs.lengths, tokens, window, rows), shapes.device)
            for window in shapes.windows
        }
        return PlannedTiles(self, {window: inputs.of(window).block_tables for window in shapes.windows}, tiles)

    def launch(self, query: Tensor, kv: PagedKV, tables: Tensor, tiles: Tensor, window: int, out: Tensor) -> None:
        """See `PlannedPrefill.launch`. Checks the arguments of a layer's first call."""
        if self._table_stride != tables.stride(0):
            self._table_stride = tables.stride(0)
            self._launches.clear()
        known = self._launches.get((window, kv.layer))
        if known is not None:
            known((len(tiles) * self._shapes.layout.kv_heads, 1, 1), query, tables, tiles, out)
            return
        made = flash_prefill(query, kv, tables, tiles, self._tile, window, out)
        if made is not None:
            self._launches[window, kv.layer] = made.repeating("query", "block_tables", "tiles", "out")
