"""The kernels of a native decoder's layers as instructions of a program, and the buffers that they compute in.

Where ranks share the layers, the output and down projections store what this rank has of their results, and the sum of
all ranks' parts is added to the residual: by an instruction if the ranks share memory, else between two programs.

Activations are float32 whatever the type of weights and KV. Their buffers are kept and grow to the largest step.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvrelay.engine.models.fast.decoder import Norm
from kvrelay.engine.models.reading.config import ModelConfig
from kvrelay.engine.ranks.collective import Collective
from kvrelay.engine.ranks.shared import SharedMemoryCollective
from kvrelay.kernels.cpu.packed import (
    LINEAR,
    NORM,
    SQUARES,
    Arena,
    Epilogue,
    LinearArgs,
    NormArgs,
    PackedLinear,
    rows_of,
)
from kvrelay.kernels.cpu.program import Program, Team
from kvrelay.kernels.cpu.reduce import ALL_REDUCE, ReduceArgs
from kvrelay.kernels.ops import Linear

Step = tuple[str, ctypes.Structure]
"""Name of a kernel and its arguments."""


@dataclass(frozen=True, slots=True)
class Tap:
    """A pause of the program in front of a layer."""

    layer: int


@dataclass(frozen=True, slots=True)
class Sum:
    """A pause of the program, in which all ranks' `part` are added up."""

    part: Tensor
    out: Tensor
    width: int
    add: bool
    """Whether the sum is added to `out`, and doesn't replace it."""


@dataclass(frozen=True, slots=True)
class Move:
    """A pause of the program, in which rows are exchanged with other ranks."""

    move: Literal["scatter", "send", "collect"]
    """The call of `Dispatch`."""
    layer: int
    """Number of the layer among those with experts."""


Pause = Sum | Move | Tap


