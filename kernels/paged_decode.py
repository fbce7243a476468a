"""Attention of one new token of each sequence over paged KV, with long contexts split over several programs.

    s[r, h, j]  = query[r, h] . key[j, h // G] * scale     context - window <= j < context, or all j without a window
    out[r, h]   = sum_j exp(s[r, h, j] - m[r, h]) value[j, h // G] / sum_j exp(s[r, h, j] - m[r, h]),  m = max_j s
    where G = H / Hkv, scale = 1 / sqrt(D), and the block table says where keys and values are

    query         [R, H, D] contiguous; D of 16 to 256
    pool, scales  see `PagedKV`: of query's type, or of 8 bits with scales; the new token's own KV is already in it
    block_tables  int32 [R, W], unit stride within a row
    contexts      int32 [R] tokens of each sequence, the new one included; 0 for an unused row
    splits        see `DecodeSplits`
    out           [R, H, D] contiguous; 0 where the context is 0

One program serves all G query heads of a KV head, padded to the 16 rows of a matrix instruction, so that KV is read
once. Split i of a row has the keys [begin + i * span, begin + (i + 1) * span); a program with an empty split ends at
once. The grid, and with it a captured CUDA graph, depends only on R and on the number of splits: contexts and span are
read from device memory. Each split writes its weighted sum and the logarithm of its weight; a second kernel combines
them.

Grid: (Hkv, R, splits); then (H, R). Limit: memory. `bytes_moved` counts it.
Source: Dao et al.: Flash-Decoding, 2023; Kwon et al.: PagedAttention, arXiv:2309.06180.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.checks import check_tensor
from kvrelay.kernels.paged import LOG2_E, PagedKV, attend_keys, check_attention

STEP = 64
"""Keys of a step; spans are multiples of it."""
MIN_SPAN = 256
"""Fewest keys of a split: a smaller one costs more to start than it saves."""
MAX_SPLITS = 64
WAVES = 2
"""Programs wanted for each multiprocessor, so that the loads of one hide behind the arithmetic of the other."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeSplits:
    """How rows are split, and the workspace of the splits' results; one for each graph and window."""

    span: Tensor
    """int32 [1]: keys of a split, from `splits_span`; written before each step."""
    parts: Tensor
    """float32 [R, H, splits, D]: each split's weighted sum of values."""
    weights: Tensor
    """float32 [R, H, splits]: the binary logarithm of each split's weight."""

    @classmethod
    def empty(cls, rows: int, heads: int, dim: int, count: int, device: torch.device) -> "DecodeSplits":
        """The workspace for `count` splits of each of `rows` rows."""
        # A row's only split writes to `out` instead.
        shape = (rows, heads, count) if count > 1 else (0, heads, count)
        return cls(
            torch.full((1,), MIN_SPAN, dtype=torch.int32, device=device),
            torch.empty(*shape, dim, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )

    @property
    def count(self) -> int:
        """Splits of a row at most."""
        return self.weights.shape[2]


def count_splits(rows: int, kv_heads: int, processors: int, longest: int) -> int:
    """Splits of a row at most: a power of two that depends only on what a graph is captured for.

    A single row must be able to fill the device, because lengths may be very unequal; more splits than there are spans
    in `longest` would be useless.

    Args:
        rows: of the batch, at most.
        processors: multiprocessors of the device.
        longest: context that a row may have, 0 or more tokens.
    """
    fill = -(-WAVES * processors // kv_heads)
    # Empty splits still start and end: at most 16 for each program that the device can run at once.
    cap = max(1, 16 * WAVES * processors // (rows * kv_heads))
    most = max(1, min(fill, cap, -(-longest // MIN_SPAN), MAX_SPLITS))
    return 1 << (most - 1).bit_length() if most < MAX_SPLITS else MAX_SPLITS


def splits_span(contexts: Sequence[int], kv_heads: int, processors: int, count: int, window: int = 0) -> int:
    """Keys of a split with which a step makes about `WAVES` programs a multiprocessor, of nearly equal length.

    Args:
        contexts: [R] on the host.
        count: splits of a row at most; `count` times the span covers the longest row.
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
    kv = 2 * kv_heads * (dim * kv_element_size + (2 if kv_element_size == 1 else 0))
    return seen * kv + 2 * len(contexts) * heads * dim * element_size


@triton.jit
def paged_decode_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    block_stride,
    scale_block_stride,
    block_tables,
    contexts,
    span,
    parts,
    weights,
    out,
    scale,
    window,
    table_stride,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    head, split = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1).to(tl.int64)
    context = tl.load(contexts + row)
    first = 0
    if window > 0:
        first = tl.maximum(context - window, 0)
    # Steps begin at a multiple of BLOCK_N, so that none crosses the end of a page.
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
    head_offset = head * BLOCK_SIZE
    keys += head_offset * DIM
    values += head_offset * DIM
    if key_scales is not None:
        key_scales += head_offset
        value_scales += head_offset

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query_head = row * tl.num_programs(0) * GROUP + head * GROUP + m
    offset = query_head[:, None] * DIM + d[None, :]
    inside = (m < GROUP)[:, None] & (d < DIM)[None, :]
    q = tl.load(query + offset, mask=inside, other=0.0)
    state = (
        tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
        tl.full((BLOCK_M,), -1.0e30, tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
    )
    total, largest, weight = attend_keys(
        state,
        q,
        scale,
        (keys, values, key_scales, value_scales, block_stride, scale_block_stride),
        None,
        block_tables + row * table_stride,
        begin,
        end,
        first,
        None,
        window,
        MASKED=True,
        WINDOWED=False,
        TMA=False,
        DIM=DIM,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_N=BLOCK_N,
        STAGES=STAGES,
    )
    total = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)
    else:
        part = query_head * SPLITS + split
        tl.store(parts + part[:, None] * DIM + d[None, :], total, mask=inside)
        tl.store(weights + part, largest + tl.log2(weight), mask=m < GROUP)


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
    logarithms = tl.load(weights + head * SPLITS + split, mask=split < used, other=-1.0e30)
    largest = tl.max(logarithms, 0)
    weight = tl.sum(tl.where(split < used, tl.exp2(logarithms - largest), 0.0), 0)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, used, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        logarithm = tl.load(weights + head * SPLITS + split, mask=split < used, other=-1.0e30)
        offset = (head * SPLITS + split)[:, None] * DIM + d[None, :]
        part = tl.load(parts + offset, mask=(split < used)[:, None] & (d < DIM)[None, :], other=0.0)
        total += tl.sum(part * tl.exp2(logarithm - largest)[:, None], 0)
    total = total / tl.where(weight > 0.0, weight, 1.0)
    tl.store(out + head * DIM + d, total.to(out.dtype.element_ty), mask=d < DIM)


def paged_decode(
    query: Tensor,
    kv: PagedKV,
    block_tables: Tensor,
    contexts: Tensor,
    splits: DecodeSplits,
    window: int,
    out: Tensor,
) -> None:
    """Writes the attention of one token of each row into `out`. Two kernels, or one if rows aren't split.

    Args:
        query: [R, H, D].
        block_tables: int32 [R, W] on the device.
        contexts: int32 [R] on the device.
        splits: for R rows or more; no other launch may use it at the same time.
        window: keys that a query sees, itself included; 0 for all.
        out: [R, H, D].

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    kv_heads, group, block_size, dim = check_attention(query, kv, block_tables, window, out)
    rows, heads = query.shape[:2]
    if len(block_tables) != rows:
        raise ValueError(f"block_tables is {list(block_tables.shape)}; allowed: [{rows}, W]")
    check_tensor("contexts", contexts, (rows,), query, torch.int32)
    count = splits.count
    if not 1 <= count <= MAX_SPLITS or count & (count - 1):
        raise ValueError(f"splits are {count}; allowed: powers of two up to {MAX_SPLITS}")
    needed = rows if count > 1 else 0
    for name, part, shape in (
        ("parts", splits.parts, (heads, count, dim)),
        ("weights", splits.weights, (heads, count)),
    ):
        check_tensor(f"splits.{name}", part, (max(needed, len(part)), *shape), query, torch.float32)
    if not rows:
        return
    block_d = max(16, triton.next_power_of_2(dim))
    # 32-bit values take twice the registers.
    step = STEP if query.dtype.itemsize == 2 else STEP // 2
    paged_decode_kernel[(kv_heads, rows, count)](
        query,
        *kv.arguments(),
        block_tables,
        contexts,
        splits.span,
        splits.parts,
        splits.weights,
        out,
        LOG2_E * dim**-0.5,
        window,
        block_tables.stride(0),
        SPLITS=count,
        GROUP=group,
        DIM=dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=step,
        BLOCK_D=block_d,
        STAGES=_stages(step * block_d * kv.pool.dtype.itemsize),
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


def _stages(step_bytes: int) -> int:
    """2 to 4 buffers of a step's keys and values, in at most 96 KiB: two programs must fit on a multiprocessor."""
    return 1 + max(2, min(4, 96 * 1024 // (2 * step_bytes)))
