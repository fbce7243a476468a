"""Causal attention of many tokens a sequence over paged KV, earlier context included.

    s[t, h, j]   = query[t, h] . key[j, h // G] * scale        p - window < j <= p, or all j <= p without a window
    out[t, h]    = sum_j exp(s[t, h, j] - m[t, h]) value[j, h // G] / sum_j exp(s[t, h, j] - m[t, h]),  m = max_j s
    where p is the token's position in its sequence, G = H / Hkv, and keys and values are found through the block table

    query         [T, H, D] contiguous; D of 16 to 256
    pool, scales  as `PagedKV` has them: of query's type, or of 8 bits with scales; the tokens' own KV is in it
    block_tables  int32 [R, W], unit stride within a row
    tiles         int32 [N, 4], see `plan_tiles`: row of the block table, first token, number of tokens, first position
    out           [T, H, D] contiguous

Query rows of all G heads of a KV head make one tile of BLOCK_M rows: BLOCK_M // G tokens, so that a key is read once
for all of them, and at least 64 rows meet it, as `wgmma` wants. A tile runs through its keys in three parts: the
window's left edge (masked), the middle (not masked), the diagonal (masked). The block ids of a step come from the step
before: loading them where they are used would cost half of the pipeline's depth. The softmax is online, in base 2 and
float32.

Grid: (N * Hkv,), a KV head and a tile; the host sorts tiles so that the longest start first, and the hardware hands the
next one to whichever multiprocessor is free. Limit: arithmetic. `flops` counts it.
Source: Dao: FlashAttention-2, arXiv:2307.08691; Kwon et al.: PagedAttention, arXiv:2309.06180.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvrelay.kernels.checks import check_placed, check_tensor
from kvrelay.kernels.paged import PagedKV, check_attention

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of a program's work, and of its pipeline."""

    rows: int
    """BLOCK_M: query rows, i.e. tokens times heads of a group."""
    keys: int
    """BLOCK_N: keys of one step."""
    warps: int
    stages: int
    """Steps whose keys and values are on their way."""
    tma: bool = False
    """Whether unmasked steps read a page through the bulk copy engine; pages must be of a multiple of `keys` slots."""


