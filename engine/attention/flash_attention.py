"""Rows of several tokens by FlashAttention 3 (the package `flash_attn_3`, module `flash_attn_interface`), on Hopper.

It reads the pool's pages where they are: `page_table` with pages of any size. Written for its version 3.0.0.
FlashAttention 2 isn't used: it takes pages of multiples of 256 slots only, and blocks have 128 at most.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvrelay.engine.attention.base import AttentionInputs, to_device
from kvrelay.engine.attention.packages import check_parameters, check_shapes, imported
from kvrelay.engine.attention.prefill import PlannedPrefill, Shapes, Unavailable
from kvrelay.engine.config import PrefillKernel
from kvrelay.kernels.triton.paged import PagedKV

PACKAGE = "FlashAttention 3"
DIMS = range(8, 257, 8)
PARAMETERS = {
    "cache_seqlens",
    "page_table",
    "cu_seqlens_q",
    "max_seqlen_q",
    "softmax_scale",
    "causal",
    "window_size",
    "num_splits",
}


@dataclass(frozen=True, slots=True, eq=False)
class FlashAttentionStep:
    """Implements `PlannedPrefill`."""

    attend: Callable[..., Tensor]
    """`flash_attn_with_kvcache`."""
    tokens: slice
    """Those of these rows."""
    offsets: Tensor
    """int32 [R + 1]: where each row's tokens begin within `tokens`, and the end of all."""
    longest: int
    """Tokens of the longest row."""
    contexts: Tensor
    """int32 [R]."""
    tables: Tensor
    """int32 [R, W]."""

    def launch(self, query: Tensor, kv: PagedKV, window: int, out: Tensor) -> None:
        """See `PlannedPrefill.launch`."""
        keys, values = (kv.pool[:, kv.layer, kind].transpose(1, 2) for kind in (0, 1))
        result = self.attend(
            query[self.tokens],
            keys,
            values,
            cache_seqlens=self.contexts,
            page_table=self.tables,
            cu_seqlens_q=self.offsets,
            max_seqlen_q=self.longest,
            softmax_scale=query.shape[-1] ** -0.5,
            causal=True,
            window_size=(window - 1, 0) if window else (-1, -1),
            # Parts of a row's keys would be added up in an order that depends on the batch.
            num_splits=1,
        )
        out[self.tokens].copy_(result)


class FlashAttentionPrefill:
    """Implements `Prefill`."""

    name: PrefillKernel = "flash_attn"

    def __init__(self, shapes: Shapes) -> None:
        """
        Raises:
            Unavailable: the package isn't there, or doesn't take these shapes.
        """
        if shapes.architecture != 90:
            raise Unavailable(f"the GPU is of architecture {shapes.architecture}, and {PACKAGE} is for 90")
        check_shapes(shapes, PACKAGE, DIMS)
        self._attend = imported("flash_attn_interface", "flash_attn_with_kvcache", PACKAGE)
        check_parameters(self._attend, PARAMETERS, PACKAGE, "3.0.0")
        self._device = shapes.device

    def plan(self, inputs: AttentionInputs, first: int) -> PlannedPrefill:
        """See `Prefill.plan`."""
        lengths = inputs.lengths[first:]
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return FlashAttentionStep(
            self._attend,
            slice(int(inputs.lengths[:first].sum()), int(inputs.lengths.sum())),
            to_device(offsets, self._device),
            int(lengths.max()),
            inputs.contexts[first:],
            inputs.block_tables[first:],
        )
