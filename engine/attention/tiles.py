"""Rows of several tokens by kvrelay's own kernels, which attend for tiles of `plan_tiles`."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.engine.attention.base import AttentionInputs, to_device
from kvrelay.engine.attention.prefill import PlannedPrefill, Prefill, Shapes, Unavailable
from kvrelay.engine.config import PrefillKernel
from kvrelay.kernels.triton.flash_prefill import choose_tile, flash_prefill, plan_tiles
from kvrelay.kernels.triton.launch import Launch, Repeat
from kvrelay.kernels.triton.paged import PagedKV

Kernel = Callable[[Tensor, PagedKV, Tensor, Tensor, int, Tensor], Launch | None]
"""Takes query, KV, block tables, tiles, window and out, as `flash_prefill` has them."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTiles:
    """Implements `PlannedPrefill`."""

    prefill: "TilePrefill"
    tables: Tensor
    tiles: Mapping[int, Tensor]
    """By window, see `plan_tiles`."""

    def launch(self, query: Tensor, kv: PagedKV, window: int, out: Tensor) -> None:
        self.prefill.launch(query, kv, self.tables, self.tiles[window], window, out)


class TilePrefill:
    """Implements `Prefill` by a kernel that attends for tiles of `plan_tiles`."""

    def __init__(self, name: PrefillKernel, shapes: Shapes, rows: int, kernel: Kernel) -> None:
        """
        Args:
            rows: query rows of a tile: tokens times query heads of a KV head.
        """
        self.name: PrefillKernel = name
        self._shapes, self._kernel = shapes, kernel
        self.tile_tokens = rows // shapes.group
        self._launches: dict[int, Repeat] = {}
        """By layer, what was launched in an earlier step, to be repeated."""
        self._table_stride = 0
        """Of the block tables of `_launches`."""

    def plan(self, inputs: AttentionInputs, first: int) -> PlannedPrefill:
        rows, shapes = range(first, len(inputs.lengths)), self._shapes
        tiles = {
            window: to_device(plan_tiles(inputs.starts, inputs.lengths, self.tile_tokens, window, rows), shapes.device)
            for window in shapes.windows
        }
        return PlannedTiles(self, inputs.block_tables, tiles)

    def launch(self, query: Tensor, kv: PagedKV, tables: Tensor, tiles: Tensor, window: int, out: Tensor) -> None:
        """See `PlannedPrefill.launch`. Checks the arguments of a layer's first call."""
        if self._table_stride != tables.stride(0):
            self._table_stride = tables.stride(0)
            self._launches.clear()
        known = self._launches.get(kv.layer)
        if known is not None:
            known((len(tiles) * self._shapes.layout.kv_heads, 1, 1), query, tables, tiles, out)
            return
        made = self._kernel(query, kv, tables, tiles, window, out)
        if made is not None:
            self._launches[kv.layer] = made.repeating("query", "block_tables", "tiles", "out")


def triton_prefill(shapes: Shapes) -> Prefill:
    """`flash_prefill`, which takes all GPUs, types and sizes."""
    layout = shapes.layout
    block_size = 0 if layout.scaled else layout.block_size
    tile = choose_tile(layout.head_dim, shapes.dtype, block_size, shapes.architecture, shapes.group)

    def kernel(query: Tensor, kv: PagedKV, tables: Tensor, tiles: Tensor, window: int, out: Tensor) -> Launch | None:
        return flash_prefill(query, kv, tables, tiles, tile, window, out)

    return TilePrefill("triton", shapes, tile.rows, kernel)


def gluon_prefill(shapes: Shapes) -> Prefill:
    """The kernel in Gluon for the GPU.

    Raises:
        Unavailable: there is none for these shapes.
    """
    generation = {9: "hopper", 10: "blackwell"}.get(shapes.architecture // 10)
    if generation is None:
        raise Unavailable(f"the GPU is of architecture {shapes.architecture}, and gluon is for 90 and 100")
    try:
        module = importlib.import_module(f"kvrelay.kernels.flash_prefill_{generation}")
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"Triton hasn't what it needs ({error})") from error
    layout = shapes.layout
    kv_dtype = torch.int8 if layout.scaled else shapes.dtype
    if not module.PREFILL.takes(shapes.dtype, kv_dtype, shapes.group, layout.block_size, layout.head_dim):
        raise Unavailable(f"gluon doesn't take {shapes}")
    return TilePrefill("gluon", shapes, module.PREFILL.rows, getattr(module, f"flash_prefill_{generation}"))
