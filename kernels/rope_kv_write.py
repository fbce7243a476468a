"""What stands between the projection and attention, in one pass: norm, rotation, and the way into paged KV.

    n[t, h]    = qkv[t, h] / sqrt(mean(qkv[t, h]^2) + eps) * weight[h]     queries and keys, if there is a norm
    r[t, h, i] = n[t, h, i] * cos[t, i] + n[t, h, (i + D/2) mod D] * sin[t, i]
    query out  = r of the first H heads;  K of the pool = r of the next Hkv;  V of the pool = qkv of the last Hkv

    qkv       [T, H + 2 Hkv, D] contiguous
    weight    [H + Hkv, D], or none
    cos, sin  float32 [T, 1, D], as `reference.rope` takes them (the first half of sin is negated)
    slots     int64 [T], block * block_size + position in the block; below 0 for a token whose KV isn't kept
    pool      [block, layer, k|v, Hkv, slot, D], of qkv's type, int8 or float8_e4m3fn
    scales    float32 [block, layer, k|v, Hkv, slot], with a pool of 8 bits: value = number in the pool * scale,
              scale = largest magnitude of that head's D numbers / 127 (int8), / 448 (float8)
    out       [T, H, D]

Grid: (T, ceil((H + 2 Hkv) / HEADS)). Limit: memory. `bytes_moved` counts it.
Source: Su et al., arXiv:2104.09864; the norm of heads as in Qwen3, arXiv:2505.09388.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.checks import check_placed, check_tensor
from kvrelay.kernels.paged import PagedKV

HEADS = 4
"""Heads of one program."""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each 8-bit type that KV may be kept in."""


def bytes_moved(tokens: int, heads: int, kv_heads: int, dim: int, element_size: int, kv_element_size: int) -> int:
    """Bytes that must move: the projection in, queries and KV out, the angles' halves, slots and scales."""
    kv = 2 * kv_heads * (dim * kv_element_size + (4 if kv_element_size == 1 else 0))
    return tokens * (((2 * heads + 2 * kv_heads) * dim) * element_size + kv + 4 * dim + 8)


@triton.jit
def rope_kv_write_kernel(
    qkv,
    weight,
    cos,
    sin,
    slots,
    layer_pool,
    layer_scales,
    out,
    eps,
    block_stride,
    scale_block_stride,
    HEADS_Q: tl.constexpr,
    HEADS_KV: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    half_dim: tl.constexpr = DIM // 2
    inside = (head < HEADS_Q + 2 * HEADS_KV) & (column < half_dim)
    source = qkv + (token * (HEADS_Q + 2 * HEADS_KV) + head) * DIM + column
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + half_dim, mask=inside, other=0.0)
    turned = head < HEADS_Q + HEADS_KV
    a, b = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
        weights = weight + head * DIM + column
        normed = inside & turned
        # Rounded in between, as the plain sequence of norm and rotation is.
        a = (a * scale * tl.load(weights, mask=normed, other=0.0).to(tl.float32)).to(first.dtype).to(tl.float32)
        b = (b * scale * tl.load(weights + half_dim, mask=normed, other=0.0).to(tl.float32)).to(first.dtype)
        b = b.to(tl.float32)
    c = tl.load(cos + token * DIM + column, mask=column < half_dim, other=1.0)
    s = tl.load(sin + token * DIM + half_dim + column, mask=column < half_dim, other=0.0)
    first = tl.where(turned, (a * c - b * s).to(first.dtype), first)
    second = tl.where(turned, (b * c + a * s).to(second.dtype), second)

    target = out + (token * HEADS_Q + head) * DIM + column
    tl.store(target, first, mask=inside & (head < HEADS_Q))
    tl.store(target + half_dim, second, mask=inside & (head < HEADS_Q))

    slot = tl.load(slots + token)
    if slot >= 0:
        keys_values = (head >= HEADS_Q) & (head < HEADS_Q + 2 * HEADS_KV)
        kept = inside & keys_values
        block, position = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        # k|v and head in one: keys' heads, then values'.
        head_slot = (head - HEADS_Q) * BLOCK_SIZE + position
        place = layer_pool + block * block_stride + head_slot * DIM + column
        if LARGEST > 0.0:
            x, y = first.to(tl.float32), second.to(tl.float32)
            most = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))[:, None]
            inverse = LARGEST / tl.where(most > 0.0, most, 1.0)
            # Rounding may carry the largest past the end of the type.
            x = tl.clamp(x * inverse, -LARGEST, LARGEST)
            y = tl.clamp(y * inverse, -LARGEST, LARGEST)
            if layer_pool.dtype.element_ty == tl.int8:
                # Casts truncate; half away from zero.
                x = tl.where(x >= 0.0, x + 0.5, x - 0.5)
                y = tl.where(y >= 0.0, y + 0.5, y - 0.5)
            tl.store(place, x.to(layer_pool.dtype.element_ty), mask=kept)
            tl.store(place + half_dim, y.to(layer_pool.dtype.element_ty), mask=kept)
            tl.store(layer_scales + block * scale_block_stride + head_slot, most / LARGEST, mask=keys_values)
        else:
            tl.store(place, first, mask=kept)
            tl.store(place + half_dim, second, mask=kept)


