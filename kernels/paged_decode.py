"""Attention of one new token of each sequence over paged KV, with the keys of all rows in equal shares for programs.

    s[r, h, j]  = query[r, h] . key[j, h // G] * scale     context - window <= j < context, or all j without a window
    out[r, h]   = sum_j exp(s[r, h, j] - m[r, h]) value[j, h // G] / sum_j exp(s[r, h, j] - m[r, h]),  m = max_j s
    where G = H / Hkv, scale = 1 / sqrt(D), and the block table says where keys and values are

    query         [R, H, D] contiguous; D of 16 to 256
    pool, scales  see `PagedKV`: of query's type, or of 8 bits with scales; the new token's own KV is already in it
    block_tables  int32 [R, W], unit stride within a row
    work          which program attends to which keys, contexts and window included: see `DecodeWork`
    parts         see `DecodeParts`
    out           [R, H, D] contiguous; 0 where the context is 0

One program serves all G query heads of a KV head, padded to the 16 rows of a matrix instruction, so that KV is read
once. It goes through its entries of the work list one after the other, and writes the result of each one: to `out` if
the entry has all keys of a row, else as a part of it, with the logarithm of the part's weight. A second kernel adds up
the parts of each row that was cut. The grid, and with it a captured CUDA graph, depends on the device only: what there
is to do is read from device memory.

Grid: (Hkv, P); then (H, P - 1). Limit: memory. `bytes_moved` counts it.
Source: Dao et al.: Flash-Decoding, 2023; Kwon et al.: PagedAttention, arXiv:2309.06180; Ye et al.: FlashInfer,
arXiv:2501.01005, which plans its work on the host likewise.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.checks import check_tensor
from kvrelay.kernels.decode_work import STEP, DecodeParts, DecodeWork
from kvrelay.kernels.launch import Launch, launch
from kvrelay.kernels.paged import LOG2_E, PagedKV, attend_keys, check_attention

SUMMED = 32
"""Parts of a row that are added up at a time."""


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
    entries,
    starts,
    sums,
    weights,
    out,
    scale,
    table_stride,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    head, program = tl.program_id(0), tl.program_id(1)
    head_offset = head * BLOCK_SIZE
    keys += head_offset * DIM
    values += head_offset * DIM
    if key_scales is not None:
        key_scales += head_offset
        value_scales += head_offset
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (m < GROUP)[:, None] & (d < DIM)[None, :]
    heads = tl.num_programs(0) * GROUP
    for index in range(tl.load(starts + program), tl.load(starts + program + 1)):
        entry = entries + index * 4
        row, first = tl.load(entry).to(tl.int64), tl.load(entry + 1)
        end, part = tl.load(entry + 2), tl.load(entry + 3).to(tl.int64)
        query_head = head * GROUP + m
        offset = (row * heads + query_head)[:, None] * DIM + d[None, :]
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
            # Steps begin at a multiple of BLOCK_N, so that none crosses the end of a page.
            first // BLOCK_N * BLOCK_N,
            end,
            first,
            None,
            0,
            MASKED=True,
            WINDOWED=False,
            TMA=False,
            DIM=DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            STAGES=STAGES,
        )
        total = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
        if part < 0:
            tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)
        else:
            part_head = part * heads + query_head
            tl.store(sums + part_head[:, None] * DIM + d[None, :], total, mask=inside)
            tl.store(weights + part_head, largest + tl.log2(weight), mask=m < GROUP)


@triton.jit
def sum_parts_kernel(
    cuts,
    sums,
    weights,
    out,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SUMMED: tl.constexpr,
):
    cut = cuts + tl.program_id(1) * 3
    row, first, count = tl.load(cut).to(tl.int64), tl.load(cut + 1).to(tl.int64), tl.load(cut + 2)
    if count == 0:
        return
    head, heads = tl.program_id(0), tl.num_programs(0)
    every = tl.arange(0, BLOCK_P)
    logarithms = tl.load(weights + (first + every) * heads + head, mask=every < count, other=float("-inf"))
    largest = tl.max(logarithms, 0)
    weight = tl.sum(tl.exp2(logarithms - largest), 0)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, count, SUMMED):
        some = start + tl.arange(0, SUMMED)
        part_head = (first + some) * heads + head
        logarithm = tl.load(weights + part_head, mask=some < count, other=float("-inf"))
        inside = (some < count)[:, None] & (d < DIM)[None, :]
        each = tl.load(sums + part_head[:, None] * DIM + d[None, :], mask=inside, other=0.0)
        total += tl.sum(each * tl.exp2(logarithm - largest)[:, None], 0)
    tl.store(out + (row * heads + head) * DIM + d, (total / weight).to(out.dtype.element_ty), mask=d < DIM)


def paged_decode(
    query: Tensor, kv: PagedKV, block_tables: Tensor, work: DecodeWork, parts: DecodeParts, out: Tensor
) -> tuple[Launch, ...]:
    """Writes the attention of one token of each row of the work list into `out`. Two kernels, or one if P is 1.

    Args:
        query: [R, H, D].
        block_tables: int32 [R, W] on the device.
        work: for R rows or more, on the device; a plan of R rows or fewer.
        parts: for as many programs; no other launch may use it at the same time.
        out: [R, H, D].

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    kv_heads, group, block_size, dim = check_attention(query, kv, block_tables, 0, out)
    rows, heads = query.shape[:2]
    if len(block_tables) != rows:
        raise ValueError(f"block_tables is {list(block_tables.shape)}; allowed: [{rows}, W]")
    programs = len(work.starts) - 1
    if programs < 1:
        raise ValueError(f"work.starts is {list(work.starts.shape)}; allowed: [2] and longer")
    entries = max(len(work.entries), rows + programs - 1)
    check_tensor("work.entries", work.entries, (entries, 4), query, torch.int32)
    check_tensor("work.starts", work.starts, (programs + 1,), query, torch.int32)
    check_tensor("work.cuts", work.cuts, (programs - 1, 3), query, torch.int32)
    check_tensor("parts.sums", parts.sums, (2 * (programs - 1), heads, dim), query, torch.float32)
    check_tensor("parts.weights", parts.weights, (2 * (programs - 1), heads), query, torch.float32)
    if not rows:
        return ()
    block_d = max(16, triton.next_power_of_2(dim))
    # 32-bit values take twice the registers.
    step = STEP if query.dtype.itemsize == 2 else STEP // 2
    attend = launch(
        paged_decode_kernel,
        (kv_heads, programs),
        query,
        *kv.arguments(),
        block_tables,
        work.entries,
        work.starts,
        *parts,
        out,
        LOG2_E * dim**-0.5,
        block_tables.stride(0),
        GROUP=group,
        DIM=dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=step,
        BLOCK_D=block_d,
        STAGES=_stages(step * block_d * kv.pool.dtype.itemsize),
        num_warps=4,
    )
    if programs == 1:
        return (attend,)
    add = launch(
        sum_parts_kernel,
        (heads, programs - 1),
        work.cuts,
        *parts,
        out,
        DIM=dim,
        BLOCK_D=block_d,
        BLOCK_P=triton.next_power_of_2(programs),
        SUMMED=min(SUMMED, triton.next_power_of_2(programs)),
        num_warps=4,
    )
    return attend, add


def _stages(step_bytes: int) -> int:
    """2 to 4 buffers of a step's keys and values, in at most 96 KiB: two programs must fit on a multiprocessor."""
    return 1 + max(2, min(4, 96 * 1024 // (2 * step_bytes)))
