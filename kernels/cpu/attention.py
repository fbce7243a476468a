"""Paged attention by the native kernels: what they are told of a step, through ctypes.

Arguments are float32 (queries, keys and values of a step, and what attention gives); the pool is float32 or bfloat16.
The operations are `reference.rms_norm`, `rope` and `paged_attention`.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]

WRITE = "kvrelay_rope_kv_write"
"""Norms and rotates queries and keys in place, and writes keys and values into the pool."""
ATTEND = "kvrelay_attention"
"""Attends, for all that WRITE wrote."""


class AttentionArgs(ctypes.Structure):
    """What both kernels are called with, once a layer; `AttentionArgs` in attention.h."""

    _fields_ = (
        ("step", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("qkv_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("pool", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("worklist", ctypes.c_int32),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("block_stride", ctypes.c_int64),
        ("kv_bf16", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """float32 numbers of T tokens in memory that somebody else keeps."""

    address: int
    stride: int
    """Numbers from one token to the next."""


class PagedAttention:
    """The kernels' view of a pool, and of the step that is under way. Not thread-safe."""

    def __init__(self, library: ctypes.CDLL, pool: Tensor, heads: int, windows: Sequence[int], threads: int) -> None:
        """
        Args:
            pool: [block, layer, k|v, slot, Hkv, D], float32 or bfloat16, contiguous.
            heads: of queries.
            windows: of each layer; see `reference.paged_attention`.
            threads: that a step's work is shared out to.

        Raises:
            ValueError: the pool's type is none of these.
            MemoryError
        """
        if not supports(pool.dtype):
            raise ValueError(f"pool is {pool.dtype}; allowed: torch.float32, torch.bfloat16")
        self._library = library
        self._pool = pool
        self._heads = heads
        self._windows = tuple(windows)
        self._distinct = sorted(set(windows))
        self._rotation: tuple[Tensor, Tensor] | None = None
        _, _, _, block_size, kv_heads, head_dim = pool.shape
        shape = _Shape(
            heads, kv_heads, head_dim, block_size, pool.stride(0), int(pool.dtype == torch.bfloat16), threads
        )
        library.kvrelay_attention_new.restype = ctypes.c_void_p
        library.kvrelay_attention_plan.restype = ctypes.c_bool
        distinct = (ctypes.c_int64 * len(self._distinct))(*self._distinct)
        step = library.kvrelay_attention_new(ctypes.byref(shape), distinct, ctypes.c_int64(len(distinct)))
        if step is None:
            raise MemoryError
        self._step = ctypes.c_void_p(step)
        # Not at exit: a thread may be in a step then.
        weakref.finalize(self, library.kvrelay_attention_free, self._step).atexit = False

    def plan(self, starts: Indices, lengths: Indices, block_tables: Indices) -> None:
        """Begins a step.

        Args:
            starts: [R] tokens of each row's sequence that are in the pool already.
            lengths: [R] tokens of each row in this step.
            block_tables: [R, W].

        Raises:
            MemoryError
        """
        starts, lengths, tables = (np.ascontiguousarray(x, np.int64) for x in (starts, lengths, block_tables))
        rows, width = tables.shape
        if not self._library.kvrelay_attention_plan(
            self._step, ctypes.c_int64(rows), *map(_address, (starts, lengths, tables)), ctypes.c_int64(width)
        ):
            raise MemoryError

    def rotate(self, cos: Tensor, sin: Tensor) -> None:
        """Sets the step's rotations, float32 [T, 1, D]; see `reference.rope`."""
        self._rotation = cos.contiguous(), sin.contiguous()
        addresses = (ctypes.c_void_p(x.data_ptr()) for x in self._rotation)
        self._library.kvrelay_attention_rotate(self._step, *addresses)

    def args(self, layer: int, qkv: Buffer, out: Buffer, norm: Tensor | None, eps: float) -> AttentionArgs:
        """What layer `layer`'s kernels are called with, in this and any later step.

        Args:
            qkv: [T, H + 2 Hkv, D]: all queries, then all keys, then all values. Queries and keys are overwritten.
            out: [T, H, D].
            norm: float32 [H + Hkv, D], kept by the caller; None for none.
        """
        page = self._pool[0, layer]
        return AttentionArgs(
            self._step,
            qkv.address,
            qkv.stride,
            out.address,
            out.stride,
            page.data_ptr(),
            None if norm is None else norm.data_ptr(),
            eps,
            self._distinct.index(self._windows[layer]),
        )


def supports(dtype: torch.dtype) -> bool:
    """Whether the kernels read a pool of this type."""
    return dtype in (torch.float32, torch.bfloat16)


def _address(array: Indices) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
