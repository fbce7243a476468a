"""Everything between the QKV projection and attention in one pass: norm, rotation, and the write into paged KV.

    n[t, h]    = qkv[t, h] / sqrt(mean(qkv[t, h]^2) + eps) * weight[h]     queries and keys, if there is a norm
    r[t, h, i] = n[t, h, i] * cos[t, i] + n[t, h, (i + D/2) mod D] * sin[t, i]
    query out  = r of the first H heads;  K of the pool = r of the next Hkv;  V of the pool = qkv of the last Hkv

    qkv       [T, H + 2 Hkv, D] contiguous
    weight    [H + Hkv, D] of qkv's type or float32, or none
    cos, sin  float32 [T, 1, D], as `reference.rope` takes them (the first half of sin is negated)
    slots     int64 [T], block * block_size + position in the block; negative for a token whose KV isn't kept
    pool      [block, layer, k|v, Hkv, slot, D], of qkv's type, int8 or float8_e4m3fn
    scales    bfloat16 [block, layer, k|v, Hkv, slot], with a pool of 8 bits; `kv_codes` has the formulas
    out       [T, H, D]

Grid: (T, ceil((H + 2 Hkv) / HEADS)). Limit: memory: the projection is read; queries, keys and values are written.
Source: Su et al., arXiv:2104.09864; the norm of each head as in Qwen3, arXiv:2505.09388.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.kv_codes import LARGEST
from kvrelay.kernels.triton.checks import check_tensor
from kvrelay.kernels.triton.launch import Launch, launch
from kvrelay.kernels.triton.overlap import begin_after_inputs, overlapping
from kvrelay.kernels.triton.paged import PagedKV, check_pool

HEADS = 4
"""Number of heads of one program."""


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
    plane_stride,
    scale_block_stride,
    scale_plane_stride,
    HEADS_Q: tl.constexpr,
    HEADS_KV: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_after_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    half_dim: tl.constexpr = DIM // 2
    inside = (head < HEADS_Q + 2 * HEADS_KV) & (column < half_dim)
    source = qkv + (token * (HEADS_Q + 2 * HEADS_KV) + head) * DIM + column
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + half_dim, mask=inside, other=0.0)
    rotated = head < HEADS_Q + HEADS_KV
    a, b = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
        weights = weight + head * DIM + column
        normed = inside & rotated
        # Rounded between norm and rotation, as two separate operations would.
        a = (a * scale * tl.load(weights, mask=normed, other=0.0).to(tl.float32)).to(first.dtype).to(tl.float32)
        b = (b * scale * tl.load(weights + half_dim, mask=normed, other=0.0).to(tl.float32)).to(first.dtype)
        b = b.to(tl.float32)
    c = tl.load(cos + token * DIM + column, mask=column < half_dim, other=1.0)
    s = tl.load(sin + token * DIM + half_dim + column, mask=column < half_dim, other=0.0)
    first = tl.where(rotated, (a * c - b * s).to(first.dtype), first)
    second = tl.where(rotated, (b * c + a * s).to(second.dtype), second)

    target = out + (token * HEADS_Q + head) * DIM + column
    tl.store(target, first, mask=inside & (head < HEADS_Q))
    tl.store(target + half_dim, second, mask=inside & (head < HEADS_Q))

    slot = tl.load(slots + token)
    if slot >= 0:
        keys_values = (head >= HEADS_Q) & (head < HEADS_Q + 2 * HEADS_KV)
        kept = inside & keys_values
        block, position = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        plane = (head >= HEADS_Q + HEADS_KV).to(tl.int64)
        head_slot = (head - HEADS_Q - plane * HEADS_KV) * BLOCK_SIZE + position
        kv_target = layer_pool + block * block_stride + plane * plane_stride + head_slot * DIM + column
        if LARGEST > 0.0:
            x, y = first.to(tl.float32), second.to(tl.float32)
            # As integers, because a NaN is larger than all numbers then.
            bits = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, y.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            exact = tl.max(bits, 1)[:, None].to(tl.float32, bitcast=True) / LARGEST
            up = ((exact.to(tl.int32, bitcast=True) + 0xFFFF) & -65536).to(tl.float32, bitcast=True)
            scale = tl.where(exact == exact, tl.where(exact < 2.0**-126, 0.0, up), exact)
            divisor = tl.where(scale > 0.0, scale, float("inf"))
            # Rounding may push the largest number out of the type's range.
            x = tl.clamp(x / divisor, -LARGEST, LARGEST)
            y = tl.clamp(y / divisor, -LARGEST, LARGEST)
            if layer_pool.dtype.element_ty == tl.int8:
                # A cast truncates: this rounds, half away from zero.
                x = tl.where(x >= 0.0, x + 0.5, x - 0.5)
                y = tl.where(y >= 0.0, y + 0.5, y - 0.5)
            tl.store(kv_target, x.to(layer_pool.dtype.element_ty), mask=kept)
            tl.store(kv_target + half_dim, y.to(layer_pool.dtype.element_ty), mask=kept)
            scale_target = layer_scales + block * scale_block_stride + plane * scale_plane_stride + head_slot
            tl.store(scale_target, scale.to(tl.bfloat16), mask=keys_values)
        else:
            tl.store(kv_target, first, mask=kept)
            tl.store(kv_target + half_dim, second, mask=kept)


def rope_kv_write(
    qkv: Tensor, rotation: tuple[Tensor, Tensor], slots: Tensor, kv: PagedKV, norm: tuple[Tensor, float] | None = None
) -> Tensor:
    """As `launch_rope_kv_write`; returns the queries, [T, H, D]."""
    check_pool(kv, qkv)
    tokens, all_heads, dim = qkv.shape
    out = torch.empty(tokens, max(0, all_heads - 2 * kv.pool.shape[3]), dim, dtype=qkv.dtype, device=qkv.device)
    launch_rope_kv_write(qkv, rotation, slots, kv, norm, out)
    return out


def launch_rope_kv_write(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    slots: Tensor,
    kv: PagedKV,
    norm: tuple[Tensor, float] | None,
    out: Tensor,
) -> Launch | None:
    """Writes the step's keys and values into the pool and its queries into `out`; None if there are no tokens.

    Args:
        qkv: [T, H + 2 Hkv, D].
        rotation: cos and sin, float32 [T, 1, D].
        slots: int64 [T].
        norm: weight [H + Hkv, D] and eps of the norm of heads, or none.
        out: [T, H, D].

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    check_pool(kv, qkv)
    pool, layer, scales = kv
    kv_heads, block_size, dim = pool.shape[3:]
    if qkv.dim() != 3 or qkv.shape[2] != dim or dim % 2 or qkv.shape[1] <= 2 * kv_heads or not qkv.is_contiguous():
        raise ValueError(f"qkv is {list(qkv.shape)}; allowed: [T, more than {2 * kv_heads}, {dim}], contiguous, D even")
    tokens, all_heads, _ = qkv.shape
    heads = all_heads - 2 * kv_heads
    for name, angles in zip(("cos", "sin"), rotation, strict=True):
        check_tensor(name, angles, (tokens, 1, dim), qkv, torch.float32)
    check_tensor("slots", slots, (tokens,), qkv, torch.int64)
    weight, eps = (None, 0.0) if norm is None else norm
    if weight is not None:
        check_tensor("norm weight", weight, (heads + kv_heads, dim), qkv, qkv.dtype, torch.float32)
    check_tensor("out", out, (tokens, heads, dim), qkv)
    if not tokens:
        return None
    return launch(
        rope_kv_write_kernel,
        (tokens, triton.cdiv(all_heads, HEADS)),
        qkv,
        weight,
        *rotation,
        slots,
        pool[:, layer],
        None if scales is None else scales[:, layer],
        out,
        eps,
        pool.stride(0),
        pool.stride(2),
        0 if scales is None else scales.stride(0),
        0 if scales is None else scales.stride(2),
        HEADS_Q=heads,
        HEADS_KV=kv_heads,
        DIM=dim,
        BLOCK_SIZE=block_size,
        LARGEST=LARGEST.get(pool.dtype, 0.0),
        HAS_NORM=norm is not None,
        HEADS=HEADS,
        HALF=triton.next_power_of_2(dim // 2),
        num_warps=4,
        **overlapping(),
    )
