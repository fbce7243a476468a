"""A layer of a paged KV pool, as the kernels take it."""

from typing import NamedTuple

import torch
from torch import Tensor

from kvrelay.kernels.checks import check_placed

EIGHT_BIT = (torch.int8, torch.float8_e4m3fn)
"""Types of a pool that has scales."""
DIMS = (16, 256)
"""Least and largest head size that attention takes."""


class PagedKV(NamedTuple):
    """One layer of a paged KV pool."""

    pool: Tensor
    """[block, layer, k|v, Hkv, slot, D]."""
    layer: int
    scales: Tensor | None = None
    """float32 [block, layer, k|v, Hkv, slot]; with a pool of 8 bits."""


def check_attention(query: Tensor, kv: PagedKV, block_tables: Tensor, window: int) -> tuple[int, int]:
    """(Hkv, G) of arguments of attention that fit one another.

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    pool, layer, scales = kv
    if pool.dim() != 6 or pool.shape[2] != 2 or not pool.is_contiguous():
        raise ValueError(f"pool is {list(pool.shape)}; allowed: [block, layer, 2, Hkv, slot, D], contiguous")
    layers, kv_heads, dim = pool.shape[1], pool.shape[3], pool.shape[5]
    if not 0 <= layer < layers:
        raise ValueError(f"layer is {layer}; allowed: 0 to {layers - 1}")
    if pool.device != query.device:
        raise ValueError(f"pool is on {pool.device}; allowed: {query.device}")
    if not query.is_floating_point() or query.dtype.itemsize not in (2, 4):
        raise ValueError(f"query is {query.dtype}; allowed: torch.float16, torch.bfloat16, torch.float32")
    if query.dim() != 3 or query.shape[2] != dim or not query.shape[1] or query.shape[1] % kv_heads:
        raise ValueError(f"query is {list(query.shape)}; allowed: [T, a multiple of {kv_heads}, {dim}]")
    if not query.is_contiguous():
        raise ValueError(f"query has strides {query.stride()}; allowed: contiguous")
    if not DIMS[0] <= dim <= DIMS[1]:
        raise ValueError(f"pool has heads of {dim}; allowed: {DIMS[0]} to {DIMS[1]}")
    eight_bit = pool.dtype in EIGHT_BIT
    if not eight_bit and pool.dtype != query.dtype:
        raise ValueError(f"pool is {pool.dtype}; allowed: {query.dtype}, torch.int8, torch.float8_e4m3fn")
    if eight_bit != (scales is not None):
        raise ValueError(f"scales are {'missing' if eight_bit else 'given'} for a pool of {pool.dtype}")
    if scales is not None:
        check_placed("scales", scales, tuple(pool.shape[:5]), query)
        if scales.dtype != torch.float32:
            raise ValueError(f"scales is {scales.dtype}; allowed: torch.float32")
    if block_tables.dtype != torch.int32 or block_tables.dim() != 2 or block_tables.stride(1) != 1:
        raise ValueError(
            f"block_tables is {block_tables.dtype} {list(block_tables.shape)}; allowed: torch.int32 [R, W]"
        )
    if block_tables.device != query.device:
        raise ValueError(f"block_tables is on {block_tables.device}; allowed: {query.device}")
    if window < 0:
        raise ValueError(f"window is {window}; allowed: 0 (all keys) and more")
    return kv_heads, query.shape[1] // kv_heads
