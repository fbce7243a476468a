"""Causal attention of many tokens of each sequence over paged KV, earlier context included.

    s[t, h, j]   = query[t, h] . key[j, h // G] * scale        p - window < j <= p, or all j <= p without a window
    out[t, h]    = sum_j exp(s[t, h, j] - m[t, h]) value[j, h // G] / sum_j exp(s[t, h, j] - m[t, h]),  m = max_j s
    where p is the token's position in its sequence, G = H / Hkv, scale = 1 / sqrt(D), and the block table says where
    keys and values are

    query         [T, H, D] contiguous; D of 16 to 256
    pool, scales  see `PagedKV`: of query's type, or of 8 bits with scales; the KV of these tokens is already in it
    block_tables  int32 [R, W], unit stride within a row
    tiles         int32 [N, 4], see `plan_tiles`: row of the block table, first token, number of tokens, first position
    out           [T, H, D] contiguous

The query rows of all G heads of a KV head form one tile of BLOCK_M rows, that is BLOCK_M // G tokens. So a key is read
once for all of them, and has at least the 64 rows that `wgmma` needs. A tile goes through its keys in three parts: the
left edge of the window (masked), the middle (not masked), the diagonal (masked).

Grid: (N * Hkv,), one program for each tile and KV head. The host sorts tiles by their keys, most first, and the
hardware gives the next program to a free multiprocessor. Limit: arithmetic. `flops` counts it.
Source: Dao: FlashAttention-2, arXiv:2307.08691; Kwon et al.: PagedAttention, arXiv:2309.06180.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvrelay.kernels.triton.checks import check_tensor
from kvrelay.kernels.triton.launch import Launch, launch, shared_bytes
from kvrelay.kernels.triton.paged import LOG2_E, PagedKV, attend_keys, begin_softmax, check_attention, check_scores


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of a program's work, and of its pipeline."""

    rows: int
    """BLOCK_M: query rows, i.e. tokens times query heads of a KV head."""
    keys: int
    """BLOCK_N: keys of one step."""
    warps: int
    stages: int
    """Depth of the pipeline that loads keys and values, in steps."""
    tma: bool = False
    """Whether unmasked steps load a page through the Tensor Memory Accelerator; a page must have a multiple of `keys`
    slots."""


def choose_tile(dim: int, dtype: torch.dtype, block_size: int = 0, architecture: int = 90, group: int = 1) -> Tile:
    """The fastest tile known for heads of size `dim`, which spills no register; benchmarks/NOTES.md has what was tried.

    Args:
        dtype: of the query.
        block_size: slots of a page in a pool of the same type; 0 for a pool of 8 bits.
        architecture: compute capability, times ten.
        group: query heads of a KV head, which all are rows of one tile.
    """
    tile = _choose_tile(dim, dtype, block_size, architecture)
    return replace(tile, rows=max(tile.rows, triton.next_power_of_2(group)))


def _choose_tile(dim: int, dtype: torch.dtype, block_size: int, architecture: int) -> Tile:
    if dtype == torch.float32:
        return Tile(16, 16 if dim > 128 else 32, 4, 2)
    # Numbers of 8 bits are converted in registers, which a larger tile has not.
    converts = dim > 64 and not block_size
    little = shared_bytes(architecture) < 128 * 1024
    if architecture < 90 or little:
        if dim > 128 and little:
            return Tile(64, 16, 8, 3)
        return Tile(64, 32, 8, 3) if dim > 128 or converts else Tile(128, 32, 8, 3)
    # TMA takes rows of whole 16 bytes.
    pages = block_size if dim * dtype.itemsize % 16 == 0 else 0
    if dim <= 64 and pages == 64:
        return Tile(128, 64, 8 if architecture < 100 else 4, 3, tma=True)
    if 64 < dim <= 128 and architecture == 90 and pages >= 64:
        # On an H100 510 TFLOP/s of a prompt of 16,384 tokens, where 128 x 64 and 8 warps have 461.
        return Tile(64, 64, 4, 3, tma=True)
    small = dim > 128 or (converts and architecture >= 100)
    keys = 32 if small else 64 if dim > 64 else 128
    return Tile(128, keys, 8, 3, tma=pages > 0 and pages % keys == 0)


