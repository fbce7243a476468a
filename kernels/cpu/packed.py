"""Linear layers on the native kernels; `native/linear.h` has the format and what is fused with a product."""

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

import torch
from torch import Tensor

from kvrelay.kernels.codes import CodedWeight
from kvrelay.kernels.cpu.program import Program, Team, fields

LINEAR = "kvrelay_linear"
EMBED = "kvrelay_embed"
ARGMAX = "kvrelay_argmax"

BLOCK = 16
"""The two halves of a gated product must each have a multiple of this many outputs."""
ROUNDING = 6
"""Type of int8 weights whose inputs are rounded too."""
CHUNK_BYTES = 256 * 2**20


class Epilogue(IntEnum):
    """What happens to a product y."""

    STORE = 0
    """out = y."""
    ADD = 1
    """out += y."""
    SILU_MUL = 2
    """out = silu(first half of y) * second half of y."""


def weight_type(weight: Tensor | CodedWeight) -> int:
    """`WeightType` in linear.h."""
    if isinstance(weight, CodedWeight):
        return ROUNDING if weight.round_inputs else int(weight.type)
    return int(weight.dtype == torch.bfloat16)


class LinearArgs(ctypes.Structure):
    """`LinearArgs` in linear.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows weight scales zeros bias norm input out workspace"),
        *fields(ctypes.c_int64, "input_stride out_stride inputs outputs group"),
        ("eps", ctypes.c_float),
        *fields(ctypes.c_int32, "type epilogue"),
    )


class EmbedArgs(ctypes.Structure):
    """`EmbedArgs` in rows.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows tokens weight scales zeros out"),
        *fields(ctypes.c_int64, "out_stride width group"),
        *fields(ctypes.c_int32, "type packed"),
    )


class ArgmaxArgs(ctypes.Structure):
    """`ArgmaxArgs` in rows.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows input"),
        *fields(ctypes.c_int64, "input_stride width"),
        *fields(ctypes.c_void_p, "tokens largest"),
    )


class Arena:
    """Allocates from a few large pages, in the order of the calls; each tensor keeps its chunk of memory alive."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """uint8 [size], aligned to a cache line."""
        taken = -(-size // 64) * 64
        if taken > len(self._chunk):
            # The unused end of a chunk costs no memory, because nothing is ever written there.
            pages = mmap.mmap(-1, max(taken, CHUNK_BYTES), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without large pages
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._chunk = torch.frombuffer(pages, dtype=torch.uint8)
        part, self._chunk = self._chunk[:size], self._chunk[taken:]
        return part


class PackedLinear:
    """`x [T, in] -> x @ weight.T + bias [T, out]`, alone or in a program. Keeps no reference to `weight`."""

    def __init__(self, team: Team, arena: Arena, weight: Tensor | CodedWeight, bias: Tensor | None) -> None:
        """
        Args:
            weight: float32, bfloat16 or codes [out, in].
            bias: [out] or None.
        """
        library = team.library
        numbers = weight.codes if isinstance(weight, CodedWeight) else weight
        self.outputs, self.inputs = numbers.shape
        self.type = weight_type(weight)
        self._team = team
        library.kvrelay_packed_bytes.restype = ctypes.c_int64
        library.kvrelay_linear_workspace.restype = ctypes.c_int64
        shape = ctypes.c_int64(self.outputs), ctypes.c_int64(self.inputs)
        self.packed = arena.take(library.kvrelay_packed_bytes(*shape, self.type))
        numbers = numbers.contiguous()
        library.kvrelay_pack(
            ctypes.c_void_p(numbers.data_ptr()), *shape, self.type, ctypes.c_void_p(self.packed.data_ptr())
        )
        self.group, self.scales, self.zeros = 0, None, None
        if isinstance(weight, CodedWeight):
            block = library.kvrelay_block_outputs()
            self.group, self.scales = weight.group, _by_block(arena, weight.scales, block)
            self.zeros = None if weight.zeros is None else _by_block(arena, weight.zeros, block)
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = torch.zeros(-(-self.outputs // BLOCK) * BLOCK)
            self.bias[: self.outputs] = bias
        workspace = library.kvrelay_linear_workspace(ctypes.c_int64(self.inputs), self.type)
        self.workspace_bytes = 4 * team.threads * workspace

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight with its scales."""
        return sum(part.nbytes for part in (self.packed, self.scales, self.zeros) if part is not None)

    def args(self, epilogue: Epilogue, norm: Tensor | None = None, eps: float = 0.0) -> LinearArgs:
        """The arguments, without rows, input, output and workspace.

        Args:
            norm: float32 [in], weights of an RMS norm of the input; the caller keeps it.
        """
        return LinearArgs(
            weight=self.packed.data_ptr(),
            scales=_address(self.scales),
            zeros=_address(self.zeros),
            group=self.group,
            bias=None if self.bias is None else self.bias.data_ptr(),
            norm=None if norm is None else norm.data_ptr(),
            inputs=self.inputs,
            outputs=self.outputs,
            eps=eps,
            type=self.type,
            epilogue=epilogue,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """The product with `x`, which is float32 or of the weights' type; the result has x's type."""
        rows = ctypes.c_int64(len(x))
        source = x.float().contiguous()
        out = torch.empty(len(x), self.outputs)
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8)
        args = self.args(Epilogue.STORE)
        args.rows = ctypes.addressof(rows)
        args.input, args.input_stride = source.data_ptr(), source.stride(0)
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        args.workspace = workspace.data_ptr()
        self._team.run(Program(self._team.library, (LINEAR, args)))
        return out.to(x.dtype)


def packer(team: Team) -> Callable[[Tensor | CodedWeight, Tensor | None], PackedLinear]:
    """`Ops.linear` that packs for `team`; all its weights are in one arena."""
    arena = Arena()
    return lambda weight, bias: PackedLinear(team, arena, weight, bias)


def _by_block(arena: Arena, x: Tensor, block: int) -> Tensor:
    """`x` [out, groups] as [blocks, groups, outputs of a block], padded with zeros."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % block)).view(-1, block, x.shape[1]).transpose(1, 2)
    return arena.take(padded.numel() * x.itemsize).view(x.dtype).view(padded.shape).copy_(padded)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
