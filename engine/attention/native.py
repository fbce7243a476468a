"""Attention on the CPU by the native kernels: reads the pages in place, computes in float32."""

import ctypes
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from kvrelay.engine.attention.base import AttentionInputs, HeadNorm, LayerKV, Rotation
from kvrelay.engine.kv.pool import KVPool
from kvrelay.kernels.cpu.attention import ATTEND, WRITE, Indices, PagedAttention, supports
from kvrelay.kernels.cpu.program import Program, Team
from kvrelay.kernels.reference import rotations

__all__ = ["NativeAttention", "supports"]

LEAST_TURNED = 1024
"""Positions that rotations are computed for at first; the number doubles as sequences need more."""


class NativeAttention:
    """Implements `Attention`; a `NativeDecoder` records its kernels into a program instead of calling `run`.

    It never reads past a sequence's last token, so what other sequences left in a block does no harm.
    """

    def __init__(self, layers: Sequence[LayerKV], heads: int, team: Team) -> None:
        """
        Args:
            heads: query heads.
            team: the threads that run the kernels, here or in a program.

        Raises:
            ValueError: the kernels can't read a pool's order or type.
        """
        self._layers = tuple(layers)
        self._layout = layers[0].pool.layout
        self._team = team
        self._kernels: dict[KVPool, PagedAttention] = {}
        """Pools with their own steps: layers of one pool have one block table."""
        for pool in dict.fromkeys([layer.pool for layer in layers]):
            if pool.layout.order != "NHD":
                raise ValueError(f"KVLayout.order is {pool.layout.order}; attention on CPU takes NHD")
            own = sorted((layer for layer in layers if layer.pool is pool), key=attrgetter("layer"))
            windows = [layer.window for layer in own]
            self._kernels[pool] = PagedAttention(team.library, pool.tensor, heads, windows, team.threads)
        self._windows = sorted({layer.window for layer in layers} - {0})
        self._tables = [{layer.pool: layer.window for layer in layers}[pool] for pool in self._kernels]
        """A window of each pool's layers, by which its block table is found."""
        self._norms: dict[int, Tensor] = {}
        self._rotation: Rotation | None = None
        self._rotary: Tensor | None = None
        self._turned = 0
        """Number of positions whose rotations are computed."""

    def turn_by(self, rotary: Tensor) -> None:
        """Makes the kernels rotate tokens by their positions from now on; `run` isn't called then.

        Args:
            rotary: float32 [R, 2, D / 2]; see `reference.rotations`.
        """
        self._rotary = rotary

    def plan(self, inputs: AttentionInputs) -> None:
        sides = [places.block_tables.numpy() for places in inputs.windows.values()]
        self.plan_rows(inputs.starts, inputs.lengths, inputs.block_tables.numpy(), sides)

    def plan_rows(self, starts: Indices, lengths: Indices, table: Indices, sides: Sequence[Indices] = ()) -> None:
        """Prepares a step of the rows that `StepPlan` describes by these fields. Kernels may add tokens behind rows, as
        many as their block tables have room for, if there is one pool.

        Args:
            table: [R, W] block tables of the first group.
            sides: [R, W] each, as `StepPlan.side_tables`.
        """
        end = table.shape[1] * self._layout.block_size
        if self._rotary is not None and end > self._turned:
            self._turned = max(LEAST_TURNED, 1 << (end - 1).bit_length())
            turned = rotations(torch.arange(self._turned), self._rotary)
            for kernels in self._kernels.values():
                kernels.rotate(*turned, by_position=True)
        tables = dict(zip(self._windows, sides, strict=True)) if sides else {}
        for kernels, window in zip(self._kernels.values(), self._tables, strict=True):
            kernels.plan(starts, lengths, tables.get(window, table))

    @property
    def pools(self) -> int:
        """Number of pools, each of which has a step of its own."""
        return len(self._kernels)

    @property
    def step(self) -> int:
        """As `PagedAttention.step`, of the first pool."""
        return next(iter(self._kernels.values())).step

    def record(
        self,
        layer: int,
        qkv: int,
        qkv_stride: int,
        out: int,
        out_stride: int,
        norm: HeadNorm | None,
        rotation: int = 0,
        sinks: Tensor | None = None,
    ) -> list[tuple[str, ctypes.Structure]]:
        """The kernels of one layer and their arguments, which stay valid for every step.

        Args:
            qkv: address of float32 [T, (H + 2 Hkv) * D], overwritten; `qkv_stride` numbers from one row to the next.
            out: address of float32 [T, H * D].
            rotation: index among those of `turn_by`.
            sinks: float32 [H], which the caller keeps; see `reference.paged_attention`.
        """
        weight = None
        if norm is not None:
            weight = self._norms[layer] = norm.weight.float().contiguous()
        eps = 0.0 if norm is None else norm.eps
        own = self._layers[layer]
        args = self._kernels[own.pool].args(
            own.layer, qkv, qkv_stride, out, out_stride, weight, eps, rotation, sinks=sinks
        )
        return [(WRITE, args), (ATTEND, args)]

    def run(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        if rotation is not self._rotation:
            self._rotation = rotation
            for kernels in self._kernels.values():
                kernels.rotate(rotation.cos[None], rotation.sin[None])
        tokens, heads, dim = qkv.shape
        queries = (heads - 2 * self._layout.kv_heads) * dim
        source = qkv.float().contiguous()
        out = torch.empty(tokens, queries)
        steps = self.record(layer, source.data_ptr(), heads * dim, out.data_ptr(), queries, norm)
        self._team.run(Program(self._team.library, *steps))
        return out.to(qkv.dtype)