def plan_tiles(
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    tokens: int,
    window: int = 0,
    rows: Sequence[int] | None = None,
) -> NDArray[np.int32]:
    """The tiles of a step, for all layers with the same window.

    Args:
        starts: [R] tokens of each row's sequence that earlier steps computed.
        lengths: [R] tokens of each row in this step; rows follow one another in `query`.
        tokens: of a tile at most: `Tile.rows // G`.
        window: keys that a query sees, itself included; 0 for all.
        rows: the rows to attend for; all of them unless given.

    Returns:
        int32 [N, 4]: row, first token (in `query`), number of tokens, first token's position. Tiles with the most keys
        come first: longest processing time first takes at most 4/3 of the best schedule's time (Graham, 1969).
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
def flash_prefill_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    block_stride,
    scale_block_stride,
    pages,
    key_row,
    block_tables,
    tiles,
    out,
    scale,
    window,
    softcap,
    sinks,
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
    offset = ((first + token).to(tl.int64) * HEADS_KV + head) * GROUP + m % GROUP
    offset = offset[:, None] * DIM + d[None, :]
    inside = (token < tokens)[:, None] & (d < DIM)[None, :]
    q = tl.load(query + offset, mask=inside, other=0.0)
    position = before + token

    head_offset = head * BLOCK_SIZE
    keys += head_offset * DIM
    values += head_offset * DIM
    if key_scales is not None:
        key_scales += head_offset
        value_scales += head_offset
    pointers = (keys, values, key_scales, value_scales, block_stride, scale_block_stride)
    descriptors = (pages, pages, None, None, block_stride // DIM, 0)
    head_row = key_row + head_offset
    rows = (head_row, head_row + HEADS_KV * BLOCK_SIZE)

    state = begin_softmax(sinks, head * GROUP + m % GROUP, m >= 0, BLOCK_M, BLOCK_D)
    end = before + tokens
    unmasked_end = (before + 1) // BLOCK_N * BLOCK_N
    left, unmasked = 0, 0
    oldest = None
    if WINDOWED:
        oldest = tl.maximum(before - window + 1, 0)
        left = tl.maximum(before - window + 1, 0) // BLOCK_N * BLOCK_N
        unmasked = tl.minimum((tl.maximum(end - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N, unmasked_end)
    edges = (left, unmasked, unmasked_end, end)
    for part in tl.static_range(0 if WINDOWED else 1, 3):
        state = attend_keys(
            state,
            q,
            scale,
            descriptors if TMA and part == 1 else pointers,
            rows,
            table,
            edges[part],
            edges[part + 1],
            oldest,
            position,
            window,
            softcap,
            MASKED=part != 1,
            WINDOWED=WINDOWED,
            TMA=TMA and part == 1,
            DIM=DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            STAGES=1 if TMA and part == 2 else STAGES,
        )
    total, _, weight = state
    total = total / weight[:, None]
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)


def flash_prefill(
    query: Tensor,
    kv: PagedKV,
    block_tables: Tensor,
    tiles: Tensor,
    tile: Tile,
    window: int,
    out: Tensor,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Launch | None:
    """Writes the attention of the tokens in `tiles` into `out`; the other tokens' rows of `out` aren't touched.

    Args:
        query: [T, H, D].
        block_tables: int32 [R, W] on the device.
        tiles: what `plan_tiles` gave for `tile.rows // G` tokens and this window, on the device.
        window: keys that a query sees, itself included; 0 for all.
        out: [T, H, D].
        softcap: c of c tanh(score / c); 0 for none.
        sinks: float32 [H] scores that take a share of each query's attention for nothing, or None.

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    kv_heads, group, block_size, dim = check_attention(query, kv, block_tables, window, out)
    check_scores(query, softcap, sinks)
    check_tensor("tiles", tiles, (len(tiles), 4), query, torch.int32)
    if tile.rows < group:
        raise ValueError(f"tile.rows is {tile.rows}; allowed: {group}, the query heads of a KV head, and more")
    if tile.tma and (kv.scales is not None or block_size % tile.keys):
        raise ValueError(
            f"tile.tma with pages of {block_size} slots of {kv.pool.dtype}; allowed: multiples of {tile.keys}"
        )
    if not len(tiles):
        return None
    block_d = max(16, triton.next_power_of_2(dim))
    pages: Any = TensorDescriptor.from_tensor(kv.pool.view(-1, dim), [tile.keys, block_d]) if tile.tma else None
    return launch(
        flash_prefill_kernel,
        (len(tiles) * kv_heads,),
        query,
        *kv.arguments(),
        pages,
        kv.of_layer()["key_row"],
        block_tables,
        tiles,
        out,
        LOG2_E * dim**-0.5,
        window,
        LOG2_E * softcap if softcap else None,
        sinks,
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
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
