"""Rows of several tokens by FlashInfer (the package `flashinfer-python`). Written for its version 0.6.18."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.attention.base import AttentionInputs, to_device
from kvrelay.engine.attention.prefill import PlannedPrefill, Shapes, bounds, check_shapes
from kvrelay.engine.config import PrefillKernel
from kvrelay.engine.packages import check_parameters, imported
from kvrelay.kernels.triton.paged import PagedKV

PACKAGE = "FlashInfer"
DIMS = (64, 128, 256)
PARAMETERS = {
    "qo_indptr",
    "paged_kv_indptr",
    "paged_kv_indices",
    "paged_kv_last_page_len",
    "causal",
    "sm_scale",
    "window_left",
    "q_data_type",
    "kv_data_type",
}
WORKSPACE_BYTES = 128 * 2**20
"""Size of a wrapper's workspace in bytes, as FlashInfer recommends."""


@dataclass(frozen=True, slots=True, eq=False)
class FlashInferStep:
    """Implements `PlannedPrefill`."""

    wrappers: Mapping[int, Any]
    """Planned wrappers by window."""
    tokens: slice
    """Tokens of these rows, among the step's."""

    def launch(self, query: Tensor, kv: PagedKV, window: int, out: Tensor) -> None:
        """See `PlannedPrefill.launch`."""
        pages = kv.pool[:, kv.layer, 0], kv.pool[:, kv.layer, 1]
        self.wrappers[window].run(query[self.tokens], pages, out=out[self.tokens])


class FlashInferPrefill:
    """Implements `Prefill`."""

    name: PrefillKernel = "flashinfer"

    def __init__(self, shapes: Shapes) -> None:
        """
        Raises:
            Unavailable: the package isn't there, or doesn't take these shapes.
        """
        check_shapes(shapes, PACKAGE, DIMS)
        wrapper = imported("flashinfer", "BatchPrefillWithPagedKVCacheWrapper", PACKAGE)
        check_parameters(wrapper.plan, PARAMETERS, PACKAGE, "0.6.18")
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=shapes.device)
        self._shapes = shapes
        # Two sets, because a wrapper plans in a host buffer, and the copy of the previous step's plan may not have
        # begun.
        self._sets = cycle([{window: wrapper(workspace, "HND") for window in shapes.windows} for _ in "ab"])

    def plan(self, inputs: AttentionInputs, first: int) -> PlannedPrefill:
        """See `Prefill.plan`."""
        layout, device = self._shapes.layout, self._shapes.device
        lengths = inputs.lengths[first:]
        contexts = inputs.starts[first:] + lengths
        counts = -(-contexts // layout.block_size)
        pages = bounds(counts)
        row = np.repeat(np.arange(len(counts)), counts)
        column = np.arange(len(row)) - pages[row]
        index = to_device(np.stack((first + row, column)), device)
        last = torch.from_numpy(((contexts - 1) % layout.block_size + 1).astype(np.int32))
        wrappers = next(self._sets)
        for window, wrapper in wrappers.items():
            wrapper.plan(
                torch.from_numpy(bounds(lengths)),
                torch.from_numpy(pages),
                inputs.of(window).block_tables[index[0], index[1]],
                last,
                self._shapes.heads,
                layout.kv_heads,
                layout.head_dim,
                layout.block_size,
                causal=True,
                sm_scale=layout.head_dim**-0.5,
                window_left=window - 1,
                q_data_type=self._shapes.dtype,
                kv_data_type=self._shapes.dtype,
            )
        return FlashInferStep(wrappers, slice(int(inputs.lengths[:first].sum()), int(inputs.lengths.sum())))
