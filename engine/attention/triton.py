"""Attention on a GPU: at most three kernels per layer, on tensors at fixed addresses, as a captured graph needs.

rope_kv_write   norm, rotation and KV write of all tokens
paged_decode    rows of one token, which come first in a step
flash_prefill   rows of several tokens
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.attention.base import AttentionInputs, HeadNorm, Rotation
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.kernels.flash_prefill import choose_tile, flash_prefill, plan_tiles
from kvrelay.kernels.paged import PagedKV
from kvrelay.kernels.paged_decode import DecodeSplits, count_splits, paged_decode, splits_span
from kvrelay.kernels.rope_kv_write import rope_kv_write


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """What one step does in every layer."""

    inputs: AttentionInputs
    decodes: int
    """Rows at the beginning that have one token each."""
    splits: Mapping[int, DecodeSplits]
    """By window, how the decode rows are split."""
    tiles: Mapping[int, Tensor]
    """By window, the work list of the other rows (see `plan_tiles`); empty if there are none."""


class SplitWorkspace:
    """Memory for the partial results of split decode rows; all batch sizes and all layers use it in turn."""

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
        """Splits of each row in a batch of `rows`."""
        longest = min(window, self._longest) if window else self._longest
        return count_splits(rows, self._layout.kv_heads, self._processors, longest)

    def splits(self, rows: int, window: int, span: Tensor) -> DecodeSplits:
        """The splits of a batch of `rows`; `span` is int32 [1] on the device."""
        count, heads, dim = self.count(rows, window), self._heads, self._layout.head_dim
        parts = self._parts[: rows * heads * count * dim].view(rows, heads, count, dim)
        return DecodeSplits(span, parts, self._weights[: rows * heads * count].view(rows, heads, count))

    def span(self, contexts: Sequence[int], window: int) -> int:
        """Keys per split of rows with these contexts."""
        count = self.count(len(contexts), window)
        return splits_span(contexts, self._layout.kv_heads, self._processors, count, window)


class TritonAttention:
    """Implements `Attention`.

    A captured graph repeats `run`, not `plan`: plan a step as for a launch, then replay the graph. All that a plan of
    decode rows changes on the device lies in tensors that the graph reads at fixed addresses.
    """

    def __init__(
        self, pool: KVPool, dtype: torch.dtype, windows: tuple[int, ...], heads: int, rows: int, longest: int
    ) -> None:
        """
        Args:
            dtype: of queries.
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
        page = 0 if layout.scaled else layout.block_size
        self._tile = choose_tile(layout.head_dim, dtype, page, architecture_of(device))
        self._tile_tokens = self._tile.rows // (heads // layout.kv_heads)
        self._step: PlannedStep | None = None
        self._workspace = SplitWorkspace(layout, heads, rows, longest, processors_of(device), device)
        self._kinds = sorted(set(windows))
        self._spans = torch.ones(len(self._kinds), dtype=torch.int32, device=device)
        # Two, because the copy of the step before may not have begun when this step's copy is queued.
        self._host_spans = [
            torch.ones(len(self._kinds), dtype=torch.int32, pin_memory=pool.tensor.is_cuda) for _ in "ab"
        ]

    def plan(self, inputs: AttentionInputs) -> None:
        """See `Attention.plan`. Rows of one token are taken as decode rows up to the first longer row."""
        longer = np.flatnonzero(inputs.lengths > 1)
        rows = len(inputs.lengths)
        decodes = int(longer[0]) if len(longer) else rows
        splits, tiles = {}, {}
        if decodes:
            self._load_spans((inputs.starts[:decodes] + 1).tolist())
            for index, window in enumerate(self._kinds):
                splits[window] = self._workspace.splits(decodes, window, self._spans[index : index + 1])
        if decodes < rows:
            for window in self._kinds:
                work = plan_tiles(inputs.starts, inputs.lengths, self._tile_tokens, window, range(decodes, rows))
                tiles[window] = self._to_device(work)
        self._step = PlannedStep(inputs, decodes, splits, tiles)

    def run(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        """See `Attention.run`."""
        step = self._step
        if step is None:
            raise RuntimeError("attention runs before a step was planned")
        inputs = step.inputs
        kv, window = PagedKV(self._pool.tensor, layer, self._pool.scales), self._windows[layer]
        query = rope_kv_write(qkv, rotation, inputs.slots, kv, norm)
        out = torch.empty_like(query)
        first = step.decodes
        if first:
            tables, contexts = inputs.block_tables[:first], inputs.contexts[:first]
            paged_decode(query[:first], kv, tables, contexts, step.splits[window], window, out[:first])
        if step.tiles:
            flash_prefill(query, kv, inputs.block_tables, step.tiles[window], self._tile, window, out)
        return out.view(len(out), -1)

    def _load_spans(self, contexts: Sequence[int]) -> None:
        """Queues the copy to the device of how decode rows with these contexts are split."""
        self._host_spans.reverse()
        host = self._host_spans[0]
        for index, window in enumerate(self._kinds):
            host[index] = self._workspace.span(contexts, window)
        self._spans.copy_(host, non_blocking=True)

    def _to_device(self, array: NDArray[np.integer]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._pool.tensor.is_cuda:
            tensor = tensor.pin_memory()
        return tensor.to(self._pool.tensor.device, non_blocking=True)


def architecture_of(device: torch.device) -> int:
    """The GPU's compute capability times ten; Hopper's for the interpreter."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def processors_of(device: torch.device) -> int:
    """Multiprocessors of the GPU; a few for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
