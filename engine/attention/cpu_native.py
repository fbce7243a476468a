"""Attention on CPU by the native kernels: straight from the pages, in float32 but for the KV."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvrelay.engine.attention.protocol import HeadNorm, Rotation
from kvrelay.engine.batch import ForwardBatch
from kvrelay.engine.kv.pool import KVPool
from kvrelay.kernels.cpu.attention import ATTEND, WRITE, PagedAttention, supports
from kvrelay.kernels.cpu.program import Program, Team

__all__ = ["NativeAttention", "supports"]


class NativeAttention:
    """Implements `Attention`, and gives its kernels to those who record whole programs.

    Nothing beyond a sequence's last token is ever read, so what other sequences left in a block does no harm.
    """

    def __init__(self, pool: KVPool, windows: Sequence[int], heads: int, team: Team) -> None:
        """
        Args:
            windows: of each layer; see `Traits`.
            heads: of queries.
            team: which runs the kernels, here or in a program.

        Raises:
            ValueError: the pool's order or type is not one that the kernels read.
        """
        if pool.layout.order != "NHD":
            raise ValueError(f"KVLayout.order is {pool.layout.order}; attention on CPU takes NHD")
        self._pool = pool
        self._team = team
        self._kernels = PagedAttention(team.library, pool.tensor, heads, windows, team.threads)
        self._norms: dict[int, Tensor] = {}
        self._rotation: Rotation | None = None

    def plan(self, batch: ForwardBatch) -> None:
        self._kernels.plan(batch.starts, batch.lengths, batch.block_tables)

    def set_rotation(self, rotation: Rotation) -> None:
        """The angles of the step that was planned last."""
        self._rotation = rotation
        self._kernels.rotate(rotation.cos, rotation.sin)

    def record(
        self, layer: int, qkv: int, qkv_stride: int, out: int, out_stride: int, norm: HeadNorm | None
    ) -> list[tuple[str, ctypes.Structure]]:
        """The kernels of one layer and their arguments, good for every step.

        Args:
            qkv: address of float32 [T, (H + 2 Hkv) * D]; rows are `qkv_stride` numbers apart. Written to.
            out: address of float32 [T, H * D].
        """
        weight = None
        if norm is not None:
            weight = self._norms[layer] = norm.weight.float().contiguous()
        eps = 0.0 if norm is None else norm.eps
        args = self._kernels.args(layer, qkv, qkv_stride, out, out_stride, weight, eps)
        return [(WRITE, args), (ATTEND, args)]

    def run(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        if rotation is not self._rotation:
            self.set_rotation(rotation)
        tokens, heads, dim = qkv.shape
        queries = (heads - 2 * self._pool.layout.kv_heads) * dim
        source = qkv.float().contiguous()
        out = torch.empty(tokens, queries)
        steps = self.record(layer, source.data_ptr(), heads * dim, out.data_ptr(), queries, norm)
        self._team.run(Program(self._team.library, *steps))
        return out.to(qkv.dtype)
