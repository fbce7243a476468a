"""The decoder as a program of native CPU kernels, recorded once: the same mathematics as `Decoder`, in float32.

A layer is six instructions:

    qkv        norm of residual, projection, bias
    write      norm and rotation of queries and keys; keys and values into the pool
    attention
    output     projection, added to residual
    mlp        norm of residual, gate and up, silu(gate) * up
    down       projection, added to residual

Activations are float32 in kept buffers, whatever the type of weights and KV; the buffers grow to the largest step.
"""

import ctypes
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from kvrelay.engine.attention.protocol import Attention, HeadNorm, Rotation
from kvrelay.engine.attention.watched import WatchedAttention
from kvrelay.engine.batch import ForwardBatch
from kvrelay.engine.models.config import ModelConfig
from kvrelay.engine.models.decoder import Weights
from kvrelay.engine.models.rope import rotations
from kvrelay.kernels.cpu.packed import (
    ARGMAX,
    BLOCK,
    EMBED,
    LINEAR,
    Arena,
    ArgmaxArgs,
    EmbedArgs,
    Epilogue,
    LinearArgs,
    PackedLinear,
)
from kvrelay.kernels.cpu.program import Program, Team
from kvrelay.kernels.ops import Linear

ROW_PADDING = 16
"""Rows of a buffer lie so many numbers further apart than they are long, lest all fall into one set of a cache."""


class RecordableAttention(Protocol):
    """An attention backend whose kernels go into programs."""

    def set_rotation(self, rotation: Rotation) -> None:
        """The angles of the step that was planned last."""
        ...

    def record(
        self, layer: int, qkv: int, qkv_stride: int, out: int, out_stride: int, norm: HeadNorm | None
    ) -> list[tuple[str, ctypes.Structure]]:
        """The kernels of one layer and their arguments, good for every step.

        Args:
            qkv: address of float32 [T, (H + 2 Hkv) * D]; rows are `qkv_stride` numbers apart.
            out: address of float32 [T, H * D].
        """
        ...


def fits(config: ModelConfig) -> bool:
    """Whether a model's shape is one that the kernels take: gate and up end at a block's border."""
    return config.intermediate_size % BLOCK == 0


