"""Which kernel attends for rows of several tokens on a GPU.

gluon is `flash_prefill_hopper`; it is taken if the GPU, the types and the sizes are those that it is for, and if
Triton has the parts of Gluon that it needs. Else, and by default, it is `flash_prefill`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.engine.config import PrefillAttention
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.kernels.flash_prefill import choose_tile, flash_prefill
from kvrelay.kernels.launch import Launch
from kvrelay.kernels.paged import PagedKV

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prefill:
    """A kernel that attends for tiles of `plan_tiles`."""

    name: PrefillAttention
    rows: int
    """Query rows of a tile: tokens times query heads of a KV head."""
    launch: Callable[[Tensor, PagedKV, Tensor, Tensor, int, Tensor], Launch | None]
    """Takes query, KV, block tables, tiles, window and out, as `flash_prefill` has them."""


def choose_prefill(
    wanted: PrefillAttention, layout: KVLayout, dtype: torch.dtype, heads: int, architecture: int
) -> Prefill:
    """The wanted kernel, or `flash_prefill` and a warning if it can't be.

    Args:
        dtype: of queries.
        heads: query heads.
        architecture: compute capability, times ten.
    """
    if wanted == "gluon":
        chosen, reason = _gluon(layout, dtype, heads // layout.kv_heads, architecture)
        if chosen is not None:
            return chosen
        logger.warning("engine.prefill_attention is gluon, but %s: prompts are computed by triton", reason)
    tile = choose_tile(layout.head_dim, dtype, 0 if layout.scaled else layout.block_size, architecture)

    def launch(query: Tensor, kv: PagedKV, tables: Tensor, tiles: Tensor, window: int, out: Tensor) -> Launch | None:
        return flash_prefill(query, kv, tables, tiles, tile, window, out)

    return Prefill("triton", tile.rows, launch)


def _gluon(layout: KVLayout, dtype: torch.dtype, group: int, architecture: int) -> tuple[Prefill | None, str]:
    """The kernel, or why not."""
    if architecture != 90:
        return None, f"the GPU is of architecture {architecture}, and it is for 90"
    try:
        from kvrelay.kernels import flash_prefill_hopper as hopper
    except (ImportError, AttributeError) as error:
        return None, f"Triton hasn't what it needs ({error})"
    kv_dtype = torch.int8 if layout.scaled else dtype
    if not hopper.takes(dtype, kv_dtype, group, layout.block_size, layout.head_dim):
        return None, (
            f"it doesn't take {dtype} with KV of {layout.dtype}, blocks of {layout.block_size}, heads of"
            f" {layout.head_dim} in groups of {group}"
        )
    return Prefill("gluon", hopper.ROWS, hopper.flash_prefill_hopper), ""
