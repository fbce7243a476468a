"""One layer of a paged KV pool as kernels take it, and the loop over its keys that both attention kernels run."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.kv_codes import LARGEST, SCALE
from kvrelay.kernels.triton.checks import check_tensor

DIMS = (16, 256)
"""Smallest and largest head size that attention takes."""
LOG2_E = 1.4426950408889634
"""Factor of scores, because the softmax is computed with powers of 2."""


class PagedKV(NamedTuple):
    """One layer of a paged KV pool."""

    pool: Tensor
    """[block, layer, k|v, Hkv, slot, D]; contiguous but for gaps between planes, where the scales may be."""
    layer: int
    scales: Tensor | None = None
    """Scales of a pool of 8 bits (see `kv_codes`), bfloat16 [block, layer, k|v, Hkv, slot] with the same gaps; else
    None."""

    def arguments(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, int]:
        """The arguments that an attention kernel takes for the pool: keys, values, the scales of both, block strides of
        pool and scales.
        """
        pool, layer, scales = self
        keys, values = pool[:, layer, 0], pool[:, layer, 1]
        if scales is None:
            return keys, values, None, None, pool.stride(0), 0
        return keys, values, scales[:, layer, 0], scales[:, layer, 1], pool.stride(0), scales.stride(0)

    def of_layer(self) -> dict[str, Tensor | int | None]:
        """The arguments, by parameter, of the attention kernels and of `rope_kv_write` that differ between layers."""
        pool, layer, scales = self
        keys, values, key_scales, value_scales, _, _ = self.arguments()
        return {
            "keys": keys,
            "values": values,
            "key_scales": key_scales,
            "value_scales": value_scales,
            "key_row": layer * 2 * pool.shape[3] * pool.shape[4],
            "layer_pool": pool[:, layer],
            "layer_scales": None if scales is None else scales[:, layer],
        }


def check_pool(kv: PagedKV, like: Tensor) -> None:
    """Checks that a pool is well formed, and fits the type and device of `like`.

    Raises:
        ValueError: it isn't, or doesn't.
    """
    pool, layer, scales = kv
    if pool.dim() != 6 or pool.shape[2] != 2 or not pool[0, 0, 0].is_contiguous():
        raise ValueError(f"pool is {list(pool.shape)}; allowed: [block, layer, 2, Hkv, slot, D], contiguous planes")
    if not 0 <= layer < pool.shape[1]:
        raise ValueError(f"layer is {layer}; allowed: 0 to {pool.shape[1] - 1}")
    check_tensor("pool", pool[0, 0, 0], tuple(pool.shape[3:]), like, like.dtype, *LARGEST)
    if (pool.dtype in LARGEST) != (scales is not None):
        raise ValueError(f"scales are {'missing' if scales is None else 'given'} for a pool of {pool.dtype}")
    if scales is not None:
        if scales.shape != pool.shape[:5]:
            raise ValueError(f"scales is {list(scales.shape)}; allowed: {list(pool.shape[:5])}")
        check_tensor("scales", scales[0, 0, 0], tuple(pool.shape[3:5]), like, SCALE)


def check_query(query: Tensor) -> None:
    """Raises ValueError unless queries are of a type that attention takes."""
    if not query.is_floating_point() or query.dtype.itemsize not in (2, 4):
        raise ValueError(f"query is {query.dtype}; allowed: torch.float16, torch.bfloat16, torch.float32")


def check_tables(block_tables: Tensor, query: Tensor) -> None:
    """Raises ValueError unless block tables are int32 [R, W], with unit stride, on the device of `query`."""
    if block_tables.dtype != torch.int32 or block_tables.dim() != 2 or block_tables.stride(1) != 1:
        raise ValueError(
            f"block_tables is {block_tables.dtype} {list(block_tables.shape)}; allowed: torch.int32 [R, W]"
        )
    if block_tables.device != query.device:
        raise ValueError(f"block_tables is on {block_tables.device}; allowed: {query.device}")


def check_attention(
    query: Tensor, kv: PagedKV, block_tables: Tensor, window: int, out: Tensor
) -> tuple[int, int, int, int]:
    """Checks the arguments that both attention kernels have: see `flash_prefill` and `paged_decode`.

    Returns:
        Hkv, G (query heads of a KV head), slots of a block, D.

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    check_query(query)
    check_pool(kv, query)
    kv_heads, block_size, dim = kv.pool.shape[3:]
    if query.dim() != 3 or query.shape[2] != dim or not query.shape[1] or query.shape[1] % kv_heads:
        raise ValueError(f"query is {list(query.shape)}; allowed: [T, a multiple of {kv_heads}, {dim}]")
    check_tensor("query", query, tuple(query.shape), query)
    if not DIMS[0] <= dim <= DIMS[1]:
        raise ValueError(f"pool has heads of {dim}; allowed: {DIMS[0]} to {DIMS[1]}")
    check_tables(block_tables, query)
    if window < 0:
        raise ValueError(f"window is {window}; allowed: 0 (all keys) and more")
    check_tensor("out", out, tuple(query.shape), query)
    return kv_heads, query.shape[1] // kv_heads, block_size, dim


