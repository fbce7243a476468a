"""Attention over latents on the native kernels: passes the description of a step to them through ctypes.

Queries, latents and results of a step are float32; the pools are float32, bfloat16 or int8 with scales. The operations
are `reference.latent_attention`, `reference.head_products` and `kv_codes.quantize`.
"""

import ctypes

import torch
from torch import Tensor

from kvrelay.kernels.cpu.attention import POOL_TYPES, AttentionStep, supports
from kvrelay.kernels.cpu.program import fields

WRITE = "kvrelay_latent_write"
"""Name of the kernel that writes a step's latents and rotated keys into the pools."""
PRODUCTS = "kvrelay_head_products"
"""Name of the kernel that multiplies each head's numbers with weights of its own."""
ATTEND = "kvrelay_latent_attention"
"""Name of the kernel that attends, after WRITE has written."""


class WriteArgs(ctypes.Structure):
    """`LatentWriteArgs` in latent.h."""

    _fields_ = fields(ctypes.c_void_p, "step latents rotated latent_pool rotated_pool")


class ProductsArgs(ctypes.Structure):
    """`HeadProductsArgs` in latent.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "step in weight out"),
        *fields(ctypes.c_int64, "in_token in_head out_token out_head inputs outputs bf16"),
    )


class AttendArgs(ctypes.Structure):
    """`LatentArgs` in latent.h."""

    _fields_ = (*fields(ctypes.c_void_p, "step query out latent_pool rotated_pool"), ("scale", ctypes.c_float))


class Shape(ctypes.Structure):
    """`LatentShape` in latent.h."""

    _fields_ = (
        *fields(ctypes.c_int32, "heads latent rotated block_size"),
        *fields(ctypes.c_int64, "latent_stride rotated_stride"),
        *fields(ctypes.c_int32, "kv_type threads"),
    )


class LatentAttention(AttentionStep):
    """The pools of latents and of rotated keys, and the current step, as the kernels see them. Not thread-safe."""

    def __init__(self, library: ctypes.CDLL, latents: Tensor, rotated: Tensor, heads: int, threads: int) -> None:
        """
        Args:
            latents: [block, layer, 1, slot, 1, C] of the pool, its last three dimensions contiguous; codes of int8 are
                followed by their scales, bfloat16 [slot].
            rotated: the same of rotated keys, [block, layer, 1, slot, 1, R].
            heads: query heads.
            threads: that share the work of a step.

        Raises:
            ValueError: the pools have another type.
            MemoryError: no memory for the step.
        """
        if not supports(latents.dtype) or latents.dtype != rotated.dtype:
            raise ValueError(f"pools are {latents.dtype} and {rotated.dtype}; allowed: one of {POOL_TYPES} for both")
        self._latents, self._rotated = latents, rotated
        shape = Shape(
            heads,
            latents.shape[5],
            rotated.shape[5],
            latents.shape[3],
            latents.stride(0),
            rotated.stride(0),
            POOL_TYPES.index(latents.dtype),
            threads,
        )
        super().__init__(library, "latent", ctypes.byref(shape))

    def write(self, layer: int, rotated_layer: int, latents: Tensor, rotated: Tensor) -> WriteArgs:
        """Arguments of WRITE: float32 latents [T, C] and rotated keys [T, R]. The caller keeps all tensors."""
        pools = self._pools(layer, rotated_layer)
        return WriteArgs(self._step, latents.data_ptr(), rotated.data_ptr(), *pools)

    def products(self, numbers: Tensor, weight: Tensor, out: Tensor) -> ProductsArgs:
        """Arguments of PRODUCTS for the step's tokens.

        Args:
            numbers: float32 [T, H, K], the last dimension contiguous.
            weight: contiguous float32 or bfloat16 [H, K, N].
            out: float32 [T, H, N], the last dimension contiguous.
        """
        _, inputs, outputs = weight.shape
        return ProductsArgs(
            self._step,
            numbers.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *numbers.stride()[:2],
            *out.stride()[:2],
            inputs,
            outputs,
            int(weight.dtype == torch.bfloat16),
        )

    def attend(self, layer: int, rotated_layer: int, query: Tensor, out: Tensor, scale: float) -> AttendArgs:
        """Arguments of ATTEND: contiguous float32 queries [T, H, C + R] and results [T, H, C]."""
        pools = self._pools(layer, rotated_layer)
        return AttendArgs(self._step, query.data_ptr(), out.data_ptr(), *pools, scale)

    def _pools(self, layer: int, rotated_layer: int) -> tuple[int, int]:
        return self._latents[0, layer].data_ptr(), self._rotated[0, rotated_layer].data_ptr()