class NativeDecoder:
    """A model, ready to run. Not thread-safe."""

    def __init__(self, config: ModelConfig, weights: Weights, attention: RecordableAttention, team: Team) -> None:
        """
        Args:
            weights: their linear layers were made by `kernels.cpu.packed.packer(team)`.
        """
        self.config = config
        # A tied embedding is looked up in the packed head, and so held once.
        self._embedding = None if config.tie_embeddings else weights.embedding
        self._layers = weights.layers
        self._frequencies = weights.frequencies
        self._attention = attention
        self._team = team
        self._norms = [(layer.input_norm.float(), layer.mlp_norm.float()) for layer in weights.layers]
        self._last_norm = weights.norm.float()
        self._head = _packed(weights.head)
        self._rows = ctypes.c_int64()
        self._tokens = ctypes.c_void_p()
        self._record(64)
        self._logits = torch.empty(0, self._head.outputs)

    def forward(self, batch: ForwardBatch, attention: Attention) -> Tensor:
        """As `Decoder.forward`; float32 [T, hidden], good until the next call.

        Args:
            attention: the one that this was made with.
        """
        count = len(batch.tokens)
        if count > len(self._residual):
            self._record(max(count, 2 * len(self._residual)))
        self._rows.value = count
        self._tokens.value = batch.tokens.data_ptr()
        self._attention.set_rotation(Rotation(*rotations(self._frequencies, batch.positions)))
        if isinstance(attention, WatchedAttention):
            self._run_in_parts(attention)
        else:
            self._team.run(self._program)
        return self._residual[:count, : self.config.hidden_size]

    def _run_in_parts(self, watched: WatchedAttention) -> None:
        """The same program, with a stop after each layer that is told of."""
        begin = 0
        for layers in watched.borders:
            end = self._layer_ends[layers - 1]
            self._team.run(Program(self._team.library, *self._steps[begin:end]))
            watched.passed(layers)
            begin = end
        self._team.run(Program(self._team.library, *self._steps[begin:]))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab] of rows of `forward`'s result, [N, hidden]; good until the next call."""
        count = len(hidden)
        if count > len(self._logits):
            self._logits = torch.empty(max(count, 2 * len(self._logits)), self._head.outputs)
        self._rows.value = count
        args = self._head.args(Epilogue.STORE, self._last_norm, self.config.norm_eps)
        self._connect(args, hidden, self._logits)
        self._team.run(Program(self._team.library, (LINEAR, args)))
        return self._logits[:count]

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As `Decoder.largest`."""
        count, width = logits.shape
        values, tokens = torch.empty(count), torch.empty(count, dtype=torch.int64)
        self._rows.value = count
        args = ArgmaxArgs(
            rows=ctypes.addressof(self._rows),
            input=logits.data_ptr(),
            input_stride=logits.stride(0),
            width=width,
            tokens=tokens.data_ptr(),
            largest=values.data_ptr(),
        )
        self._team.run(Program(self._team.library, (ARGMAX, args)))
        return values, tokens

    def _record(self, capacity: int) -> None:
        """Makes the program anew, with buffers for steps of up to `capacity` tokens."""
        config, layers = self.config, self._layers
        heads = config.heads * config.head_dim
        # Rows of a tile are pages apart: large pages, or every line looked at costs a look-up of its page.
        arena = Arena()
        self._residual = _buffer(arena, capacity, config.hidden_size)
        self._qkv = _buffer(arena, capacity, heads + 2 * config.kv_heads * config.head_dim)
        self._heads = _buffer(arena, capacity, heads)
        self._inner = _buffer(arena, capacity, config.intermediate_size)
        self._workspace = arena.take(max(linear.workspace_bytes for linear in self._linears()))
        steps: list[tuple[str, ctypes.Structure]] = [(EMBED, self._embed())]
        self._layer_ends: list[int] = []
        for index, layer in enumerate(layers):
            input_norm, mlp_norm = self._norms[index]
            qkv = self._linear(layer.qkv, Epilogue.STORE, input_norm)
            output = self._linear(layer.output, Epilogue.ADD)
            mlp = self._linear(layer.gate_up, Epilogue.SILU_MUL, mlp_norm)
            down = self._linear(layer.down, Epilogue.ADD)
            self._connect(qkv, self._residual, self._qkv)
            self._connect(output, self._heads, self._residual)
            self._connect(mlp, self._residual, self._inner)
            self._connect(down, self._inner, self._residual)
            attention = self._attention.record(
                index,
                self._qkv.data_ptr(),
                self._qkv.stride(0),
                self._heads.data_ptr(),
                self._heads.stride(0),
                layer.qk_norm,
            )
            steps += [(LINEAR, qkv), *attention, (LINEAR, output), (LINEAR, mlp), (LINEAR, down)]
            self._layer_ends.append(len(steps))
        self._steps = steps
        self._program = Program(self._team.library, *steps)

    def _linears(self) -> Iterator[PackedLinear]:
        for layer in self._layers:
            yield from map(_packed, (layer.qkv, layer.output, layer.gate_up, layer.down))
        yield self._head

    def _embed(self) -> EmbedArgs:
        table = self._embedding
        return EmbedArgs(
            rows=ctypes.addressof(self._rows),
            tokens=ctypes.addressof(self._tokens),
            weight=self._head.packed.data_ptr() if table is None else table.data_ptr(),
            out=self._residual.data_ptr(),
            out_stride=self._residual.stride(0),
            width=self.config.hidden_size,
            type=self._head.type,
            packed=table is None,
        )

    def _linear(self, linear: Linear, epilogue: Epilogue, norm: Tensor | None = None) -> LinearArgs:
        return _packed(linear).args(epilogue, norm, self.config.norm_eps)

    def _connect(self, args: LinearArgs, source: Tensor, out: Tensor) -> None:
        args.rows = ctypes.addressof(self._rows)
        args.input, args.input_stride = source.data_ptr(), source.stride(0)
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        args.workspace = self._workspace.data_ptr()


def _packed(linear: Linear) -> PackedLinear:
    if not isinstance(linear, PackedLinear):
        raise TypeError(f"a linear layer is {type(linear).__name__}; a native decoder takes PackedLinear")
    return linear


def _buffer(arena: Arena, rows: int, width: int) -> Tensor:
    """float32 [rows, width or more], zeros."""
    stride = -(-width // 16) * 16 + ROW_PADDING
    return arena.take(4 * rows * stride).view(torch.float32).view(rows, stride)
