"""Attention of one new token of each sequence over its paged latents, with absorbed weights (multi-head latent
attention), with the keys of all rows in equal shares for programs.

    s[r, h, j]  = (query[r, h, :C] . latent[j] + query[r, h, C:] . rotated[j]) * scale          j < context
    out[r, h]   = sum_j exp(s[r, h, j] - m[r, h]) latent[j] / sum_j exp(s[r, h, j] - m[r, h]),  m = max_j s
    where the block table says where latents and rotated keys are

    query         [R, H, C + R'] contiguous; C of 16 to 512
    latents, ...  see `PagedLatents`: of query's type, or of 8 bits with scales; the new token's own are already in it
    block_tables  int32 [R, W], unit stride within a row
    work          which program attends to which keys, contexts included: see `DecodeWork`
    parts         see `DecodeParts`, of H heads of C numbers, and H / G KV heads
    out           [R, H, C] contiguous; 0 where the context is 0

One program serves G heads, padded to the rows of a matrix instruction, so that latents are read from memory once, and
by the other H / G programs from the L2 cache. It goes through its entries of the work list and adds up parts as
`paged_decode` does.

Grid: (H / G, P). Limit: memory up to about 64 heads, then arithmetic. `bytes_moved` and `flops` count them.
Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; see also `paged_decode`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.kv_codes import LARGEST, SCALE
from kvrelay.kernels.triton.checks import check_tensor
from kvrelay.kernels.triton.decode_work import ENTRY_FIELDS, DecodeParts, DecodeWork
from kvrelay.kernels.triton.launch import Launch, launch, shared_bytes
from kvrelay.kernels.triton.overlap import begin_after_inputs, overlapping
from kvrelay.kernels.triton.paged import LOG2_E, _block_ids, check_query, check_tables
from kvrelay.kernels.triton.paged_decode import SUMMED, check_work, store_entry

SIZES = (16, 512)
"""Smallest and largest C."""
HEADS = 32
"""Most heads of a program: their sums are 64 registers of each of 256 threads."""


class PagedLatents(NamedTuple):
    """One layer of the paged pools of latents and of rotated keys."""

    latents: Tensor
    """[block, slot, C]; contiguous but for gaps between blocks, where the scales and other layers may be."""
    rotated: Tensor
    """[block, slot, R']."""
    latent_scales: Tensor | None = None
    """Scales of pools of 8 bits (see `kv_codes`), bfloat16 [block, slot]; else None."""
    rotated_scales: Tensor | None = None


def group_of(heads: int) -> int:
    """G, the heads of a program: the largest divisor of `heads` up to HEADS."""
    return max(group for group in range(1, HEADS + 1) if heads % group == 0)


def bytes_moved(contexts: Sequence[int], heads: int, latent: int, rotated: int, element: int, held: int) -> int:
    """Bytes that must move: latents and rotated keys, with scales if of 8 bits, queries in and results out.

    Args:
        element, held: bytes of a number of the query, and of the pools.
    """
    kept = (latent + rotated) * held + (4 if held == 1 else 0)
    return sum(contexts) * kept + len(contexts) * heads * (2 * latent + rotated) * element


def flops(contexts: Sequence[int], heads: int, latent: int, rotated: int) -> int:
    """Floating-point operations that must be done: 2 (2 C + R') for each head and key."""
    return 2 * (2 * latent + rotated) * heads * sum(contexts)


@triton.jit
def latent_decode_kernel(
    query,
    latents,
    rotated,
    latent_scales,
    rotated_scales,
    latent_stride,
    rotated_stride,
    latent_scale_stride,
    rotated_scale_stride,
    block_tables,
    entries,
    starts,
    sums,
    weights,
    arrivals,
    out,
    scale,
    table_stride,
    GROUP: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SUMMED: tl.constexpr,
    ENTRY_FIELDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_after_inputs(OVERLAP)
    head, program = tl.program_id(0), tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    PRECISION: tl.constexpr = "tf32x3" if query.dtype.element_ty == tl.float32 else "tf32"
    WIDTH: tl.constexpr = LATENT + ROTATED
    inside = (m < GROUP)[:, None] & (c < LATENT)[None, :]
    heads = tl.num_programs(0) * GROUP
    for index in range(tl.load(starts + program), tl.load(starts + program + 1)):
        entry = entries + index * ENTRY_FIELDS
        row, first = tl.load(entry).to(tl.int64), tl.load(entry + 1)
        end, part = tl.load(entry + 2), tl.load(entry + 3).to(tl.int64)
        row_head = row * heads + head * GROUP + m
        of_query = query + row_head[:, None] * WIDTH
        q_latent = tl.load(of_query + c[None, :], mask=inside, other=0.0)
        q_rotated = tl.load(
            of_query + LATENT + r[None, :], mask=(m < GROUP)[:, None] & (r < ROTATED)[None, :], other=0.0
        )
        total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
        largest = tl.full((BLOCK_M,), -1.0e30, tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        table = block_tables + row * table_stride
        begin = first // BLOCK_N * BLOCK_N
        blocks = _block_ids(table, begin, end, BLOCK_SIZE, BLOCK_N)
        for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            key = start + n
            slot = key % BLOCK_SIZE
            # Slots that nobody has written yet may hold anything, and 0 times NaN is NaN.
            present = (key >= first) & (key < end)
            block = blocks.to(tl.int64)
            at = (block * latent_stride + slot * LATENT)[:, None] + c[None, :]
            k = tl.load(latents + at, mask=present[:, None] & (c < LATENT)[None, :], other=0.0).to(q_latent.dtype)
            at = (block * rotated_stride + slot * ROTATED)[:, None] + r[None, :]
            k_rotated = tl.load(rotated + at, mask=present[:, None] & (r < ROTATED)[None, :], other=0.0)
            s = tl.dot(q_latent, tl.trans(k), input_precision=PRECISION)
            s_rotated = tl.dot(q_rotated, tl.trans(k_rotated.to(q_rotated.dtype)), input_precision=PRECISION)
            if latent_scales is not None:
                of_latent = tl.load(latent_scales + block * latent_scale_stride + slot, mask=present, other=0.0)
                of_rotated = tl.load(rotated_scales + block * rotated_scale_stride + slot, mask=present, other=0.0)
                s *= of_latent.to(tl.float32)[None, :]
                s_rotated *= of_rotated.to(tl.float32)[None, :]
            s = tl.where(present[None, :], (s + s_rotated) * scale, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(s, 1))
            p = tl.exp2(s - new_largest[:, None])
            rescale = tl.exp2(largest - new_largest)
            weight = weight * rescale + tl.sum(p, 1)
            total = total * rescale[:, None]
            if latent_scales is not None:
                p *= of_latent.to(tl.float32)[None, :]
            total = tl.dot(p.to(k.dtype), k, total, input_precision=PRECISION)
            largest = new_largest
            blocks = _block_ids(table, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        store_entry(
            total, largest, weight, entry, row, row_head, part, sums, weights, arrivals, out,
            GROUP, LATENT, BLOCK_M, BLOCK_G, BLOCK_C, SUMMED,
        )  # fmt: skip


def latent_decode(
    query: Tensor,
    kv: PagedLatents,
    block_tables: Tensor,
    work: DecodeWork,
    parts: DecodeParts,
    scale: float,
    out: Tensor,
) -> Launch | None:
    """Writes the attention of one token of each row of the work list into `out`; None if there are no rows.

    Args:
        query: [R, H, C + R'].
        block_tables: int32 [R, W] on the device.
        work: for R rows or more, on the device; a plan of R rows or fewer.
        parts: for as many programs; no other launch may use it at the same time.
        scale: of the scores.
        out: [R, H, C].

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    rows, heads = query.shape[:2]
    block_size, latent, rotated = _check(query, kv, block_tables, out)
    group = group_of(heads)
    programs = check_work(query, block_tables, work, parts, heads // group, latent)
    if not rows:
        return None
    block_m, block_c = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(latent))
    block_r = max(16, triton.next_power_of_2(rotated))
    step, stages = _pipeline(query, kv, block_m, block_c + block_r)
    block_g = triton.next_power_of_2(group)
    return launch(
        latent_decode_kernel,
        (heads // group, programs),
        query,
        *kv,
        kv.latents.stride(0),
        kv.rotated.stride(0),
        0 if kv.latent_scales is None else kv.latent_scales.stride(0),
        0 if kv.rotated_scales is None else kv.rotated_scales.stride(0),
        block_tables,
        work.entries,
        work.starts,
        *parts,
        out,
        LOG2_E * scale,
        block_tables.stride(0),
        GROUP=group,
        LATENT=latent,
        ROTATED=rotated,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=step,
        BLOCK_C=block_c,
        BLOCK_R=block_r,
        STAGES=stages,
        BLOCK_G=block_g,
        SUMMED=min(max(1, SUMMED // (block_g * block_c)), triton.next_power_of_2(programs)),
        ENTRY_FIELDS=ENTRY_FIELDS,
        num_warps=8,
        **overlapping(),
    )


def _pipeline(query: Tensor, kv: PagedLatents, block_m: int, width: int) -> tuple[int, int]:
    """Keys of a step, and stages of the pipeline that loads them, for a program that fits a multiprocessor."""
    room = shared_bytes() - 2 * block_m * width * query.dtype.itemsize
    for step in (64, 32, 16):
        # A key that isn't of the query's type is converted in a buffer of its own.
        key = width * (kv.latents.dtype.itemsize + query.dtype.itemsize)
        if 2 * step * key <= room:
            return step, 2
    return 16, 1


def _check(query: Tensor, kv: PagedLatents, block_tables: Tensor, out: Tensor) -> tuple[int, int, int]:
    """Slots of a block, C and R'.

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    check_query(query)
    block_size, latent = kv.latents.shape[1:]
    rotated = kv.rotated.shape[2]
    if not SIZES[0] <= latent <= SIZES[1]:
        raise ValueError(f"latents have {latent} numbers; allowed: {SIZES[0]} to {SIZES[1]}")
    for name, tensor, size, scales in (
        ("latents", kv.latents, latent, kv.latent_scales),
        ("rotated", kv.rotated, rotated, kv.rotated_scales),
    ):
        check_tensor(name, tensor[0], (block_size, size), query, query.dtype, *LARGEST)
        if (tensor.dtype in LARGEST) != (scales is not None):
            raise ValueError(
                f"scales of {name} are {'missing' if scales is None else 'given'} for a pool of {tensor.dtype}"
            )
        if scales is not None:
            check_tensor(f"scales of {name}", scales[0], (block_size,), query, SCALE)
    check_tensor("query", query, (*query.shape[:2], latent + rotated), query)
    check_tables(block_tables, query)
    check_tensor("out", out, (*query.shape[:2], latent), query)
    return block_size, latent, rotated
