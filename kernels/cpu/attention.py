"""Paged attention on the native kernels: passes the description of a step to them through ctypes.

Queries, keys, values and results of a step are float32; the pool is float32, bfloat16 or int8 with scales. The
operations are `reference.rms_norm`, `rope` and `paged_attention`, and `kv_codes.quantize`.
"""

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.kernels.cpu.program import Buffer, fields

Indices = NDArray[np.integer[Any]]

WRITE = "kvrelay_rope_kv_write"
"""Name of the kernel that norms and rotates queries and keys in place, and writes keys and values into the pool."""
ATTEND = "kvrelay_attention"
"""Name of the kernel that attends, after WRITE has written."""

POOL_TYPES = (torch.float32, torch.bfloat16, torch.int8)
"""Types of the pool, in the order of `KVType` in attention.h."""


class AttentionArgs(ctypes.Structure):
    """The arguments of both kernels for one layer; `AttentionArgs` in attention.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "step qkv out pool norm sinks"),
        *fields(ctypes.c_int64, "qkv_stride out_stride"),
        *fields(ctypes.c_float, "eps softcap"),
        ("worklist", ctypes.c_int32),
        ("rotation", ctypes.c_int64),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_int32, "heads kv_heads head_dim block_size"),
        *fields(ctypes.c_int64, "block_stride plane_stride"),
        *fields(ctypes.c_int32, "kv_type threads"),
    )


class AttentionStep:
    """The current step, as the kernels of one kind of attention hold it."""

    def __init__(self, library: ctypes.CDLL, kind: str, *arguments: Any) -> None:
        """
        Args:
            kind: begins the names of the kernels' functions.
            arguments: of the function that makes a step.

        Raises:
            MemoryError: no memory for the step.
        """
        make, self._plan, free = (getattr(library, f"kvrelay_{kind}_{name}") for name in ("new", "plan", "free"))
        make.restype, self._plan.restype = ctypes.c_void_p, ctypes.c_bool
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._plan.argtypes = pointer, number, pointer, pointer, pointer, number
        self._copies = Buffer(np.int64)
        step = make(*arguments)
        if step is None:
            raise MemoryError
        self._step = ctypes.c_void_p(step)
        self.step: int = step
        """Address of the step, for kernels that begin the next one."""
        # Not at exit, when a thread may still be in a step.
        weakref.finalize(self, free, self._step).atexit = False

    def plan(self, starts: Indices, lengths: Indices, block_tables: Indices) -> None:
        """Begins a step.

        Args:
            starts: [R] tokens of each row's sequence that are already in the pool.
            lengths: [R] tokens of each row in this step.
            block_tables: [R, W].

        Raises:
            MemoryError: no memory for the work lists.
        """
        rows, width = block_tables.shape
        copies, address = self._copies.take(rows * (2 + width)), self._copies.address
        copies[:rows], copies[rows : 2 * rows] = starts, lengths
        copies[2 * rows :].reshape(rows, width)[:] = block_tables
        if not self._plan(self._step, rows, address, address + 8 * rows, address + 16 * rows, width):
            raise MemoryError


class PagedAttention(AttentionStep):
    """A pool and the current step, as the kernels see them. Not thread-safe."""

    def __init__(self, library: ctypes.CDLL, pool: Tensor, heads: int, windows: Sequence[int], threads: int) -> None:
        """
        Args:
            pool: [block, layer, k|v, slot, Hkv, D], float32, bfloat16 or int8, its last three dimensions contiguous.
                Those of int8 are followed by their scales, bfloat16 [slot, Hkv].
            heads: query heads.
            windows: of each layer; see `reference.paged_attention`.
            threads: that share the work of a step.

        Raises:
            ValueError: the pool has another type.
            MemoryError: no memory for the step.
        """
        if not supports(pool.dtype):
            raise ValueError(f"pool is {pool.dtype}; allowed: {', '.join(map(str, POOL_TYPES))}")
        self._library = library
        self._pool = pool
        self._heads = heads
        self._windows = tuple(windows)
        self._distinct = sorted(set(windows))
        self._rotation: tuple[Tensor, Tensor] | None = None
        _, _, _, block_size, kv_heads, head_dim = pool.shape
        shape = _Shape(
            heads,
            kv_heads,
            head_dim,
            block_size,
            pool.stride(0),
            pool.stride(2),
            POOL_TYPES.index(pool.dtype),
            threads,
        )
        distinct = (ctypes.c_int64 * len(self._distinct))(*self._distinct)
        super().__init__(library, "attention", ctypes.byref(shape), distinct, ctypes.c_int64(len(distinct)))

    def rotate(self, cos: Tensor, sin: Tensor, by_position: bool = False) -> None:
        """Sets rotations, float32 [R, positions or T, 1, D]; see `reference.rotations`. Before the first call,
        queries and keys are not rotated.

        Args:
            by_position: they are those of positions 0, 1, 2 ... in the steps that are planned from now on; else those
                of the tokens of the step that was planned last.
        """
        self._rotation = cos.contiguous(), sin.contiguous()
        addresses = (ctypes.c_void_p(x.data_ptr()) for x in self._rotation)
        stride = ctypes.c_int64(cos[0].numel())
        self._library.kvrelay_attention_rotate(self._step, *addresses, stride, by_position)

    def args(
        self,
        layer: int,
        qkv: int,
        qkv_stride: int,
        out: int,
        out_stride: int,
        norm: Tensor | None,
        eps: float,
        rotation: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> AttentionArgs:
        """The kernels' arguments for layer `layer`, in this and any later step. The caller keeps all buffers.

        Args:
            qkv: address of float32 [T, H + 2 Hkv, D]: all queries, then all keys, then all values. Queries and keys
                are overwritten.
            qkv_stride: numbers from one token to the next.
            out: address of float32 [T, H, D].
            norm: float32 [H + Hkv, D], or None.
            rotation: index among those of `rotate`.
            softcap: see `reference.paged_attention`; 0 for none.
            sinks: float32 [H], or None.
        """
        return AttentionArgs(
            step=self._step,
            qkv=qkv,
            out=out,
            pool=self._pool[0, layer].data_ptr(),
            norm=None if norm is None else norm.data_ptr(),
            qkv_stride=qkv_stride,
            out_stride=out_stride,
            sinks=None if sinks is None else sinks.data_ptr(),
            eps=eps,
            softcap=softcap,
            worklist=self._distinct.index(self._windows[layer]),
            rotation=rotation,
        )


def supports(dtype: torch.dtype) -> bool:
    """Whether the kernels read a pool of this type."""
    return dtype in POOL_TYPES
