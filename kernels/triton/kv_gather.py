"""Copies between blocks of a KV pool and a contiguous frame, as `KVPool.read` and `write` define frames.

    frame = for each block of the tokens, in order:  [layer, k|v, head, slot, D]  of its used slots (HND)
                                                     [layer, k|v, slot, head, D]                    (NHD)
    used slots: all of a block, but of the last one only those that have a token
    layers, heads: a range of the pool's

    pool     [block, layer, k|v, *inner, D] contiguous, of any type; inner is (Hkv, slot) for HND, (slot, Hkv) for NHD
    blocks   int64 [N] or int32 [N]: the blocks of the frame's tokens; the first token is in slot 0 of the first block
    frame    uint8, contiguous

`kv_scatter` also sets the unused slots of the last block to 0, in these layers and heads. A pool with scales is copied
as one of planes: one head, one slot, and D bytes of numbers and scales.

Grid: (N, 2 * layers); a program copies the keys, or the values, of one block and layer, in vectors of 16 bytes where D
allows it. Limit: memory: each byte of the frame is read once and written once.
"""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.triton.checks import check_tensor

Order = Literal["NHD", "HND"]
Range = tuple[int, int]
"""Range of heads or layers: the first one, and how many."""

TILE_WORDS = 2048


# Triton would make an argument of 1 a constant, which `tl.multiple_of` doesn't take.
@triton.jit(do_not_specialize=["num_tokens", "heads", "pool_heads"])
def kv_copy_kernel(
    pool,
    blocks,
    frame,
    num_tokens,
    block_stride,
    plane_stride,
    first_word,
    heads,
    pool_heads,
    WORDS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1)
    block = tl.load(blocks + index).to(tl.int64)
    used = tl.minimum(num_tokens - index * BLOCK_SIZE, BLOCK_SIZE).to(tl.int32)
    # The runs of the frame follow one another; those of the pool are `stride` apart, `whole_runs` of `whole_run` words
    # with the unused slots.
    if HEADS_FIRST:
        runs = heads
        whole_runs = heads
        run = used * WORDS
        whole_run = BLOCK_SIZE * WORDS
        stride = BLOCK_SIZE * WORDS
    else:
        runs = used
        whole_runs = BLOCK_SIZE
        run = heads * WORDS
        whole_run = heads * WORDS
        stride = pool_heads * WORDS
    run = tl.multiple_of(run, VECTOR)
    stride = tl.multiple_of(stride, VECTOR)
    pool += block * block_stride + plane.to(tl.int64) * plane_stride + first_word
    frame += index * tl.num_programs(1) * heads * BLOCK_SIZE * WORDS + plane.to(tl.int64) * heads * used * WORDS
    rows = whole_runs if SCATTER else runs
    columns = whole_run if SCATTER else run
    for first_row in range(0, rows, BLOCK_R):
        row = first_row + tl.arange(0, BLOCK_R)[:, None]
        for first_column in range(0, columns, BLOCK_C):
            column = first_column + tl.arange(0, BLOCK_C)[None, :]
            used_words = (row < runs) & (column < run)
            if SCATTER:
                words = tl.load(frame + row * run + column, mask=used_words, other=0)
                tl.store(pool + row * stride + column, words, mask=(row < whole_runs) & (column < whole_run))
            else:
                words = tl.load(pool + row * stride + column, mask=used_words, other=0)
                tl.store(frame + row * run + column, words, mask=used_words)


def kv_gather(
    pool: Tensor,
    blocks: Tensor,
    num_tokens: int,
    out: Tensor,
    order: Order = "HND",
    heads: Range | None = None,
    layers: Range | None = None,
) -> int:
    """Copies the KV of `num_tokens` tokens to the beginning of `out`; returns the number of bytes.

    Args:
        heads, layers: all of them unless given.

    Raises:
        ValueError: a tensor has another shape, type or device than it should, or a range is outside the pool.
    """
    return _copy(pool, blocks, num_tokens, out, order, (layers, heads), scatter=False)


def kv_scatter(
    pool: Tensor,
    blocks: Tensor,
    num_tokens: int,
    frame: Tensor,
    order: Order = "HND",
    heads: Range | None = None,
    layers: Range | None = None,
) -> int:
    """Copies the frame at the beginning of `frame` into the pool; arguments and errors as of `kv_gather`.

    `blocks` must not have a block twice.
    """
    return _copy(pool, blocks, num_tokens, frame, order, (layers, heads), scatter=True)


def _copy(
    pool: Tensor,
    blocks: Tensor,
    num_tokens: int,
    frame: Tensor,
    order: Order,
    given: tuple[Range | None, Range | None],
    scatter: bool,
) -> int:
    if order not in ("NHD", "HND"):
        raise ValueError(f"order is {order!r}; allowed: NHD, HND")
    if pool.dim() != 6 or pool.shape[2] != 2 or not pool.is_contiguous():
        raise ValueError(f"pool is {list(pool.shape)}; allowed: [block, layer, 2, 2 dimensions, D], contiguous")
    pool_heads, block_size = (pool.shape[3], pool.shape[4]) if order == "HND" else (pool.shape[4], pool.shape[3])
    first_layer, layers = _checked("layers", given[0], pool.shape[1])
    first_head, heads = _checked("heads", given[1], pool_heads)
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}; allowed: 1 and more")
    check_tensor("blocks", blocks, (triton.cdiv(num_tokens, block_size),), pool, torch.int32, torch.int64)
    head_bytes = pool.shape[5] * pool.element_size()
    size = num_tokens * layers * 2 * heads * head_bytes
    if frame.dtype != torch.uint8 or frame.dim() != 1 or not frame.is_contiguous() or len(frame) < size:
        raise ValueError(
            f"frame is {frame.dtype} {list(frame.shape)}; allowed: torch.uint8 [{size} or more], contiguous"
        )
    if frame.device != pool.device:
        raise ValueError(f"frame is on {frame.device}; allowed: {pool.device}")
    aligned = head_bytes % 4 == 0 and frame.data_ptr() % 4 == 0
    word: Any = torch.int32 if aligned else torch.uint8
    words = head_bytes // word.itemsize
    vector = 16 // word.itemsize
    plane = pool_heads * block_size * words
    run = block_size * words if order == "HND" else heads * words
    block_c = min(triton.next_power_of_2(run), TILE_WORDS)
    kv_copy_kernel[(len(blocks), 2 * layers)](
        pool.view(-1).view(word),
        blocks,
        frame[:size].view(word),
        num_tokens,
        pool.shape[1] * 2 * plane,
        plane,
        first_layer * 2 * plane + first_head * (block_size if order == "HND" else 1) * words,
        heads,
        pool_heads,
        WORDS=words,
        VECTOR=vector if words % vector == 0 else 1,
        BLOCK_SIZE=block_size,
        HEADS_FIRST=order == "HND",
        SCATTER=scatter,
        BLOCK_R=TILE_WORDS // block_c,
        BLOCK_C=block_c,
        num_warps=4,
    )
    return size


def _checked(name: str, given: Range | None, there: int) -> Range:
    """The first one and how many, all of them if none are given."""
    first, count = given or (0, there)
    if first < 0 or not 1 <= count <= there - first:
        raise ValueError(f"{name} are {count} from {first} on; there are {there}")
    return first, count