class KernelSteps:
    """Makes the instructions of a decoder's layers, all for the number of rows in `rows`. Not thread-safe."""

    def __init__(self, config: ModelConfig, team: Team, group: Collective) -> None:
        """
        Args:
            config: of what this rank computes.
            group: the ranks that share the layers.
        """
        self.config, self.team, self.group = config, team, group
        self.shared = group if isinstance(group, SharedMemoryCollective) else None
        self.rows = ctypes.c_int64()
        gates = {"silu": Epilogue.SILU_MUL, "gelu_tanh": Epilogue.GELU_MUL}
        self.activation = gates[config.activation] if config.traits.gated else Epilogue.GELU

    def make_buffers(self, capacity: int, workspace_bytes: int) -> None:
        """Makes new buffers, for steps of up to `capacity` tokens; instructions made before write to the old ones."""
        config, traits = self.config, self.config.traits
        heads = config.heads * config.head_dim
        # The rows of a tile are far apart in memory: with small pages each cache line would cost an address look-up.
        arena = Arena()
        self.residual = rows_of(arena, capacity, config.hidden_size)
        self.qkv = rows_of(arena, capacity, heads + 2 * config.kv_heads * config.head_dim)
        self.heads = rows_of(arena, capacity, heads)
        self.inner = rows_of(arena, capacity, config.intermediate_size)
        if traits.layer_norm or traits.experts is not None:
            self.normed = rows_of(arena, capacity, config.hidden_size)
        if traits.joint_qk_norm and self.group.size > 1:
            self.squares = rows_of(arena, capacity, 2)
        if traits.norms.attention or traits.norms.mlp or self.group.size > 1:
            self.update = rows_of(arena, capacity, config.hidden_size)
        self.workspace = arena.take(workspace_bytes)

    @property
    def behind_attention(self) -> tuple[Tensor, ...]:
        """Buffers that a layer reads behind its attention, of a row for each token."""
        both = self.residual, self.heads
        return (*both, self.normed) if self.config.traits.parallel else both

    def run(self, programs: list[tuple[Program, Pause | None]], count: int) -> Iterator[Tap | Move]:
        """Runs programs for `count` rows, with the sums between them; gives the other pauses as they come."""
        for program, pause in programs:
            self.team.run(program)
            if self.shared is not None:
                self.shared.check()
            if isinstance(pause, Sum):
                self._sum_parts(pause, count)
            elif pause is not None:
                yield pause

    def _sum_parts(self, pause: Sum, count: int) -> None:
        """Adds up all ranks' parts of `count` rows."""
        total = self.group.sum(pause.part[:count, : pause.width].contiguous())
        out = pause.out[:count, : pause.width]
        if pause.add:
            out += total
        else:
            out.copy_(total)

    def cut(self, steps: list[Step | Pause]) -> list[tuple[Program, Pause | None]]:
        """Programs, and the pause behind each; none behind the last one."""
        stop = None if self.shared is None else self.shared.failure
        programs: list[tuple[Program, Pause | None]] = []
        part: list[Step] = []
        for step in (*steps, None):
            if isinstance(step, tuple):
                part.append(step)
            else:
                programs.append((Program(self.team.library, *part, stop=stop), step))
                part = []
        return programs

    def joint_norms(self, norms: tuple[Norm, ...]) -> list[Step | Sum]:
        """The kernels of the norms of all queries and of all keys, of which ranks have a part each."""
        steps: list[Step | Sum] = []
        normed, first = list[NormArgs](), 0
        for number, norm in enumerate(norms):
            part = self.qkv[:, first : (first := first + len(norm.weight))]
            args = self.norm_args(part, part, norm)
            normed.append(args)
            if self.group.size > 1:
                squares = self.squares[:, number:]
                steps.append((SQUARES, self.norm_args(part, squares, norm)))
                args.squares, args.squares_stride = squares.data_ptr(), squares.stride(0)
                # Where ranks have the same key heads, all of those count equally often.
                args.whole_width *= self.group.size
        if norms and self.group.size > 1:
            steps += self.sum(self.squares, self.squares, width=len(norms))
        return [*steps, *((NORM, args) for args in normed)]

    def sum(self, part: Tensor, out: Tensor, add: bool = False, width: int = 0) -> list[Step | Sum]:
        """Puts the sum of all ranks' parts into `out`, or adds it; nothing for a single rank.

        Args:
            width: of a row; the hidden size unless given.
        """
        width = width or self.config.hidden_size
        if self.group.size == 1:
            return []
        if self.shared is None:
            return [Sum(part, out, width, add)]
        args = ReduceArgs(
            rows=ctypes.addressof(self.rows),
            group=ctypes.addressof(self.shared.group),
            part=part.data_ptr(),
            part_stride=part.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            width=width,
            add=add,
        )
        return [(ALL_REDUCE, args)]

    def project(
        self,
        linear: Linear,
        epilogue: Epilogue,
        source: Tensor,
        out: Tensor,
        norm: Norm | None = None,
        normed: Tensor | None = None,
    ) -> list[Step]:
        """The kernels of a projection from `source` to `out`, with a norm of its input if `norm` is given.

        Args:
            normed: where a layer norm goes; the buffer of the layers unless given.
        """
        if norm is None or not self.config.traits.layer_norm:
            return [(LINEAR, self.linear(linear, epilogue, source, out, None if norm is None else norm.weight))]
        normed = self.normed if normed is None else normed
        step = self.norm_args(source, normed, norm)
        return [(NORM, step), (LINEAR, self.linear(linear, epilogue, normed, out))]

    def add(self, linear: Linear, source: Tensor, norm: Norm | None) -> list[Step | Sum]:
        """The kernels of a projection that is added to the residual, after a norm if one is given."""
        if norm is None and self.group.size == 1:
            return [*self.project(linear, Epilogue.ADD, source, self.residual)]
        update = self.update
        part = self.project(linear, Epilogue.STORE, source, update)
        if norm is None:
            return [*part, *self.sum(update, self.residual, add=True)]
        added = self.norm_args(update, self.residual, norm, add=True)
        return [*part, *self.sum(update, update), (NORM, added)]

    def norm_args(self, source: Tensor, out: Tensor, norm: Norm, add: bool = False) -> NormArgs:
        return NormArgs(
            rows=ctypes.addressof(self.rows),
            input=source.data_ptr(),
            input_stride=source.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            weight=norm.weight.data_ptr(),
            bias=None if norm.bias is None else norm.bias.data_ptr(),
            width=len(norm.weight),
            whole_width=len(norm.weight),
            eps=self.config.residual_eps,
            centered=self.config.traits.layer_norm,
            add=add,
        )

    def linear(
        self, linear: Linear, epilogue: Epilogue, source: Tensor, out: Tensor, norm: Tensor | None = None
    ) -> LinearArgs:
        """The arguments of a projection from `source` to `out`, with a norm of its input if `norm` is given."""
        args = packed(linear).args(epilogue, norm, self.config.residual_eps)
        args.rows = ctypes.addressof(self.rows)
        args.input, args.input_stride = source.data_ptr(), source.stride(0)
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        args.workspace = self.workspace.data_ptr()
        return args


def packed(linear: Linear) -> PackedLinear:
    """A linear layer as the native kernels need it.

    Raises:
        TypeError: it isn't packed.
    """
    if not isinstance(linear, PackedLinear):
        raise TypeError(f"a linear layer is {type(linear).__name__}; a native decoder takes PackedLinear")
    return linear
