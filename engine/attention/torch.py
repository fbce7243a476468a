"""Attention on the CPU in plain torch: gathers each row's KV and calls scaled dot-product attention.

For machines and models that the native kernels don't serve. Rows are computed one by one, so a row's result doesn't
depend on the rest of the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvrelay.engine.attention.base import AttentionInputs, HeadNorm, Rotation
from kvrelay.engine.kv.pool import KVPool, planes
from kvrelay.kernels.cpu import ops
from kvrelay.kernels.kv_codes import dequantize, quantize


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Pages and keys that one row reads, the same in every layer with the same window. A page is one layer's keys, or
    values, of one block.
    """

    queries: slice
    """The row's tokens among the step's."""
    pages: Tensor
    """int64 [2 * blocks] pages of layer 0: those of the keys, then those of the values."""
    keys: slice
    """The keys that the row sees, among the tokens of these pages."""
    mask: Tensor | None
    """bool [queries, keys], true where a query sees a key; None if every query sees all keys."""


class TorchAttention:
    """Implements `Attention`."""

    def __init__(self, pool: KVPool, windows: tuple[int, ...]) -> None:
        """
        Args:
            windows: of each layer; see `Traits`.

        Raises:
            ValueError: the pool's order isn't NHD.
        """
        layout = pool.layout
        if layout.order != "NHD":
            raise ValueError(f"KVLayout.order is {layout.order}; attention on CPU takes NHD")
        self._layout = layout
        self._pool = pool
        self._pages = pool.pages
        self._windows = windows
        self._rows: dict[int, list[Row]] = {}
        self._places = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)

    def plan(self, inputs: AttentionInputs) -> None:
        size = self._layout.block_size
        self._places = inputs.slots // size, inputs.slots % size
        self._rows = {window: self._plan_rows(inputs, window) for window in set(self._windows)}

    def run(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        layout = self._layout
        kv_heads, dim = layout.kv_heads, layout.head_dim
        heads = qkv.shape[1] - 2 * kv_heads
        qk, value = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if norm is not None:
            qk = ops.rms_norm(qk, norm.weight, norm.eps)
        query, key = ops.rope(qk, rotation.cos, rotation.sin).split_with_sizes((heads, kv_heads), 1)
        self._write(layer, 0, key)
        self._write(layer, 1, value)
        out = torch.empty_like(query)
        for row in self._rows[self._windows[layer]]:
            pages = self._read(row.pages + 2 * layer).to(query.dtype)
            keys, values = pages.view(2, -1, kv_heads, dim)[:, row.keys].transpose(1, 2)
            # [Hkv, G, tokens, D]. For one token the group takes the place of the tokens: each key is read once.
            grouped = query[row.queries].view(-1, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
            if row.mask is None:
                grouped = grouped.transpose(1, 2)
            group = grouped.shape[1]
            result = scaled_dot_product_attention(
                grouped,
                keys[:, None].expand(-1, group, -1, -1),
                values[:, None].expand(-1, group, -1, -1),
                row.mask,
            )
            if row.mask is None:
                result = result.transpose(1, 2)
            out[row.queries] = result.permute(2, 0, 1, 3).flatten(1, 2)
        return out.flatten(1)

    def _write(self, layer: int, kind: int, numbers: Tensor) -> None:
        """Writes the step's keys (kind 0) or values (1), [T, Hkv, D], into the pool."""
        scales = self._pool.scales
        if scales is not None:
            numbers, scales[:, layer, kind][self._places] = quantize(numbers, self._pool.tensor.dtype)
        self._pool.tensor[:, layer, kind][self._places] = numbers

    def _read(self, pages: Tensor) -> Tensor:
        """Numbers [pages, slot, Hkv, D] of these pages."""
        numbers, scales = planes(self._pages.index_select(0, pages), self._layout)
        return numbers if scales is None else dequantize(numbers, scales)

    def _plan_rows(self, inputs: AttentionInputs, window: int) -> list[Row]:
        size, page_stride = self._layout.block_size, 2 * self._layout.layers
        tables = inputs.block_tables.long()
        rows, end = [], 0
        for table, start, length in zip(tables, inputs.starts.tolist(), inputs.lengths.tolist(), strict=True):
            first, end = end, end + length
            context = start + length
            seen = max(0, start - window + 1) if window else 0
            block = seen // size
            offset = block * size
            pages = table[block : self._layout.blocks_for(context)] * page_stride
            mask = None
            if length > 1:
                distance = torch.arange(start, context)[:, None] - torch.arange(seen, context)
                mask = (distance >= 0) & (distance < window) if window else distance >= 0
            keys = slice(seen - offset, context - offset)
            rows.append(Row(slice(first, end), torch.cat((pages, pages + 1)), keys, mask))
        return rows
