"""Linear layers by the native kernels; `native/linear.h` has the format and what is fused with a product."""

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

import torch
from torch import Tensor

from kvrelay.kernels.cpu.program import Program, Team

LINEAR = "kvrelay_linear"
EMBED = "kvrelay_embed"
ARGMAX = "kvrelay_argmax"

BLOCK = 16
"""Outputs of a gated product's halves are a multiple of this."""
CHUNK_BYTES = 256 * 2**20


class Epilogue(IntEnum):
    """What becomes of a product y."""

    STORE = 0
    """out = y."""
    ADD = 1
    """out += y."""
    SILU_MUL = 2
    """out = silu(first half of y) * second half of y."""


class LinearArgs(ctypes.Structure):
    """`LinearArgs` in linear.h."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("input", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("type", ctypes.c_int32),
        ("epilogue", ctypes.c_int32),
    )


class EmbedArgs(ctypes.Structure):
    """`EmbedArgs` in rows.h."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("packed", ctypes.c_int32),
    )


class ArgmaxArgs(ctypes.Structure):
    """`ArgmaxArgs` in rows.h."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("input", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("largest", ctypes.c_void_p),
    )


class Arena:
    """Memory that is taken once and kept as long as a tensor in it: few large pages, in the order of taking."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """uint8 [size], on a cache line of its own."""
        taken = -(-size // 64) * 64
        if taken > len(self._chunk):
            # What a chunk has left over is never written to, so it isn't in memory.
            room = mmap.mmap(-1, max(taken, CHUNK_BYTES), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without large pages
                room.madvise(mmap.MADV_HUGEPAGE)
            self._chunk = torch.frombuffer(room, dtype=torch.uint8)
        part, self._chunk = self._chunk[:size], self._chunk[taken:]
        return part


class PackedLinear:
    """`x [T, in] -> x @ weight.T + bias [T, out]`, for programs to multiply with. Keeps no reference to `weight`."""

    def __init__(self, team: Team, arena: Arena, weight: Tensor, bias: Tensor | None) -> None:
        """
        Args:
            weight: float32 or bfloat16 [out, in].
            bias: [out] or None.
        """
        library = team.library
        self.outputs, self.inputs = weight.shape
        self.type = int(weight.dtype == torch.bfloat16)
        self._team = team
        library.kvrelay_packed_bytes.restype = ctypes.c_int64
        library.kvrelay_linear_scratch.restype = ctypes.c_int64
        shape = ctypes.c_int64(self.outputs), ctypes.c_int64(self.inputs)
        self.packed = arena.take(library.kvrelay_packed_bytes(*shape, self.type))
        weight = weight.contiguous()
        library.kvrelay_pack(
            ctypes.c_void_p(weight.data_ptr()), *shape, self.type, ctypes.c_void_p(self.packed.data_ptr())
        )
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = torch.zeros(-(-self.outputs // BLOCK) * BLOCK)
            self.bias[: self.outputs] = bias
        self.scratch_bytes = 4 * team.threads * library.kvrelay_linear_scratch(ctypes.c_int64(self.inputs))

    def args(self, epilogue: Epilogue, norm: Tensor | None = None, eps: float = 0.0) -> LinearArgs:
        """The arguments but for rows, input, output and scratch.

        Args:
            norm: float32 [in], of an RMS norm ahead; the caller's to keep.
        """
        return LinearArgs(
            weight=self.packed.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            norm=None if norm is None else norm.data_ptr(),
            inputs=self.inputs,
            outputs=self.outputs,
            eps=eps,
            type=self.type,
            epilogue=epilogue,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """`x` is float32 or of the weights' type; what it gives is of x's."""
        rows = ctypes.c_int64(len(x))
        source = x.float().contiguous()
        out = torch.empty(len(x), self.outputs)
        scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8)
        args = self.args(Epilogue.STORE)
        args.rows = ctypes.addressof(rows)
        args.input, args.input_stride = source.data_ptr(), source.stride(0)
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        args.scratch = scratch.data_ptr()
        self._team.run(Program(self._team.library, (LINEAR, args)))
        return out.to(x.dtype)


def packer(team: Team) -> Callable[[Tensor, Tensor | None], PackedLinear]:
    """`Ops.linear` that packs for `team`, one weight behind the other."""
    arena = Arena()
    return lambda weight, bias: PackedLinear(team, arena, weight, bias)