def choose_tile(
    dim: int, dtype: torch.dtype, block_size: int = 0, architecture: int = 90, rows: Literal[64, 128] = 128
) -> Tile:
    """The tile for heads of `dim` numbers: the largest that spills no register; benchmarks/NOTES.md has what was tried.

    Args:
        dtype: of the query.
        block_size: slots of a page whose numbers are of that type too; 0 for those of 8 bits.
        architecture: compute capability, ten times.
        rows: query rows wanted; fewer make more programs of a short prompt.
    """
    if dtype == torch.float32:
        return Tile(16, 16 if dim > 128 else 32, 4, 2)
    if architecture < 90:
        return Tile(64, 32, 8, 3) if dim > 128 else Tile(rows, 32, rows // 16, 3)
    keys = 32 if dim > 128 else 64 if dim > 64 else 128
    return Tile(rows, keys, rows // 16, 3, tma=block_size > 0 and block_size % keys == 0)


def plan_tiles(
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    tokens: int,
    window: int = 0,
    rows: Sequence[int] | None = None,
) -> NDArray[np.int32]:
    """The work list of a step: once a step for all layers with the same window.

    Args:
        starts: [R] tokens of each row's sequence that were computed before.
        lengths: [R] tokens of each row in this step, all of them one after another in `query`.
        tokens: of a tile at most: `Tile.rows // G`.
        window: keys that a query sees, itself included; 0 for all.
        rows: the rows to attend for; all of them unless given.

    Returns:
        int32 [N, 4]: row, first token (in `query`), number of tokens, first token's position. Those with the most keys
        come first: longest processing time first is at most 4/3 of the best schedule (Graham, 1969).
    """
    firsts = np.cumsum(lengths) - lengths
    chosen = np.arange(len(lengths)) if rows is None else np.asarray(rows, np.int64)
    counts = -(-lengths[chosen] // tokens)
    row = np.repeat(chosen, counts)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    size = np.minimum(lengths[row] - offset, tokens)
    position = starts[row] + offset
    keys = np.minimum(position, window - 1) + size if window else position + size
    order = np.argsort(-keys, kind="stable")
    return np.stack((row, firsts[row] + offset, size, position), 1)[order].astype(np.int32)


def flops(starts: Sequence[int], lengths: Sequence[int], heads: int, dim: int, window: int = 0) -> int:
    """Floating-point operations that must be done: 4 D for each pair of a query and a key that it sees."""
    pairs = 0
    for start, length in zip(starts, lengths, strict=True):
        seen = start + 1 + np.arange(length, dtype=np.int64)
        pairs += int((np.minimum(seen, window) if window else seen).sum())
    return 4 * dim * heads * pairs


@triton.jit
def _attend(
    total,
    most,
    weight,
    q,
    position,
    begin,
    end,
    table,
    keys,
    values,
    key_scales,
    value_scales,
    key_row,
    value_row,
    block_stride,
    scale_block_stride,
    scale,
    window,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    TMA: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Takes keys [begin, end) into the running softmax of a tile; `begin` is a multiple of BLOCK_N."""
    # Whole steps lie in one page: one id a step. Else an id for each key.
    ONE_PAGE: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    if ONE_PAGE:
        blocks = tl.load(table + begin // BLOCK_SIZE, mask=begin < end, other=0)
    else:
        blocks = tl.load(table + (begin + n) // BLOCK_SIZE, mask=begin + n < end, other=0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key = start + n
        slot = key % BLOCK_SIZE
        if TMA:
            row = blocks * block_stride + start % BLOCK_SIZE
            k = keys.load([row + key_row, 0])
            v = values.load([row + value_row, 0])
        else:
            place = blocks.to(tl.int64) * block_stride + slot * DIM
            place = place[:, None] + d[None, :]
            # Slots that nobody has written yet may hold anything, and 0 times NaN is NaN.
            if MASKED:
                inside = (key < end)[:, None] & (d < DIM)[None, :]
                k = tl.load(keys + place, mask=inside, other=0.0)
                v = tl.load(values + place, mask=inside, other=0.0)
            elif DIM == BLOCK_D:
                k = tl.load(keys + place)
                v = tl.load(values + place)
            else:
                inside = (d < DIM)[None, :] & (n >= 0)[:, None]
                k = tl.load(keys + place, mask=inside, other=0.0)
                v = tl.load(values + place, mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale
        if key_scales is not None:
            scale_place = blocks.to(tl.int64) * scale_block_stride + slot
            s *= tl.load(key_scales + scale_place, mask=key < end, other=0.0)[None, :]
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if WINDOWED:
                seen &= key[None, :] > position[:, None] - window
            s = tl.where(seen, s, float("-inf"))
        ahead = start + BLOCK_N
        new_most = tl.maximum(most, tl.max(s, 1))
        p = tl.exp2(s - new_most[:, None])
        fade = tl.exp2(most - new_most)
        weight = weight * fade + tl.sum(p, 1)
        total = total * fade[:, None]
        if value_scales is not None:
            scale_place = blocks.to(tl.int64) * scale_block_stride + slot
            p *= tl.load(value_scales + scale_place, mask=key < end, other=0.0)[None, :]
        total = tl.dot(p.to(q.dtype), v.to(q.dtype), total, input_precision=PRECISION)
        most = new_most
        if ONE_PAGE:
            blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        else:
            blocks = tl.load(table + (ahead + n) // BLOCK_SIZE, mask=ahead + n < end, other=0)
    return total, most, weight


@triton.jit
def flash_prefill_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    pages,
    key_row,
    value_row,
    page_rows,
    block_tables,
    tiles,
    out,
    scale,
    window,
    block_stride,
    scale_block_stride,
    table_stride,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    tile = tiles + (program // HEADS_KV) * 4
    head = program % HEADS_KV
    row = tl.load(tile)
    first = tl.load(tile + 1)
    tokens = tl.load(tile + 2)
    before = tl.load(tile + 3)
    table = block_tables + row.to(tl.int64) * table_stride

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = m // GROUP
    place = ((first + token).to(tl.int64) * HEADS_KV + head) * GROUP + m % GROUP
    place = place[:, None] * DIM + d[None, :]
    inside = (token < tokens)[:, None] & (d < DIM)[None, :]
    q = tl.load(query + place, mask=inside, other=0.0)
    position = before + token

    within = head * BLOCK_SIZE
    keys += within * DIM
    values += within * DIM
    if key_scales is not None:
        key_scales += within
        value_scales += within

    # Finite, so that a row which sees nothing of a step stays 0 and is no NaN.
    most = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    end = before + tokens
    whole_end = (before + 1) // BLOCK_N * BLOCK_N
    begin = 0
    if WINDOWED:
        left = tl.maximum(before - window + 1, 0) // BLOCK_N * BLOCK_N
        begin = tl.minimum((tl.maximum(end - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N, whole_end)
        total, most, weight = _attend(
            total,
            most,
            weight,
            q,
            position,
            left,
            begin,
            table,
            keys,
            values,
            key_scales,
            value_scales,
            0,
            0,
            block_stride,
            scale_block_stride,
            scale,
            window,
            MASKED=True,
            WINDOWED=True,
            TMA=False,
            DIM=DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            BLOCK_D=BLOCK_D,
            PRECISION=PRECISION,
            STAGES=STAGES,
        )
    total, most, weight = _attend(
        total,
        most,
        weight,
        q,
        position,
        begin,
        whole_end,
        table,
        pages if TMA else keys,
        pages if TMA else values,
        key_scales,
        value_scales,
        key_row + within,
        value_row + within,
        page_rows if TMA else block_stride,
        scale_block_stride,
        scale,
        window,
        MASKED=False,
        WINDOWED=WINDOWED,
        TMA=TMA,
        DIM=DIM,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_N=BLOCK_N,
        BLOCK_D=BLOCK_D,
        PRECISION=PRECISION,
        STAGES=STAGES,
    )
    total, most, weight = _attend(
        total,
        most,
        weight,
        q,
        position,
        whole_end,
        end,
        table,
        keys,
        values,
        key_scales,
        value_scales,
        0,
        0,
        block_stride,
        scale_block_stride,
        scale,
        window,
        MASKED=True,
        WINDOWED=WINDOWED,
        TMA=False,
        DIM=DIM,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_N=BLOCK_N,
        BLOCK_D=BLOCK_D,
        PRECISION=PRECISION,
        STAGES=1 if TMA else STAGES,
    )
    total = total / weight[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def flash_prefill(
    query: Tensor,
    kv: PagedKV,
    block_tables: Tensor,
    tiles: Tensor,
    tile: Tile,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of the tokens in `tiles`, [T, H, D]; other tokens' places in `out` keep what they hold.

    The scale of the scores is 1 / sqrt(D).

    Args:
        query: [T, H, D].
        block_tables: int32 [R, W] on the device.
        tiles: what `plan_tiles` gave for `tile.rows // G` tokens, on the device.
        window: keys that a query sees, itself included; 0 for all. The one that `tiles` was planned with.

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    pool, layer, scales = kv
    kv_heads, group = check_attention(query, kv, block_tables, window)
    block_size, dim = pool.shape[4:]
    if tiles.dim() != 2 or tiles.dtype != torch.int32:
        raise ValueError(f"tiles is {tiles.dtype} {list(tiles.shape)}; allowed: torch.int32 [N, 4]")
    check_placed("tiles", tiles, (len(tiles), 4), query)
    if tile.rows < group:
        raise ValueError(f"tile.rows is {tile.rows}; allowed: {group}, the query heads of a KV head, and more")
    if tile.tma and (scales is not None or block_size % tile.keys):
        raise ValueError(
            f"tile.tma with pages of {block_size} slots of {pool.dtype}; allowed: multiples of {tile.keys}"
        )
    if out is None:
        out = torch.empty_like(query)
    else:
        check_tensor("out", out, tuple(query.shape), query)
    if not len(tiles):
        return out
    block_d = max(16, triton.next_power_of_2(dim))
    page_rows = pool.shape[1] * 2 * kv_heads * block_size
    key_row = layer * 2 * kv_heads * block_size
    pages: Any = None
    if tile.tma:
        pages = TensorDescriptor.from_tensor(pool.view(-1, dim), [tile.keys, block_d])
    flash_prefill_kernel[(len(tiles) * kv_heads,)](
        query,
        pool[:, layer, 0],
        pool[:, layer, 1],
        None if scales is None else scales[:, layer, 0],
        None if scales is None else scales[:, layer, 1],
        pages,
        key_row,
        key_row + kv_heads * block_size,
        page_rows,
        block_tables,
        tiles,
        out,
        LOG2_E * dim**-0.5,
        window,
        pool.stride(0),
        0 if scales is None else scales.stride(0),
        block_tables.stride(0),
        HEADS_KV=kv_heads,
        GROUP=group,
        DIM=dim,
        BLOCK_SIZE=block_size,
        WINDOWED=window > 0,
        TMA=tile.tma,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        BLOCK_D=block_d,
        PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out
