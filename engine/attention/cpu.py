"""Attention on CPU: pages are gathered into kept buffers and handed to torch's fused attention."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.attention.cpu_decode import DecodeGroup, plan_decode
from kvrelay.engine.attention.cpu_prefill import Bands, PrefillRow, plan_prefill
from kvrelay.engine.attention.pages import Pages
from kvrelay.engine.attention.protocol import HeadNorm, Rotation
from kvrelay.engine.batch import ForwardBatch
from kvrelay.engine.kv.pool import KVPool
from kvrelay.kernels.cpu import ops


@dataclass(frozen=True, slots=True, eq=False)
class StepAttention:
    """What one step does in every layer with the same window."""

    groups: tuple[DecodeGroup, ...]
    rows: tuple[PrefillRow, ...]


class CpuAttention:
    """Implements `Attention`.

    A step's keys and values are written ahead of its attention, so that every row finds its whole context in the pool.
    Slots of a block past its sequence's last token are zero: a key that is masked has weight 0, but 0 times a NaN that
    another sequence left behind would be NaN. So whoever begins a block without filling it clears it first.
    """

    def __init__(self, pool: KVPool, windows: tuple[int, ...]) -> None:
        """
        Args:
            windows: of each layer; see `Traits`.
        """
        self._pages = Pages(pool)
        self._bands = Bands(pool.tensor.dtype)
        self._windows = windows
        self._steps: dict[int, StepAttention] = {}
        self._slots = torch.empty(0, dtype=torch.int64)

    def plan(self, batch: ForwardBatch) -> None:
        self._plan_writes(batch)
        decode = np.flatnonzero(batch.lengths == 1)
        prefill = np.flatnonzero(batch.lengths > 1)
        for window in set(self._windows):
            self._steps[window] = StepAttention(
                tuple(plan_decode(self._pages, batch, decode, window)),
                tuple(plan_prefill(self._pages, self._bands, batch, int(row), window) for row in prefill),
            )

    def run(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        keys = self._pages.kv_heads
        queries = qkv.shape[1] - 2 * keys
        qk, value = qkv.split_with_sizes((queries + keys, keys), 1)
        if norm is not None:
            qk = ops.rms_norm(qk, norm.weight, norm.eps)
        query, key = ops.rope(qk, rotation.cos, rotation.sin).split_with_sizes((queries, keys), 1)
        self._pages.write(layer, self._slots, key, value)
        step = self._steps[self._windows[layer]]
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for group in step.groups:
            group.run(self._pages, layer, query, out)
        for row in step.rows:
            row.run(self._pages, layer, query, key, value, out)
        return out

    def _plan_writes(self, batch: ForwardBatch) -> None:
        size = self._pages.block_size
        positions = batch.positions.numpy()
        blocks = batch.block_tables[batch.row_of, positions // size]
        self._slots = self._pages.slot_indices(blocks, positions)
        ends = (batch.starts + batch.lengths)[batch.row_of]
        begun = (positions % size == 0) & (positions + size > ends)
        if begun.any():
            self._pages.pool.tensor.index_fill_(0, torch.from_numpy(blocks[begun]), 0)
