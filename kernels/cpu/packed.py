"""Linear layers on the native kernels; `native/linear.h` has the format and what is fused with a product."""

import ctypes
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvrelay.kernels.codes import CodedWeight
from kvrelay.kernels.cpu.program import Buffer, Program, Team, fields

LINEAR = "kvrelay_linear"
EMBED = "kvrelay_embed"
NORM = "kvrelay_norm"
SQUARES = "kvrelay_squares"

Step = tuple[str, ctypes.Structure]
"""Name of a kernel and its arguments."""
BLOCK = 16
"""Divisor of the number of outputs in each half of a gated product."""
ROUNDING = 6
"""Type of int8 weights whose inputs are rounded too."""
CHUNK_BYTES = 256 * 2**20


class Epilogue(IntEnum):
    """Operation that is fused with a product y."""

    STORE = 0
    """out = y."""
    ADD = 1
    """out += y."""
    SILU_MUL = 2
    """out = silu(first half of y) * second half of y."""
    GELU_MUL = 3
    """out = gelu(first half of y) * second half of y."""
    GELU = 4
    """out = gelu(y)."""
    CLAMPED_GATE = 5
    """out = (up + 1) * gate * sigmoid(alpha * gate), where gate, the first half of y, is at most `limit`, and up, the
    second half, between -limit and limit."""
    RELU_SQUARED = 6
    """out = max(y, 0) ** 2."""

    @property
    def is_gated(self) -> bool:
        return self in (Epilogue.SILU_MUL, Epilogue.GELU_MUL, Epilogue.CLAMPED_GATE)


def weight_type(weight: Tensor | CodedWeight) -> int:
    """`WeightType` in linear.h."""
    if isinstance(weight, CodedWeight):
        return ROUNDING if weight.round_inputs else int(weight.type)
    return int(weight.dtype == torch.bfloat16)


class LinearArgs(ctypes.Structure):
    """`LinearArgs` in linear.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows weight scales zeros minima bias norm input sources out workspace"),
        *fields(ctypes.c_int64, "input_stride out_stride inputs outputs group"),
        *fields(ctypes.c_float, "eps limit alpha"),
        *fields(ctypes.c_int32, "type epilogue"),
    )


class EmbedArgs(ctypes.Structure):
    """`EmbedArgs` in embed.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows tokens weight scales zeros minima out"),
        *fields(ctypes.c_int64, "out_stride width group first count"),
        ("type", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("packed", ctypes.c_int32),
    )


class NormArgs(ctypes.Structure):
    """`NormArgs` in norm.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows input out weight bias squares"),
        *fields(ctypes.c_int64, "input_stride out_stride squares_stride width whole_width"),
        ("eps", ctypes.c_float),
        *fields(ctypes.c_int32, "centered add bfloat16"),
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


ROW_PADDING = 16
"""Numbers of padding between two rows of a buffer: without them rows could all fall into one set of a cache."""


def rows_of(arena: Arena, rows: int, width: int) -> Tensor:
    """float32 [rows, width or more], zeros: a buffer for rows of this width."""
    stride = -(-width // 16) * 16 + ROW_PADDING
    return arena.take(4 * rows * stride).view(torch.float32).view(rows, stride)


MOST_INPUTS = 2**16
"""Limit of the inputs of a weight of codes: AMX's 32-bit sums hold the products of as many bytes, at most."""


class PackedFacts(NamedTuple):
    """Shape and format of a packed weight."""

    outputs: int
    inputs: int
    type: int
    """Type of the weight, as `weight_type`."""
    group: int
    """Number of inputs that share a scale, as `CodedWeight.group`; 0 without scales."""


