"""Attention of one new token a sequence over paged KV, with long contexts split over programs.

    s[r, h, j]  = query[r, h] . key[j, h // G] * scale     context - window <= j < context, or all j without a window
    out[r, h]   = sum_j exp(s[r, h, j] - m[r, h]) value[j, h // G] / sum_j exp(s[r, h, j] - m[r, h]),  m = max_j s

    query         [R, H, D] contiguous; D of 16 to 256
    pool, scales  as `PagedKV` has them: of query's type, or of 8 bits with scales; the new token's own KV is in it
    block_tables  int32 [R, W], unit stride within a row
    contexts      int32 [R] tokens of each sequence, the new one included; 0 for a row that isn't there
    splits        see `DecodeSplits`
    out           [R, H, D] contiguous; 0 where the context is 0

All G query heads of a KV head are in one program, padded to the 16 rows that a matrix instruction has, so that KV is
read once. Split i of a row has the keys [begin + i * span, begin + (i + 1) * span); a program whose split is empty ends
at once. The grid, and with it a captured CUDA graph, depends on R and on the number of splits only: lengths and span
are read from device memory. Each split leaves its part of the sum and the logarithm of its weight; a second kernel adds
up the parts. The block ids of a step come from the step before, as in flash_prefill.

Grid: (Hkv, R, splits); then (H, R). Limit: memory. `bytes_moved` counts it.
Source: Dao et al.: Flash-Decoding, 2023; Kwon et al.: PagedAttention, arXiv:2309.06180.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.checks import check_placed, check_tensor
from kvrelay.kernels.paged import PagedKV, check_attention

LOG2_E = 1.4426950408889634
STEP = 64
"""Keys of a step; spans are multiples of it."""
MIN_SPAN = 256
"""Keys of a split at least: below, starting it costs more than it saves."""
MAX_SPLITS = 64
WAVES = 2
"""Programs a multiprocessor is to have, so that one's loads hide the other's arithmetic."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeSplits:
    """How rows are split, and where splits leave their parts; one for each graph and window."""

    span: Tensor
    """int32 [1]: keys of a split. `splits_span` gives it; written before each step."""
    parts: Tensor
    """float32 [R, H, splits, D]."""
    weights: Tensor
    """float32 [R, H, splits]: the binary logarithm of each part's weight."""

    @classmethod
    def empty(cls, rows: int, heads: int, dim: int, count: int, device: torch.device) -> "DecodeSplits":
        """Room for `count` splits of each of so many rows."""
        # One split writes its result itself.
        shape = (rows, heads, count) if count > 1 else (0, heads, count)
        return cls(
            torch.full((1,), MIN_SPAN, dtype=torch.int32, device=device),
            torch.empty(*shape, dim, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )

    @property
    def count(self) -> int:
        """Splits that a row may have."""
        return self.weights.shape[2]


def count_splits(rows: int, kv_heads: int, processors: int, longest: int) -> int:
    """Splits that a row may have: a power of two, from values that a graph is captured for.

    Enough for one row alone to fill the device, for lengths may be skewed; no more than there are spans in `longest`.

    Args:
        rows: of the batch, at most.
        processors: multiprocessors of the device.
        longest: context that a row may have; 0 keys or more.
    """
    fill = -(-WAVES * processors // kv_heads)
    # Empty splits still start and end: at most 16 for each program that the device has room for.
    cap = max(1, 16 * WAVES * processors // (rows * kv_heads))
    most = max(1, min(fill, cap, -(-longest // MIN_SPAN), MAX_SPLITS))
    return 1 << (most - 1).bit_length() if most < MAX_SPLITS else MAX_SPLITS


def splits_span(contexts: Sequence[int], kv_heads: int, processors: int, count: int, window: int = 0) -> int:
    """Keys of a split, so that a step's work makes about `WAVES` programs a multiprocessor, as even as can be.

    Args:
        contexts: [R] on the host.
        count: of splits; `count` times the span covers the longest row.
    """
    lengths = [min(context, window) if window else context for context in contexts]
    even = -(-sum(lengths) * kv_heads // (WAVES * processors))
    wanted = max(MIN_SPAN, even, -(-max(lengths, default=0) // count))
    return -(-wanted // STEP) * STEP


def bytes_moved(
    contexts: Sequence[int],
    heads: int,
    kv_heads: int,
    dim: int,
    element_size: int,
    kv_element_size: int,
    window: int = 0,
) -> int:
    """Bytes that must move: the KV that is seen, with scales if of 8 bits, queries in and results out."""
    seen = sum(min(context, window) if window else context for context in contexts)
    kv = 2 * kv_heads * (dim * kv_element_size + (4 if kv_element_size == 1 else 0))
    return seen * kv + 2 * len(contexts) * heads * dim * element_size


@triton.jit
def paged_decode_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    block_tables,
    contexts,
    span,
    parts,
    weights,
    out,
    scale,
    window,
    block_stride,
    scale_block_stride,
    table_stride,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    head, split = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1).to(tl.int64)
    context = tl.load(contexts + row)
    first = 0
    if window > 0:
        first = tl.maximum(context - window, 0)
    # Steps begin at a multiple of BLOCK_N, so that pages aren't cut.
    origin = first // BLOCK_N * BLOCK_N
    if SPLITS == 1:
        begin = origin
        end = context
    else:
        keys_of_split = tl.load(span)
        begin = origin + split * keys_of_split
        end = tl.minimum(begin + keys_of_split, context)
        if split == SPLITS - 1:
            end = context
        if begin >= end:
            return
    # Whole steps lie in one page: one id a step. Else an id for each key.
    ONE_PAGE: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    table = block_tables + row * table_stride
    within = head * BLOCK_SIZE
    keys += within * DIM
    values += within * DIM

    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    query_head = row * tl.num_programs(0) * GROUP + head * GROUP + m
    place = query_head[:, None] * DIM + d[None, :]
    inside = (m < GROUP)[:, None] & (d < DIM)[None, :]
    q = tl.load(query + place, mask=inside, other=0.0)

    most = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if ONE_PAGE:
        blocks = tl.load(table + begin // BLOCK_SIZE, mask=begin < end, other=0)
    else:
        blocks = tl.load(table + (begin + n) // BLOCK_SIZE, mask=begin + n < end, other=0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key = start + n
        seen = (key >= first) & (key < end)
        slot = key % BLOCK_SIZE
        block_place = (blocks.to(tl.int64) * block_stride + slot * DIM)[:, None] + d[None, :]
        loaded = seen[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + block_place, mask=loaded, other=0.0)
        v = tl.load(values + block_place, mask=loaded, other=0.0)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale
        if key_scales is not None:
            scale_place = blocks.to(tl.int64) * scale_block_stride + within + slot
            s *= tl.load(key_scales + scale_place, mask=seen, other=0.0)[None, :]
        s = tl.where(seen[None, :], s, float("-inf"))
        new_most = tl.maximum(most, tl.max(s, 1))
        p = tl.exp2(s - new_most[:, None])
        fade = tl.exp2(most - new_most)
        weight = weight * fade + tl.sum(p, 1)
        total = total * fade[:, None]
        if value_scales is not None:
            scale_place = blocks.to(tl.int64) * scale_block_stride + within + slot
            p *= tl.load(value_scales + scale_place, mask=seen, other=0.0)[None, :]
        total = tl.dot(p.to(q.dtype), v.to(q.dtype), total, input_precision=PRECISION)
        most = new_most
        ahead = start + BLOCK_N
        if ONE_PAGE:
            blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        else:
            blocks = tl.load(table + (ahead + n) // BLOCK_SIZE, mask=ahead + n < end, other=0)

    total = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
    else:
        part = query_head * SPLITS + split
        tl.store(parts + part[:, None] * DIM + d[None, :], total, mask=inside)
        tl.store(weights + part, most + tl.log2(weight), mask=m < GROUP)


@triton.jit
def combine_splits_kernel(
    contexts,
    span,
    parts,
    weights,
    out,
    window,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    context = tl.load(contexts + row)
    origin = 0
    if window > 0:
        origin = tl.maximum(context - window, 0) // BLOCK_N * BLOCK_N
    keys_of_split = tl.load(span)
    used = tl.minimum((context - origin + keys_of_split - 1) // keys_of_split, SPLITS)
    head = row * tl.num_programs(0) + tl.program_id(0)
    split = tl.arange(0, SPLITS)
    every = tl.load(weights + head * SPLITS + split, mask=split < used, other=-1.0e30)
    most = tl.max(every, 0)
    weight = tl.sum(tl.where(split < used, tl.exp2(every - most), 0.0), 0)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, used, BLOCK_S):
        some = start + tl.arange(0, BLOCK_S)
        share = tl.load(weights + head * SPLITS + some, mask=some < used, other=-1.0e30)
        place = (head * SPLITS + some)[:, None] * DIM + d[None, :]
        part = tl.load(parts + place, mask=(some < used)[:, None] & (d < DIM)[None, :], other=0.0)
        total += tl.sum(part * tl.exp2(share - most)[:, None], 0)
    total = total / tl.where(weight > 0.0, weight, 1.0)
    tl.store(out + head * DIM + d, total.to(out.dtype.element_ty), mask=d < DIM)


def paged_decode(
    query: Tensor,
    kv: PagedKV,
    block_tables: Tensor,
    contexts: Tensor,
    splits: DecodeSplits,
    window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one token of each row, [R, H, D]. Two kernels, or one if there is one split.

    The scale of the scores is 1 / sqrt(D).

    Args:
        query: [R, H, D].
        block_tables: int32 [R, W] on the device.
        contexts: int32 [R] on the device.
        splits: with room for R rows or more; no other launch may use it meanwhile.
        window: keys that a query sees, itself included; 0 for all.

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    pool, layer, scales = kv
    kv_heads, group = check_attention(query, kv, block_tables, window)
    block_size, dim = pool.shape[4:]
    rows, heads = query.shape[:2]
    if len(block_tables) != rows:
        raise ValueError(f"block_tables is {list(block_tables.shape)}; allowed: [{rows}, W]")
    check_placed("contexts", contexts, (rows,), query)
    if contexts.dtype != torch.int32:
        raise ValueError(f"contexts is {contexts.dtype}; allowed: torch.int32")
    count = splits.count
    if not 1 <= count <= MAX_SPLITS or count & (count - 1):
        raise ValueError(f"splits are {count}; allowed: powers of two up to {MAX_SPLITS}")
    if count > 1 and (splits.parts.shape[0] < rows or splits.parts.shape[1:] != (heads, count, dim)):
        raise ValueError(
            f"splits.parts is {list(splits.parts.shape)}; allowed: [{rows} or more, {heads}, {count}, {dim}]"
        )
    if splits.weights.shape[1] != heads or (count > 1 and len(splits.weights) < rows):
        raise ValueError(f"splits.weights is {list(splits.weights.shape)}; allowed: [{rows} or more, {heads}, {count}]")
    if splits.parts.device != query.device:
        raise ValueError(f"splits is on {splits.parts.device}; allowed: {query.device}")
    if out is None:
        out = torch.empty_like(query)
    else:
        check_tensor("out", out, tuple(query.shape), query)
    if not rows:
        return out
    block_d = max(16, triton.next_power_of_2(dim))
    # Of 32 bits, half as many are as many registers.
    step = STEP if query.dtype.itemsize == 2 else STEP // 2
    paged_decode_kernel[(kv_heads, rows, count)](
        query,
        pool[:, layer, 0],
        pool[:, layer, 1],
        None if scales is None else scales[:, layer, 0],
        None if scales is None else scales[:, layer, 1],
        block_tables,
        contexts,
        splits.span,
        splits.parts,
        splits.weights,
        out,
        LOG2_E * dim**-0.5,
        window,
        pool.stride(0),
        0 if scales is None else scales.stride(0),
        block_tables.stride(0),
        SPLITS=count,
        GROUP=group,
        DIM=dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=step,
        BLOCK_D=block_d,
        PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
        STAGES=_stages(step * block_d * pool.dtype.itemsize),
        num_warps=4,
    )
    if count > 1:
        combine_splits_kernel[(heads, rows)](
            contexts,
            splits.span,
            splits.parts,
            splits.weights,
            out,
            window,
            SPLITS=count,
            DIM=dim,
            BLOCK_N=step,
            BLOCK_D=block_d,
            BLOCK_S=min(8, count),
            num_warps=2,
        )
    return out


def _stages(step_bytes: int) -> int:
    """Stages that make 2 to 4 buffers of a step's keys and values, of 96 KiB at most: two programs are to find room."""
    return 1 + max(2, min(4, 96 * 1024 // (2 * step_bytes)))
