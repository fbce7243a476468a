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
the entry has all keys of a row, else as a part of it, with the logarithm of the part's weight. Programs count the parts
of a row that are written; the one that writes the last adds them up. The grid, and with it a captured CUDA graph,
depends on the device only: what there is to do is read from device memory.

Grid: (Hkv, P). Limit: memory. `bytes_moved` counts it.
Source: Dao et al.: Flash-Decoding, 2023; Kwon et al.: PagedAttention, arXiv:2309.06180; Ye et al.: FlashInfer,
arXiv:2501.01005, which plans its work on the host likewise.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.triton.checks import check_tensor
from kvrelay.kernels.triton.decode_work import ENTRY_FIELDS, STEP, DecodeParts, DecodeWork
from kvrelay.kernels.triton.launch import Launch, launch, shared_bytes
from kvrelay.kernels.triton.overlap import begin_after_inputs, overlapping
from kvrelay.kernels.triton.paged import LOG2_E, PagedKV, attend_keys, begin_softmax, check_attention, check_scores

SUMMED = 8192
"""Size of one read in numbers, when the parts of a row are added up: 64 for each thread."""


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
def _sum_parts(
    sums,
    weights,
    first,
    count,
    heads,
    head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SUMMED: tl.constexpr,
):
    """The result of a row from `count` parts of it, for the query heads of one KV head, [BLOCK_G, BLOCK_D]."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    some = tl.arange(0, SUMMED)
    total = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    largest = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_G,), tl.float32)
    weights += first * heads + head * GROUP
    sums += (first * heads + head * GROUP) * DIM
    for start in range(0, count, SUMMED):
        present = (start + some < count)[:, None] & (g < GROUP)[None, :]
        part_head = (start + some)[:, None] * heads + g[None, :]
        # Loads bypass L1, which may have old values of these addresses.
        logarithm = tl.load(weights + part_head, mask=present, other=float("-inf"), cache_modifier=".cg")
        inside = present[:, :, None] & (d < DIM)[None, None, :]
        place = part_head[:, :, None] * DIM + d[None, None, :]
        each = tl.load(sums + place, mask=inside, other=0.0, cache_modifier=".cg")
        new_largest = tl.maximum(largest, tl.max(logarithm, 0))
        # Lanes without a head have no weight at all.
        base = tl.where(new_largest > float("-inf"), new_largest, 0.0)
        share = tl.exp2(logarithm - base[None, :])
        rescale = tl.exp2(largest - base)
        weight = weight * rescale + tl.sum(share, 0)
        total = total * rescale[:, None] + tl.sum(each * share[:, :, None], 0)
        largest = new_largest
    return total / tl.where(weight > 0.0, weight, 1.0)[:, None]


@triton.jit
def store_entry(
    total,
    largest,
    weight,
    entry,
    row,
    row_head,
    part,
    sums,
    weights,
    arrivals,
    out,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SUMMED: tl.constexpr,
):
    """Stores what a program has of an entry of the work list: in `out` if the entry has all keys of its row, else as a
    part of it. The program that stores a row's last part adds up all of them.

    Args:
        total, largest, weight: the softmax behind the entry's keys, as the state of `attend_keys`.
        row_head: row * heads + head for each query head of the program.
    """
    head = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (m < GROUP)[:, None] & (d < DIM)[None, :]
    heads = tl.num_programs(0) * GROUP
    total = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
    if part < 0:
        tl.store(out + row_head[:, None] * DIM + d[None, :], total.to(out.dtype.element_ty), mask=inside)
    else:
        part_head = part * heads + (head * GROUP + m)
        tl.store(sums + part_head[:, None] * DIM + d[None, :], total, mask=inside, cache_modifier=".cg")
        tl.store(weights + part_head, largest + tl.log2(weight), mask=m < GROUP, cache_modifier=".cg")
        first_part, count = tl.load(entry + 4).to(tl.int64), tl.load(entry + 5)
        arrival = arrivals + first_part * tl.num_programs(0) + head
        # All threads must have written before one of them tells, and none may read before it knows.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrival, 1, sem="acq_rel")
        if arrived == count - 1:
            tl.debug_barrier()
            whole = _sum_parts(sums, weights, first_part, count, heads, head, GROUP, DIM, BLOCK_G, BLOCK_D, SUMMED)
            g = tl.arange(0, BLOCK_G)
            place = (row * heads + head * GROUP + g)[:, None] * DIM + d[None, :]
            within = (g < GROUP)[:, None] & (d < DIM)[None, :]
            tl.store(out + place, whole.to(out.dtype.element_ty), mask=within)
            # The next launch counts from 0 again.
            tl.store(arrival, 0)


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
    arrivals,
    out,
    scale,
    softcap,
    sinks,
    table_stride,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SUMMED: tl.constexpr,
    ENTRY_FIELDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_after_inputs(OVERLAP)
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
        entry = entries + index * ENTRY_FIELDS
        row, first = tl.load(entry).to(tl.int64), tl.load(entry + 1)
        end, part = tl.load(entry + 2), tl.load(entry + 3).to(tl.int64)
        row_head = row * heads + (head * GROUP + m)
        offset = row_head[:, None] * DIM + d[None, :]
        q = tl.load(query + offset, mask=inside, other=0.0)
        # The first part of a row has the row's sink.
        behind = m * 0 + tl.where(part < 0, 0, part - tl.load(entry + 4))
        state = begin_softmax(sinks, head * GROUP + m, (behind == 0) & (m < GROUP), BLOCK_M, BLOCK_D)
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
            softcap,
            MASKED=True,
            WINDOWED=False,
            TMA=False,
            DIM=DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            STAGES=STAGES,
        )
        store_entry(
            total, largest, weight, entry, row, row_head, part, sums, weights, arrivals, out,
            GROUP, DIM, BLOCK_M, BLOCK_G, BLOCK_D, SUMMED,
        )  # fmt: skip


def paged_decode(
    query: Tensor,
    kv: PagedKV,
    block_tables: Tensor,
    work: DecodeWork,
    parts: DecodeParts,
    out: Tensor,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Launch | None:
    """Writes the attention of one token of each row of the work list into `out`; None if there are no rows.

    Args:
        query: [R, H, D].
        block_tables: int32 [R, W] on the device.
        work: for R rows or more, on the device; a plan of R rows or fewer.
        parts: for as many programs; no other launch may use it at the same time.
        out: [R, H, D].
        softcap: c of c tanh(score / c); 0 for none.
        sinks: float32 [H] scores that take a share of each query's attention for nothing, or None.

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    kv_heads, group, block_size, dim = check_attention(query, kv, block_tables, 0, out)
    check_scores(query, softcap, sinks)
    programs = check_work(query, block_tables, work, parts, kv_heads, dim)
    if not len(query):
        return None
    block_d = max(16, triton.next_power_of_2(dim))
    # 32-bit values take twice the registers.
    most = STEP if query.dtype.itemsize == 2 else STEP // 2
    block_m = max(16, triton.next_power_of_2(group))
    # Beside its buffers of keys and values, a program takes about three times its queries.
    shared = shared_bytes() - 3 * block_m * block_d * query.dtype.itemsize
    step, stages = _pipeline(most, block_d * kv.pool.dtype.itemsize, shared)
    block_g = triton.next_power_of_2(group)
    return launch(
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
        LOG2_E * softcap if softcap else None,
        sinks,
        block_tables.stride(0),
        GROUP=group,
        DIM=dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=step,
        BLOCK_D=block_d,
        STAGES=stages,
        BLOCK_G=block_g,
        SUMMED=min(max(1, SUMMED // (block_g * block_d)), triton.next_power_of_2(programs)),
        ENTRY_FIELDS=ENTRY_FIELDS,
        num_warps=4,
        **overlapping(),
    )


def check_work(
    query: Tensor, block_tables: Tensor, work: DecodeWork, parts: DecodeParts, kv_heads: int, dim: int
) -> int:
    """Checks the work list and the memory for parts that a decode kernel takes for `query` [R, H, ...]; returns P.

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    (rows, heads), programs = query.shape[:2], len(work.starts) - 1
    if len(block_tables) != rows:
        raise ValueError(f"block_tables is {list(block_tables.shape)}; allowed: [{rows}, W]")
    if programs < 1:
        raise ValueError(f"work.starts is {list(work.starts.shape)}; allowed: [2] and longer")
    entries = max(len(work.entries), rows + programs - 1)
    check_tensor("work.entries", work.entries, (entries, ENTRY_FIELDS), query, torch.int32)
    check_tensor("work.starts", work.starts, (programs + 1,), query, torch.int32)
    check_tensor("parts.sums", parts.sums, (2 * (programs - 1), heads, dim), query, torch.float32)
    check_tensor("parts.weights", parts.weights, (2 * (programs - 1), heads), query, torch.float32)
    check_tensor("parts.arrivals", parts.arrivals, (2 * (programs - 1), kv_heads), query, torch.int32)
    return programs


def _pipeline(step: int, slot_bytes: int, shared: int) -> tuple[int, int]:
    """Keys of a step, and stages of the pipeline that loads keys and values, for programs that fit.

    There are 2 to 4 buffers of a step's keys and values in at most 96 KiB, so that two programs fit on a multiprocessor
    that has 227 KiB.

    Args:
        step: keys of a step at most.
        slot_bytes: of a key's or value's numbers, padded.
        shared: memory for the buffers.
    """
    while step > 16 and 4 * step * slot_bytes > shared:
        step //= 2
    return step, 1 + max(2, min(4, min(96 * 1024, shared) // (2 * step * slot_bytes)))