class PackedLinear:
    """`x [T, in] -> x @ weight.T + bias [T, out]`, alone or in a program."""

    def __init__(
        self,
        team: Team,
        facts: PackedFacts,
        packed: Tensor,
        scales: Tensor | None = None,
        zeros: Tensor | None = None,
        minima: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """
        Args:
            packed, scales, zeros, minima, bias: as `pack` makes them.

        Raises:
            ValueError: `packed` hasn't the size of such a weight.
        """
        library = team.library
        self.facts = facts
        self.outputs, self.inputs, self.type, self.group = facts
        self.packed, self.scales, self.zeros, self.minima, self.bias = packed, scales, zeros, minima, bias
        self._team = team
        self._rows = ctypes.c_int64()
        self._called: tuple[LinearArgs, Program] | None = None
        """Arguments and program of calls, made by the first one."""
        if packed.nbytes != (size := _packed_bytes(team, facts)):
            raise ValueError(f"a packed weight has {packed.nbytes} bytes; one of {facts} has {size}")
        library.kvrelay_linear_workspace.restype = ctypes.c_int64
        workspace = library.kvrelay_linear_workspace(ctypes.c_int64(self.inputs), self.type)
        self.workspace_bytes = 4 * team.threads * workspace

    @classmethod
    def pack(cls, team: Team, arena: Arena, weight: Tensor | CodedWeight, bias: Tensor | None) -> "PackedLinear":
        """Packs a weight, and keeps no reference to it.

        Args:
            weight: float32, bfloat16 or codes [out, in].
            bias: [out] or None.

        Raises:
            ValueError: codes have more inputs than a product of integers can add up.
        """
        library = team.library
        numbers = (weight.codes if isinstance(weight, CodedWeight) else weight).contiguous()
        group = weight.group if isinstance(weight, CodedWeight) else 0
        outputs, inputs = numbers.shape
        if isinstance(weight, CodedWeight) and inputs > MOST_INPUTS:
            raise ValueError(f"a quantized weight has {inputs} inputs; allowed: up to {MOST_INPUTS}")
        facts = PackedFacts(outputs, inputs, weight_type(weight), group)
        packed = arena.take(_packed_bytes(team, facts))
        library.kvrelay_pack(
            ctypes.c_void_p(numbers.data_ptr()),
            ctypes.c_int64(facts.outputs),
            ctypes.c_int64(facts.inputs),
            facts.type,
            ctypes.c_void_p(packed.data_ptr()),
        )
        scales = zeros = minima = padded = None
        if isinstance(weight, CodedWeight):
            block = library.kvrelay_block_outputs()
            scales = _by_block(arena, weight.scales, block)
            zeros = None if weight.zeros is None else _by_block(arena, weight.zeros, block)
            minima = None if weight.minima is None else _by_block(arena, weight.minima, block)
        if bias is not None:
            padded = torch.zeros(-(-facts.outputs // BLOCK) * BLOCK)
            padded[: facts.outputs] = bias
        return cls(team, facts, packed, scales, zeros, minima, padded)

    def parts(self) -> dict[str, Tensor]:
        """All of its tensors, by the names of the constructor's arguments."""
        found = {"packed": self.packed, "scales": self.scales, "zeros": self.zeros, "minima": self.minima}
        return {name: tensor for name, tensor in {**found, "bias": self.bias}.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight with its scales."""
        return sum(part.nbytes for name, part in self.parts().items() if name != "bias")

    def args(self, epilogue: Epilogue, norm: Tensor | None = None, eps: float = 0.0) -> LinearArgs:
        """The arguments, without rows, input, output and workspace.

        Args:
            norm: float32 [in], weights of an RMS norm of the input; the caller keeps it.
        """
        return LinearArgs(
            weight=self.packed.data_ptr(),
            scales=_address(self.scales),
            zeros=_address(self.zeros),
            minima=_address(self.minima),
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
        """The product with `x`, which is float32 or of the weights' type; the result has x's type. Not thread-safe."""
        if self._called is None:
            args = self.args(Epilogue.STORE)
            args.rows = ctypes.addressof(self._rows)
            self._called = args, Program(self._team.library, (LINEAR, args))
        args, program = self._called
        source = x.float().contiguous()
        out = torch.empty(len(x), self.outputs)
        self._rows.value = len(x)
        args.input, args.input_stride = source.data_ptr(), source.stride(0)
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        args.workspace = self._team.workspace(self.workspace_bytes)
        self._team.run(program)
        return out.to(x.dtype)


class Block(Protocol):
    """Kernels that compute y of rows x, or, behind a norm, add y to x."""

    steps: tuple[Step, ...]
    workspace_bytes: int

    def aim(self, source: Tensor, out: Tensor, workspace: int) -> None:
        """Has the next run read float32 [T, in] and write float32 [T, out], both contiguous; the caller keeps them.

        Args:
            workspace: address of `workspace_bytes`.
        """
        ...


class PackedMlp:
    """`x [..., hidden] -> down(gate(up(x)))`, by one program. Not thread-safe. Implements `Block`."""

    def __init__(
        self,
        team: Team,
        up: PackedLinear,
        gate: Epilogue,
        down: PackedLinear,
        inner: "Buffer[np.float32]",
        norm: "PackedNorm | None" = None,
    ) -> None:
        """
        Args:
            up: hidden -> inner, or gates and then ups, 2 * inner.
            down: inner -> hidden.
            inner: the buffer between them, which layers that run one after the other share.
            norm: of the input; the result is added to the output then.
        """
        self._team, self._inner = team, inner
        self._up, self._down = up.args(gate, *norm_of(norm)), down.args(sum_of(norm))
        self.gate, self._kept = gate, (up, down, norm)
        self.workspace_bytes: int = max(up.workspace_bytes, down.workspace_bytes)
        self._rows = ctypes.c_int64()
        self._up.rows = self._down.rows = ctypes.addressof(self._rows)
        self._stride = -(-down.inputs // BLOCK) * BLOCK + ROW_PADDING
        self._up.out_stride = self._down.input_stride = self._stride
        self.steps: tuple[Step, ...] = (LINEAR, self._up), (LINEAR, self._down)
        self._program = Program(team.library, *self.steps)

    def behind(self, norm: "PackedNorm") -> "PackedMlp":
        """The same, of the norm of its input, added to the output."""
        up, down, _ = self._kept
        return PackedMlp(self._team, up, self.gate, down, self._inner, norm)

    def aim(self, source: Tensor, out: Tensor, workspace: int) -> None:
        """See `Block.aim`."""
        up, down = self._up, self._down
        self._rows.value = len(source)
        self._inner.take(len(source) * self._stride)
        up.input, up.input_stride = source.data_ptr(), source.stride(0)
        up.out = down.input = self._inner.address
        down.out, down.out_stride = out.data_ptr(), out.stride(0)
        up.workspace = down.workspace = workspace

    def __call__(self, x: Tensor) -> Tensor:
        """As `PackedLinear.__call__`."""
        source = x.reshape(-1, x.shape[-1]).float().contiguous()
        out = torch.empty(len(source), self._down.outputs)
        self.aim(source, out, self._team.workspace(self.workspace_bytes))
        self._team.run(self._program)
        return out.to(x.dtype).view(*x.shape[:-1], -1)


class ResidualBlocks:
    """`x + f(norm(x))` for each of several f, one behind the other, by one program. Not thread-safe."""

    def __init__(self, team: Team, blocks: Sequence[Block]) -> None:
        """
        Args:
            blocks: f behind norms; at most one is an MLP, because MLPs share a buffer.
        """
        self._team, self._blocks = team, blocks
        self._program = Program(team.library, *(step for block in blocks for step in block.steps))
        self._workspace_bytes = max(block.workspace_bytes for block in blocks)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., hidden] of x [..., hidden]; between the blocks, sums are float32."""
        sums = torch.empty(x.shape, dtype=torch.float32).copy_(x).view(-1, x.shape[-1])
        workspace = self._team.workspace(self._workspace_bytes)
        for block in self._blocks:
            block.aim(sums, sums, workspace)
        self._team.run(self._program)
        return sums.to(x.dtype).view(x.shape)


ALONE = 2**14
"""Numbers that one thread normalizes in less time than it takes to wake the others."""


class PackedNorm:
    """An RMS norm of rows `x [..., width]` in float32 or bfloat16, with results of x's type. Not thread-safe."""

    def __init__(self, team: Team, weight: Tensor, eps: float) -> None:
        self._team, self.weight, self._rows = team, weight.detach().float().contiguous(), ctypes.c_int64()
        self.eps, width = eps, len(weight)
        self._args = NormArgs(
            rows=ctypes.addressof(self._rows),
            weight=self.weight.data_ptr(),
            input_stride=width,
            out_stride=width,
            width=width,
            whole_width=width,
            eps=eps,
        )
        self._program = Program(team.library, (NORM, self._args))
        self._alone = team.library[NORM]
        self._alone.restype = None

    def __call__(self, x: Tensor) -> Tensor:
        """The norms of all rows; a new tensor.

        Raises:
            TypeError: x has another type.
        """
        if x.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"dtype is {x.dtype}; allowed: float32, bfloat16")
        source, args = x.contiguous(), self._args
        out = torch.empty_like(source)
        self._rows.value = source.numel() // args.width
        args.input, args.out = source.data_ptr(), out.data_ptr()
        args.bfloat16 = x.dtype == torch.bfloat16
        if source.numel() <= ALONE:
            self._alone(ctypes.byref(args), 0, 1)
        else:
            self._team.run(self._program)
        return out


def norm_of(norm: PackedNorm | None) -> tuple[Tensor | None, float]:
    """The arguments of `PackedLinear.args` for the norm of an input."""
    return (None, 0.0) if norm is None else (norm.weight, norm.eps)


def sum_of(norm: PackedNorm | None) -> Epilogue:
    """How the last product of a block behind a norm, or of one without, stores its result."""
    return Epilogue.STORE if norm is None else Epilogue.ADD


def packer(team: Team) -> Callable[[Tensor | CodedWeight, Tensor | None], PackedLinear]:
    """`Ops.linear` that packs for `team`; all its weights are in one arena."""
    arena = Arena()
    return lambda weight, bias: PackedLinear.pack(team, arena, weight, bias)


def _packed_bytes(team: Team, facts: PackedFacts) -> int:
    """The size of the packed weight alone, in bytes."""
    team.library.kvrelay_packed_bytes.restype = ctypes.c_int64
    shape = ctypes.c_int64(facts.outputs), ctypes.c_int64(facts.inputs)
    size: int = team.library.kvrelay_packed_bytes(*shape, facts.type)
    return size


def _by_block(arena: Arena, x: Tensor, block: int) -> Tensor:
    """`x` [out, groups] as [blocks, groups, outputs of a block], padded with zeros."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % block)).view(-1, block, x.shape[1]).transpose(1, 2)
    return arena.take(padded.numel() * x.itemsize).view(x.dtype).view(padded.shape).copy_(padded)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