def rope_kv_write(
    qkv: Tensor, rotation: tuple[Tensor, Tensor], slots: Tensor, kv: PagedKV, norm: tuple[Tensor, float] | None = None
) -> Tensor:
    """Writes the step's keys and values into the pool and returns its queries, [T, H, D].

    Args:
        qkv: [T, H + 2 Hkv, D].
        rotation: cos and sin, float32 [T, 1, D].
        slots: int64 [T].
        norm: weight [H + Hkv, D] and eps of the heads' norm.

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    pool, layer, scales = kv
    weight, eps = (None, 0.0) if norm is None else norm
    heads, kv_heads, block_size = _check(qkv, rotation, slots, kv, norm)
    tokens, all_heads, dim = qkv.shape
    out = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        rope_kv_write_kernel[(tokens, triton.cdiv(all_heads, HEADS))](
            qkv,
            weight,
            *rotation,
            slots,
            pool[:, layer],
            None if scales is None else scales[:, layer],
            out,
            eps,
            pool.stride(0),
            0 if scales is None else scales.stride(0),
            HEADS_Q=heads,
            HEADS_KV=kv_heads,
            DIM=dim,
            BLOCK_SIZE=block_size,
            LARGEST=0.0 if scales is None else LARGEST[pool.dtype],
            HAS_NORM=norm is not None,
            HEADS=HEADS,
            HALF=triton.next_power_of_2(dim // 2),
            num_warps=4,
        )
    return out


def _check(
    qkv: Tensor, rotation: tuple[Tensor, Tensor], slots: Tensor, kv: PagedKV, norm: tuple[Tensor, float] | None
) -> tuple[int, int, int]:
    """(H, Hkv, block size) of arguments that fit one another."""
    pool, layer, scales = kv
    if pool.dim() != 6 or pool.shape[2] != 2 or not pool.is_contiguous():
        raise ValueError(f"pool is {list(pool.shape)}; allowed: [block, layer, 2, Hkv, slot, D], contiguous")
    _, layers, _, kv_heads, block_size, dim = pool.shape
    if not 0 <= layer < layers:
        raise ValueError(f"layer is {layer}; allowed: 0 to {layers - 1}")
    if qkv.dim() != 3 or qkv.shape[2] != dim or dim % 2 or qkv.shape[1] <= 2 * kv_heads or not qkv.is_contiguous():
        raise ValueError(f"qkv is {list(qkv.shape)}; allowed: [T, more than {2 * kv_heads}, {dim}], contiguous, D even")
    tokens, heads = qkv.shape[0], qkv.shape[1] - 2 * kv_heads
    quantized = pool.dtype in LARGEST
    if not quantized and pool.dtype != qkv.dtype:
        raise ValueError(f"pool is {pool.dtype}; allowed: {qkv.dtype}, torch.int8, torch.float8_e4m3fn")
    if quantized != (scales is not None):
        raise ValueError(f"scales are {'missing' if quantized else 'given'} for a pool of {pool.dtype}")
    if scales is not None:
        check_placed("scales", scales, tuple(pool.shape[:5]), qkv)
    for name, angles in zip(("cos", "sin"), rotation, strict=True):
        check_placed(name, angles, (tokens, 1, dim), qkv)
        if angles.dtype != torch.float32:
            raise ValueError(f"{name} is {angles.dtype}; allowed: torch.float32")
    check_placed("slots", slots, (tokens,), qkv)
    if slots.dtype != torch.int64:
        raise ValueError(f"slots is {slots.dtype}; allowed: torch.int64")
    if norm is not None:
        check_tensor("norm weight", norm[0], (heads + kv_heads, dim), qkv)
    return heads, kv_heads, block_size
