"""The interface between attention on a GPU and the kernels for rows of several tokens, and the one for every GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.attention.base import AttentionInputs, to_device
from kvrelay.engine.config import PrefillKernel
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.packages import TYPES, Unavailable
from kvrelay.kernels.triton.flash_prefill import choose_tile, flash_prefill, plan_tiles
from kvrelay.kernels.triton.launch import Repeat
from kvrelay.kernels.triton.paged import PagedKV


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes and types of the attention that is to be computed."""

    layout: KVLayout
    """Layout of the KV pool."""
    dtype: torch.dtype
    """Dtype of queries."""
    heads: int
    """Number of query heads."""
    windows: tuple[int, ...]
    """Windows of the layers in tokens, each once; see `Traits`."""
    architecture: int
    """Compute capability of the GPU, times ten."""
    device: torch.device

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.layout.kv_heads

    def __str__(self) -> str:
        layout = self.layout
        return (
            f"{self.dtype} with KV of {layout.dtype}, blocks of {layout.block_size}, heads of {layout.head_dim} in"
            f" groups of {self.group}"
        )


def check_shapes(shapes: Shapes, package: str, dims: range | tuple[int, ...]) -> None:
    """Checks that a package takes numbers of 16 bits in heads of these sizes.

    Raises:
        Unavailable: it doesn't.
    """
    if shapes.dtype not in TYPES or shapes.layout.scaled or shapes.layout.head_dim not in dims:
        raise Unavailable(f"{package} doesn't take {shapes}")


def bounds(counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Bounds [R + 1] of rows of so many: the beginning of each row's part, and the end of all."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


class PlannedPrefill(Protocol):
    """Attention that is planned for a step's rows of several tokens, in every layer."""

    def launch(self, query: Tensor, kv: PagedKV, window: int, out: Tensor) -> None:
        """Writes the result of these rows' tokens into `out`; the other tokens' rows of `out` aren't touched.

        Args:
            query: [T, H, D], of all tokens of the step, and perhaps of more behind them.
            window: of the layer.
            out: [T, H, D].
        """
        ...


class Prefill(Protocol):
    """Attends for rows of several tokens."""

    @property
    def name(self) -> PrefillKernel: ...

    def plan(self, inputs: AttentionInputs, first: int) -> PlannedPrefill:
        """Prepares a step, for its rows from `first` on, of which there is at least one."""
        ...


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
    """Implements `Prefill` for all GPUs, types and sizes, by `flash_prefill` for tiles of `plan_tiles`."""

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
