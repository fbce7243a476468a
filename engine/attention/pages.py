"""The KV pool as rows that torch's index operations take, and the buffers that pages are gathered into."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.kv.pool import KVPool

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """Where one gather puts its pages; both are views of kept buffers."""

    keys: Tensor
    """[pages, page]."""
    values: Tensor


class Pages:
    """One layer's keys, or values, of one block are a page: `block_size * kv_heads * head_dim` numbers in one run.

    Views of the pool are shifted so that a block's index is the same in every layer: a step works out its indices once.

        page(layer, k|v)[block * 2 * layers]                                   = that block's page
        slot(layer, k|v)[block * 2 * layers * block_size + position in block]  = that token's keys or values
    """

    def __init__(self, pool: KVPool) -> None:
        layout = pool.layout
        if layout.order != "NHD":
            raise ValueError(f"KVLayout.order is {layout.order}; attention on CPU takes NHD")
        self.pool = pool
        self.block_size = layout.block_size
        self.kv_heads = layout.kv_heads
        self.head_dim = layout.head_dim
        self.page_stride = 2 * layout.layers
        token = layout.kv_heads * layout.head_dim
        self.page_elements = layout.block_size * token
        pages, slots = pool.tensor.view(-1, self.page_elements), pool.tensor.view(-1, token)
        self._key_pages = [pages[2 * layer :] for layer in range(layout.layers)]
        self._value_pages = [pages[2 * layer + 1 :] for layer in range(layout.layers)]
        self._key_slots = [slots[2 * layer * layout.block_size :] for layer in range(layout.layers)]
        self._value_slots = [slots[(2 * layer + 1) * layout.block_size :] for layer in range(layout.layers)]
        self._buffers = torch.empty(2, 0, self.page_elements, dtype=pool.tensor.dtype)

    def page_indices(self, blocks: Indices) -> Tensor:
        """int64 [N] indices of the pages of `blocks`."""
        return torch.from_numpy(blocks.reshape(-1) * self.page_stride)

    def slot_indices(self, blocks: Indices, positions: Indices) -> Tensor:
        """int64 [T] indices of the slots of tokens at `positions`, each in its block."""
        block_stride = self.page_stride * self.block_size
        return torch.from_numpy(blocks * block_stride + positions % self.block_size)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores keys and values [T, Hkv, D] at `slots`."""
        self._key_slots[layer].index_copy_(0, slots, key.flatten(1))
        self._value_slots[layer].index_copy_(0, slots, value.flatten(1))

    def room(self, pages: int) -> Gathered:
        """Buffers for so many pages, good until the next gather; they grow to the largest ever asked for."""
        if pages > self._buffers.shape[1]:
            self._buffers = torch.empty(2, pages, self.page_elements, dtype=self._buffers.dtype)
        return Gathered(self._buffers[0, :pages], self._buffers[1, :pages])

    def gather(self, layer: int, pages: Tensor, out: Gathered) -> None:
        """Copies the pages at indices `pages` to `out`."""
        torch.index_select(self._key_pages[layer], 0, pages, out=out.keys)
        torch.index_select(self._value_pages[layer], 0, pages, out=out.values)
