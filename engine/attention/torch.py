"""Attention on the CPU in plain torch: gathers each row's KV and calls scaled dot-product attention.

For machines and models that the native kernels don't serve. Rows are computed one by one, so a row's result doesn't
depend on the rest of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvrelay.engine.attention.base import AttentionInputs, HeadNorm, LayerKV, Rotation
from kvrelay.engine.kv.pool import planes
from kvrelay.kernels.cpu import ops
from kvrelay.kernels.kv_codes import dequantize, quantize


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Blocks and keys that one row reads, the same in every layer with the same window."""

    queries: slice
    """The row's tokens among the step's."""
    blocks: Tensor
    """int64 [blocks] blocks of the pool, the first of which has the first key that the row sees."""
    keys: slice
    """The keys that the row sees, among the tokens of these blocks."""
    mask: Tensor | None
    """bool [queries, keys], true where a query sees a key; None if every query sees all keys."""


class TorchAttention:
    """Implements `Attention`."""

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        """
        Raises:
            ValueError: a pool's order isn't NHD.
        """
        for pool, _, _ in layers:
            if pool.layout.order != "NHD":
                raise ValueError(f"KVLayout.order is {pool.layout.order}; attention on CPU takes NHD")
        self._layers = tuple(layers)
        self._block_size = layers[0].pool.layout.block_size
        self._steps: dict[int, tuple[list[Row], tuple[Tensor, Tensor]]] = {}
        """Rows, and block and slot of each token, by window."""

    def plan(self, inputs: AttentionInputs) -> None:
        size = self._block_size
        self._steps = {}
        for window in {layer.window for layer in self._layers}:
            slots = inputs.of(window).slots
            self._steps[window] = self._plan_rows(inputs, window), (slots // size, slots % size)

    def run(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        own = self._layers[layer]
        kv_heads, dim = own.pool.layout.kv_heads, own.pool.layout.head_dim
        heads = qkv.shape[1] - 2 * kv_heads
        qk, value = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if norm is not None:
            qk = ops.rms_norm(qk, norm.weight, norm.eps)
        query, key = ops.rope(qk, rotation.cos, rotation.sin).split_with_sizes((heads, kv_heads), 1)
        rows, places = self._steps[own.window]
        _write(own, 0, places, key)
        _write(own, 1, places, value)
        out = torch.empty_like(query)
        for row in rows:
            pages = _read(own, row.blocks).to(query.dtype)
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

    def _plan_rows(self, inputs: AttentionInputs, window: int) -> list[Row]:
        size = self._block_size
        tables = inputs.of(window).block_tables.long()
        rows, end = [], 0
        for table, start, length in zip(tables, inputs.starts.tolist(), inputs.lengths.tolist(), strict=True):
            first, end = end, end + length
            context = start + length
            seen = max(0, start - window + 1) if window else 0
            block = seen // size
            offset = block * size
            mask = None
            if length > 1:
                distance = torch.arange(start, context)[:, None] - torch.arange(seen, context)
                mask = (distance >= 0) & (distance < window) if window else distance >= 0
            keys = slice(seen - offset, context - offset)
            rows.append(Row(slice(first, end), table[block : -(-context // size)], keys, mask))
        return rows


def _write(own: LayerKV, kind: int, places: tuple[Tensor, Tensor], numbers: Tensor) -> None:
    """Writes the step's keys (kind 0) or values (1), [T, Hkv, D], into a layer's pool.

    Args:
        places: int64 [T] block, and slot in it, of each token.
    """
    pool, layer, _ = own
    if pool.scales is not None:
        numbers, pool.scales[:, layer, kind][places] = quantize(numbers, pool.tensor.dtype)
    pool.tensor[:, layer, kind][places] = numbers


def _read(own: LayerKV, blocks: Tensor) -> Tensor:
    """A layer's keys and then values in these blocks, [2 * blocks, slot, Hkv, D]."""
    layout = own.pool.layout
    # A page is one layer's keys, or values, of one block.
    pages = 2 * (blocks * layout.layers + own.layer)
    numbers, scales = planes(own.pool.pages.index_select(0, torch.cat((pages, pages + 1))), layout)
    return numbers if scales is None else dequantize(numbers, scales)
