"""Copies whole blocks between a KV pool and a frame, and adds up the frame's checksum in the same pass.

    frame = for each of `blocks` in order: the bytes of its layers as they lie in the pool, one contiguous run
    total += sum_i mix(word[i] ^ (i + 1) * POSITION)    over the frame's words of 8 bytes; see `kv_checksum`

    pool     uint8 [block, layer, k|v, plane] contiguous; a plane is a multiple of 8 bytes
    blocks   int64 [N]
    frame    uint8, contiguous, at a multiple of 16 bytes
    total    int64 [1]

Grid: (N, ceil(words of a run / SPAN)); a program copies and mixes SPAN words of one block, in vectors of 16 bytes.
Limit: memory: each byte is read once, and written once if it is copied. A checksum of its own would read it again. The
mix takes about 30 integer instructions for 8 bytes, which an H100 does about as fast as its memory delivers them.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.triton.checks import check_tensor
from kvrelay.kernels.triton.kv_checksum import M1, M2, POSITION, mix

Way = Literal["read", "write", "sum"]
Range = tuple[int, int]
"""Range of layers: the first one, and how many."""

BLOCK = 1024
SPAN = 8 * BLOCK
"""Number of words for each program."""


# Offsets differ from frame to frame: specialized, each divisor of theirs would be another compilation.
@triton.jit(do_not_specialize=["run_vectors", "stride_vectors", "first_vector"])
def kv_frame_kernel(
    pool,
    blocks,
    frame,
    total,
    run_vectors,
    stride_vectors,
    first_vector,
    WAY: tl.constexpr,
    POSITION: tl.constexpr,
    M1: tl.constexpr,
    M2: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    block = tl.load(blocks + index)
    # In vectors of two words, because the compiler must see that no mask and no address cuts one.
    run = run_vectors.to(tl.int64) * 2
    pool += (block * stride_vectors + first_vector) * 2
    start = index * run
    sums = tl.zeros((BLOCK,), tl.uint64)
    for step in range(STEPS):
        column = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        there = column < run
        if WAY == "write":
            word = tl.load(frame + start + column, mask=there, other=0)
            tl.store(pool + column, word, mask=there)
        else:
            word = tl.load(pool + column, mask=there, other=0)
            if WAY == "read":
                tl.store(frame + start + column, word, mask=there)
        mixed = mix(word.to(tl.uint64, bitcast=True) ^ (start + column + 1).to(tl.uint64) * POSITION, M1, M2)
        sums += tl.where(there, mixed, 0)
    tl.atomic_add(total, tl.sum(sums, 0).to(tl.int64, bitcast=True), sem="relaxed")


def kv_frame(
    way: Way, pool: Tensor, blocks: Tensor, frame: Tensor | None, total: Tensor, layers: Range | None = None
) -> int:
    """Copies whole blocks, and adds the words of the frame that they are to `total`; returns the frame's bytes.

    Args:
        way: read copies from the pool to the beginning of `frame`, write the other way, and sum copies nothing.
            To be written, `blocks` must not have a block twice.
        frame: None for sum.
        layers: all of them unless given.

    Raises:
        ValueError: a tensor has another shape, type, alignment or device than it should, or the pool has not these
            `layers`.
    """
    if way not in ("read", "write", "sum"):
        raise ValueError(f"way is {way!r}; allowed: read, write, sum")
    if pool.dtype != torch.uint8 or pool.dim() != 4 or pool.shape[2] != 2 or not pool.is_contiguous():
        raise ValueError(
            f"pool is {pool.dtype} {list(pool.shape)}; allowed: torch.uint8 [block, layer, 2, plane], contiguous"
        )
    if pool.shape[3] % 8:
        raise ValueError(f"a plane has {pool.shape[3]} bytes; allowed: multiples of 8")
    first, count = layers or (0, pool.shape[1])
    if first < 0 or not 1 <= count <= pool.shape[1] - first:
        raise ValueError(f"layers are {count} from {first} on; there are {pool.shape[1]}")
    check_tensor("blocks", blocks, (len(blocks),), pool, torch.int64)
    check_tensor("total", total, (1,), pool, torch.int64)
    # Keys and values are planes of equal size, so both together are an even number of words.
    vectors = pool.shape[3] // 8
    size = len(blocks) * count * 2 * pool.shape[3]
    words = pool.view(-1).view(torch.int64)
    if way != "sum":
        words = _words(frame, size, pool)
    kv_frame_kernel[(len(blocks), triton.cdiv(2 * count * vectors, SPAN))](
        pool.view(-1).view(torch.int64),
        blocks,
        words,
        total,
        count * vectors,
        pool.shape[1] * vectors,
        first * vectors,
        WAY=way,
        POSITION=POSITION,
        M1=M1,
        M2=M2,
        STEPS=SPAN // BLOCK,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return size


def _words(frame: Tensor | None, size: int, pool: Tensor) -> Tensor:
    """The first `size` bytes of a frame as int64."""
    if frame is None:
        raise ValueError(f"frame is None; allowed: torch.uint8 [{size} or more], contiguous")
    if frame.dtype != torch.uint8 or frame.dim() != 1 or not frame.is_contiguous() or len(frame) < size:
        raise ValueError(
            f"frame is {frame.dtype} {list(frame.shape)}; allowed: torch.uint8 [{size} or more], contiguous"
        )
    if frame.device != pool.device:
        raise ValueError(f"frame is on {frame.device}; allowed: {pool.device}")
    if frame.data_ptr() % 16 or frame.storage_offset() % 8:
        raise ValueError("frame isn't aligned; allowed: addresses that are multiples of 16 bytes")
    return frame[:size].view(torch.int64)
