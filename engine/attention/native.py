"""Attention on the CPU by the native kernels: reads the pages in place, computes in float32."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvrelay.engine.attention.base import AttentionInputs, HeadNorm, Rotation
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

    def __init__(self, pool: KVPool, windows: Sequence[int], heads: int, team: Team) -> None:
        """
        Args:
            windows: of each layer; see `Traits`.
            heads: query heads.
            team: the threads that run the kernels, here or in a program.

        Raises:
            ValueError: the kernels can't read the pool's order or type.
        """
        if pool.layout.order != "NHD":
            raise ValueError(f"KVLayout.order is {pool.layout.order}; attention on CPU takes NHD")
        self._pool = pool
        self._team = team
        self._kernels = PagedAttention(team.library, pool.tensor, heads, windows, team.threads)
        self._norms: dict[int, Tensor] = {}
        self._rotation: Rotation | None = None
        self._rotary: Tensor | None = None
        self._turned = 0
        """Positions that have rotations."""

    def turn_by(self, rotary: Tensor) -> None:
        """From now on tokens are rotated by their positions; `run` isn't called.

        Args:
            rotary: float32 [R, 2, D / 2]; see `reference.rotations`.
        """
        self._rotary = rotary

    def plan(self, inputs: AttentionInputs) -> None:
        self.plan_rows(inputs.starts, inputs.lengths, inputs.block_tables.numpy())

    def plan_rows(self, starts: Indices, lengths: Indices, tables: Indices) -> None:
        """Prepares a step of the rows that `StepPlan` describes by these fields. Kernels may add tokens behind rows, as
        many as their block tables have room for.
        """
        end = tables.shape[1] * self._pool.layout.block_size
        if self._rotary is not None and end > self._turned:
            self._turned = max(LEAST_TURNED, 1 << (end - 1).bit_length())
            self._kernels.rotate(*rotations(torch.arange(self._turned), self._rotary), by_position=True)
        self._kernels.plan(starts, lengths, tables)

    @property
    def step(self) -> int:
        """As `PagedAttention.step`."""
        return self._kernels.step

    def record(
        self,
        layer: int,
        qkv: int,
        qkv_stride: int,
        out: int,
        out_stride: int,
        norm: HeadNorm | None,
        rotation: int = 0,
    ) -> list[tuple[str, ctypes.Structure]]:
        """The kernels of one layer and their arguments, which stay valid for every step.

        Args:
            qkv: address of float32 [T, (H + 2 Hkv) * D], overwritten; `qkv_stride` numbers from one row to the next.
            out: address of float32 [T, H * D].
            rotation: index among those of `turn_by`.
        """
        weight = None
        if norm is not None:
            weight = self._norms[layer] = norm.weight.float().contiguous()
        eps = 0.0 if norm is None else norm.eps
        args = self._kernels.args(layer, qkv, qkv_stride, out, out_stride, weight, eps, rotation)
        return [(WRITE, args), (ATTEND, args)]

    def run(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        if rotation is not self._rotation:
            self._rotation = rotation
            self._kernels.rotate(rotation.cos[None], rotation.sin[None])
        tokens, heads, dim = qkv.shape
        queries = (heads - 2 * self._pool.layout.kv_heads) * dim
        source = qkv.float().contiguous()
        out = torch.empty(tokens, queries)
        steps = self.record(layer, source.data_ptr(), heads * dim, out.data_ptr(), queries, norm)
        self._team.run(Program(self._team.library, *steps))
        return out.to(qkv.dtype)
