"""Attention on GPU: three kernels a layer at most, on tensors that a captured graph finds where they were.

rope_kv_write   norm, rotation and KV write of all tokens
paged_decode    rows of one token, which come first in a step
flash_prefill   rows of several
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.attention.protocol import HeadNorm, Rotation
from kvrelay.engine.batch import ForwardBatch
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.kernels.flash_prefill import choose_tile, flash_prefill, plan_tiles
from kvrelay.kernels.paged import PagedKV
from kvrelay.kernels.paged_decode import DecodeSplits, count_splits, paged_decode, splits_span
from kvrelay.kernels.rope_kv_write import rope_kv_write


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """What one step does in every layer, on the device: its first `decodes` rows have one token each."""

    slots: Tensor
    """int64 [T] of each token, block * block_size + position in the block; -1 keeps no KV."""
    tables: Tensor
    """int32 [R, W]."""
    contexts: Tensor
    """int32 [R] tokens of the sequence, with this step's; 0 for a row that isn't there."""
    decodes: int
    splits: Mapping[int, DecodeSplits] = field(default_factory=dict)
    """By window, how those are split."""
    tiles: Mapping[int, Tensor] = field(default_factory=dict)
    """By window, the work list of the other rows; see `plan_tiles`."""


class SplitRoom:
    """Where split rows leave their parts: memory that all sizes of batch and all layers use in turn."""

    def __init__(self, layout: KVLayout, heads: int, rows: int, longest: int, processors: int, device: torch.device):
        """
        Args:
            heads: query heads.
            rows: of a batch at most.
            longest: context at most.
            processors: multiprocessors of the device.
        """
        self._layout = layout
        self._heads = heads
        self._longest = longest
        self._processors = processors
        most = max(count * self.count(count, 0) for count in range(1, rows + 1))
        self._parts = torch.empty(most * heads * layout.head_dim, dtype=torch.float32, device=device)
        self._weights = torch.empty(most * heads, dtype=torch.float32, device=device)

    def count(self, rows: int, window: int) -> int:
        """Splits of each of so many rows."""
        longest = min(window, self._longest) if window else self._longest
        return count_splits(rows, self._layout.kv_heads, self._processors, longest)

    def splits(self, rows: int, window: int, span: Tensor) -> DecodeSplits:
        """Of so many rows; `span` is int32 [1] on the device."""
        count, heads, dim = self.count(rows, window), self._heads, self._layout.head_dim
        parts = self._parts[: rows * heads * count * dim].view(rows, heads, count, dim)
        return DecodeSplits(span, parts, self._weights[: rows * heads * count].view(rows, heads, count))

    def span(self, contexts: Sequence[int], rows: int, window: int) -> int:
        """Keys of a split of `contexts`, in a batch that is filled up to `rows`."""
        return splits_span(contexts, self._layout.kv_heads, self._processors, self.count(rows, window), window)


class TritonAttention:
    """Implements `Attention`."""

    def __init__(self, pool: KVPool, windows: tuple[int, ...], heads: int, rows: int, longest: int) -> None:
        """
        Args:
            windows: of each layer; see `Traits`.
            heads: query heads.
            rows: of a step at most.
            longest: context at most.

        Raises:
            ValueError: the pool's order isn't HND.
        """
        if pool.layout.order != "HND":
            raise ValueError(f"KVLayout.order is {pool.layout.order}; attention on GPU takes HND")
        self._pool = pool
        self._windows = windows
        layout, device = pool.layout, pool.tensor.device
        self._tile = choose_tile(layout.head_dim, pool.tensor.dtype, layout.block_size, architecture_of(device))
        self._tile_tokens = self._tile.rows // (heads // pool.layout.kv_heads)
        self._step: StepTensors | None = None
        self._room = SplitRoom(pool.layout, heads, rows, longest, processors_of(device), device)
        self._kinds = sorted(set(windows))
        self._spans = torch.ones(len(self._kinds), dtype=torch.int32, device=device)
        # Two, for the copy of the step before may not have begun when this one's is queued.
        self._host_spans = [
            torch.ones(len(self._kinds), dtype=torch.int32, pin_memory=pool.tensor.is_cuda) for _ in "ab"
        ]

    def plan(self, batch: ForwardBatch) -> None:
        """See `Attention.plan`."""
        size = self._pool.layout.block_size
        positions = batch.positions.cpu().numpy()
        slots = batch.block_tables[batch.row_of, positions // size] * size + positions % size
        contexts = (batch.starts + batch.lengths).astype(np.int32)
        tables = self._on_device(batch.block_tables.astype(np.int32))
        self.plan_rows(batch.starts, batch.lengths, self._on_device(slots), tables, self._on_device(contexts))

    def plan_rows(
        self, starts: NDArray[np.integer], lengths: NDArray[np.integer], slots: Tensor, tables: Tensor, contexts: Tensor
    ) -> None:
        """As `plan`, of rows [R] that the host knows, with the rest on the device."""
        longer = np.flatnonzero(lengths > 1)
        decodes = int(longer[0]) if len(longer) else len(lengths)
        if decodes:
            self.load_spans((starts[:decodes] + 1).tolist(), decodes)
        tiles = {}
        if decodes < len(lengths):
            rows = range(decodes, len(lengths))
            whole = starts.astype(np.int64), lengths.astype(np.int64)
            for window in self._kinds:
                tiles[window] = self._on_device(plan_tiles(*whole, self._tile_tokens, window, rows))
        self._step = StepTensors(slots, tables, contexts, decodes, self._splits(decodes), tiles)

    def plan_decodes(self, slots: Tensor, tables: Tensor, contexts: Tensor) -> None:
        """As `plan`, of rows of one token each that only the device knows; `load_spans` has been told their lengths.

        What follows from it depends on the number of rows only, so that it can be captured in a graph.
        """
        self._step = StepTensors(slots, tables, contexts, len(slots), self._splits(len(slots)))

    def load_spans(self, contexts: Sequence[int], rows: int) -> None:
        """Queues the copy of how decode rows with these contexts are split, in a batch that is filled up to `rows`."""
        self._host_spans.reverse()
        host = self._host_spans[0]
        for index, window in enumerate(self._kinds):
            host[index] = self._room.span(contexts, rows, window)
        self._spans.copy_(host, non_blocking=True)

    def run(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        """See `Attention.run`."""
        step = self._step
        if step is None:
            raise RuntimeError("attention runs before a step was planned")
        kv, window = PagedKV(self._pool.tensor, layer), self._windows[layer]
        query = rope_kv_write(qkv, rotation, step.slots, kv, norm)
        out = torch.empty_like(query)
        first = step.decodes
        if first:
            splits = step.splits[window]
            paged_decode(query[:first], kv, step.tables[:first], step.contexts[:first], splits, window, out[:first])
        if step.tiles:
            flash_prefill(query, kv, step.tables, step.tiles[window], self._tile, window, out)
        return out.view(len(out), -1)

    def _splits(self, rows: int) -> dict[int, DecodeSplits]:
        if not rows:
            return {}
        return {
            window: self._room.splits(rows, window, self._spans[index : index + 1])
            for index, window in enumerate(self._kinds)
        }

    def _on_device(self, array: NDArray[np.integer]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._pool.tensor.is_cuda:
            tensor = tensor.pin_memory()
        return tensor.to(self._pool.tensor.device, non_blocking=True)


def architecture_of(device: torch.device) -> int:
    """Compute capability, ten times; of the interpreter Hopper's."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def processors_of(device: torch.device) -> int:
    """Multiprocessors; of the interpreter a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
