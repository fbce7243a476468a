"""The algorithm of `flash_prefill_hopper` as a plain Triton kernel, which the interpreter runs.

It has the same halves of a tile, steps, masks, order of updates and shift of the last step; each program is one of the
consumers. What it doesn't have is what only the hardware has: the ring of buffers, its barriers, and the turns.
"""

import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.paged import LOG2_E, PagedKV


@triton.jit
def _load(pages, table, step, first, lowest, end, planes, plane, d, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """A box of the descriptor: KEYS slots of a page, zeros where they lie outside of it."""
    key = first + step * KEYS
    page = tl.load(table + tl.maximum(key, lowest) // BLOCK_SIZE).to(tl.int64) * planes + plane
    slot = tl.where(key < lowest, -KEYS, key % BLOCK_SIZE - tl.maximum(key + KEYS - end, 0)) + tl.arange(0, KEYS)
    inside = ((slot >= 0) & (slot < BLOCK_SIZE))[:, None] & (d >= 0)[None, :]
    return tl.load(pages + (page * BLOCK_SIZE + slot)[:, None] * d.shape[0] + d[None, :], mask=inside, other=0.0)


@triton.jit
def _mask(s, position, key, start, window, WINDOWED: tl.constexpr):
    n = key + tl.arange(0, s.shape[1])
    seen = (n[None, :] <= position[:, None]) & (n >= start)[None, :]
    if WINDOWED:
        seen = seen & (n[None, :] > position[:, None] - window)
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _weigh(s, largest, weight, scale):
    s = s * scale
    new_largest = tl.maximum(largest, tl.max(s, 1))
    p = tl.exp2(s - new_largest[:, None])
    rescale = tl.exp2(largest - new_largest)
    return p, rescale, new_largest, weight * rescale + tl.sum(p, 1)


@triton.jit
def mirror_kernel(
    query,
    pages,
    planes,
    key_plane,
    block_tables,
    tiles,
    out,
    scale,
    window,
    table_stride,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    program = tl.program_id(0)
    who = tl.program_id(1)
    tile = tiles + (program // HEADS_KV) * 4
    head = program % HEADS_KV
    table = block_tables + tl.load(tile).to(tl.int64) * table_stride
    first_token = tl.load(tile + 1)
    tokens = tl.load(tile + 2)
    before = tl.load(tile + 3)
    end = before + tokens
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(before - window + 1, 0) // KEYS * KEYS
    count = (end - lowest + KEYS - 1) // KEYS
    first = lowest - tl.maximum(2 - count, 0) * KEYS
    count = tl.maximum(count, 2)
    unmasked = tl.maximum(tl.minimum((before + 1 - first) // KEYS, count - 1), 1)
    left = 1
    if WINDOWED:
        seen = (tl.maximum(before + tokens - window - first, 0) + KEYS - 1) // KEYS
        left = tl.maximum(tl.minimum(seen, count - 1), 1)
        unmasked = tl.maximum(unmasked, left)
    key_plane += head

    m = who * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    token = m // GROUP
    offset = ((first_token + token).to(tl.int64) * HEADS_KV + head) * GROUP + m % GROUP
    offset = offset[:, None] * DIM + d[None, :]
    inside = (token < tokens)[:, None] & (d < DIM)[None, :]
    q = tl.load(query + offset, mask=inside, other=0.0)
    position = before + token

    largest = tl.full((ROWS,), -1.0e30, tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, DIM), tl.float32)
    k = _load(pages, table, 0, first, lowest, end, planes, key_plane, d, BLOCK_SIZE, KEYS)
    s = _mask(tl.dot(q, tl.trans(k)), position, first, lowest, window, WINDOWED)
    k = _load(pages, table, 1, first, lowest, end, planes, key_plane, d, BLOCK_SIZE, KEYS)
    s_ahead = tl.dot(q, tl.trans(k))
    p, rescale, largest, weight = _weigh(s, largest, weight, scale)
    s = s_ahead
    for i in range(1, count - 1):
        k = _load(pages, table, i + 1, first, lowest, end, planes, key_plane, d, BLOCK_SIZE, KEYS)
        v = _load(pages, table, i - 1, first, lowest, end, planes, key_plane + HEADS_KV, d, BLOCK_SIZE, KEYS)
        s_ahead = tl.dot(q, tl.trans(k))
        total = tl.dot(p.to(q.dtype), v, total)
        if (i < left) | (i >= unmasked):
            s = _mask(s, position, first + i * KEYS, lowest, window, WINDOWED)
        p, rescale, largest, weight = _weigh(s, largest, weight, scale)
        s = s_ahead
        total = total * rescale[:, None]
    v = _load(pages, table, count - 2, first, lowest, end, planes, key_plane + HEADS_KV, d, BLOCK_SIZE, KEYS)
    total = tl.dot(p.to(q.dtype), v, total)
    start = first + (count - 1) * KEYS
    s = _mask(s, position, tl.minimum(start, end - KEYS), start, window, WINDOWED)
    p, rescale, largest, weight = _weigh(s, largest, weight, scale)
    total = total * rescale[:, None]
    v = _load(pages, table, count - 1, first, lowest, end, planes, key_plane + HEADS_KV, d, BLOCK_SIZE, KEYS)
    total = tl.dot(p.to(q.dtype), v, total) / weight[:, None]
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)


def mirror(query: Tensor, kv: PagedKV, tables: Tensor, tiles: Tensor, rows: int, window: int, out: Tensor) -> None:
    """As `flash_prefill_hopper`, but with tiles of any number of rows, which the hardware has not."""
    _, _, _, kv_heads, block_size, dim = kv.pool.shape
    mirror_kernel[(len(tiles) * kv_heads, 2)](
        query,
        kv.pool,
        kv.pool.stride(0) // (block_size * dim),
        kv.layer * 2 * kv_heads,
        tables,
        tiles,
        out,
        LOG2_E * dim**-0.5,
        window,
        tables.stride(0),
        HEADS_KV=kv_heads,
        GROUP=query.shape[1] // kv_heads,
        DIM=dim,
        BLOCK_SIZE=block_size,
        WINDOWED=window > 0,
        ROWS=rows // 2,
        KEYS=64,
    )