def check_scores(query: Tensor, softcap: float, sinks: Tensor | None) -> None:
    """Checks what both attention kernels do to the scores of `query` [T, H, D].

    Raises:
        ValueError: a value or a tensor isn't allowed.
    """
    if softcap < 0:
        raise ValueError(f"softcap is {softcap}; allowed: 0 (none) and more")
    if sinks is not None:
        check_tensor("sinks", sinks, (query.shape[1],), query, torch.float32)


@triton.jit
def begin_softmax(sinks, head, begins, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The `state` of `attend_keys` before the first key of a tile.

    Args:
        sinks: scores by query head, or None.
        head: query head [BLOCK_M] of each row.
        begins: whether the tile has the first keys of each row [BLOCK_M], to which a sink is added.
    """
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # The largest score begins finite: a row that sees no key of a step then keeps a weight of 0 instead of NaN.
    largest = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    if sinks is not None:
        # A sink is as a key before all others, without a value.
        sink = tl.load(sinks + head, mask=begins, other=0.0) * 1.4426950408889634
        largest = tl.where(begins, sink, largest)
        weight = tl.where(begins, 1.0, weight)
    return total, largest, weight


@triton.jit
def _block_ids(table, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block ids of keys [start, start + BLOCK_N): one where such a step lies within a page, else one for each key."""
    key = start
    if BLOCK_SIZE % BLOCK_N > 0:
        key = start + tl.arange(0, BLOCK_N)
    return tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)


@triton.jit
def attend_keys(
    state,
    q,
    scale,
    kv,
    row,
    table,
    begin,
    end,
    first,
    position,
    window,
    softcap,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    TMA: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adds keys [begin, end) of one KV head to the running softmax of a tile of query rows; returns the new `state`.

    The softmax is online, in base 2 and float32. The block ids of a step are loaded during the step before: loading
    them where they are used would halve the depth of the pipeline.

    Args:
        state: weighted sum of values [BLOCK_M, BLOCK_D], largest score [BLOCK_M], sum of weights [BLOCK_M].
        q: [BLOCK_M, BLOCK_D].
        scale: of the scores, times log2(e).
        kv: as `PagedKV.arguments`, offset to the head; with TMA, keys and values are a descriptor of the whole pool,
            [rows, D], and strides count its rows.
        row: with TMA, the head's first row of keys, and of values, in block 0.
        table: the sequence's block table.
        begin: a multiple of BLOCK_N.
        first: the first key that a row sees; keys before it aren't loaded. None if there are none.
        position: the position [BLOCK_M] of each row; None if all rows see all keys from `first` on.
        softcap: c of c tanh(score / c), times log2(e); None for none.
        MASKED: not all rows see all of the keys.
    """
    total, largest, weight = state
    keys, values, key_scales, value_scales, block_stride, scale_block_stride = kv
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, q.shape[1])
    PRECISION: tl.constexpr = "tf32x3" if q.dtype == tl.float32 else "tf32"
    blocks = _block_ids(table, begin, end, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key = start + n
        slot = key % BLOCK_SIZE
        present = key < end
        if first is not None:
            present = (key >= first) & present
        if TMA:
            block_row = blocks * block_stride + start % BLOCK_SIZE
            k = keys.load([block_row + row[0], 0])
            v = values.load([block_row + row[1], 0])
        else:
            offset = (blocks.to(tl.int64) * block_stride + slot * DIM)[:, None] + d[None, :]
            if MASKED:
                # Slots that nobody has written yet may hold anything, and 0 times NaN is NaN.
                loaded = present[:, None] & (d < DIM)[None, :]
                k = tl.load(keys + offset, mask=loaded, other=0.0)
                v = tl.load(values + offset, mask=loaded, other=0.0)
            elif q.shape[1] == DIM:
                k = tl.load(keys + offset)
                v = tl.load(values + offset)
            else:
                loaded = (d < DIM)[None, :] & (n >= 0)[:, None]
                k = tl.load(keys + offset, mask=loaded, other=0.0)
                v = tl.load(values + offset, mask=loaded, other=0.0)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale
        if key_scales is not None:
            scale_offset = blocks.to(tl.int64) * scale_block_stride + slot
            s *= tl.load(key_scales + scale_offset, mask=present, other=0.0).to(tl.float32)[None, :]
        if softcap is not None:
            # tanh |x| = (1 - t) / (1 + t), t = e^(-2 |x|); scores are times log2(e), as powers of 2 want them.
            t = tl.exp2(tl.abs(s) * (-2.8853900817779268 / softcap))
            s = tl.where(s < 0, -softcap, softcap) * ((1 - t) / (1 + t))
        if MASKED:
            if position is None:
                seen = present[None, :]
            else:
                seen = key[None, :] <= position[:, None]
                if WINDOWED:
                    seen &= key[None, :] > position[:, None] - window
            s = tl.where(seen, s, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(s, 1))
        p = tl.exp2(s - new_largest[:, None])
        rescale = tl.exp2(largest - new_largest)
        weight = weight * rescale + tl.sum(p, 1)
        total = total * rescale[:, None]
        if value_scales is not None:
            scale_offset = blocks.to(tl.int64) * scale_block_stride + slot
            p *= tl.load(value_scales + scale_offset, mask=present, other=0.0).to(tl.float32)[None, :]
        total = tl.dot(p.to(q.dtype), v.to(q.dtype), total, input_precision=PRECISION)
        largest = new_largest
        blocks = _block_ids(table, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
    return total, largest, weight
