"""What the prefill kernels in Gluon have in common: what they take, and how they are launched."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvrelay.kernels.triton.checks import check_tensor
from kvrelay.kernels.triton.launch import Launch, launch
from kvrelay.kernels.triton.paged import LOG2_E, PagedKV, check_attention

BOX = 64
"""Slots of a page that one load of the Tensor Memory Accelerator brings."""
DIMS = (64, 128)
TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Triton before 3.7 has it by its older name."""


@dataclass(frozen=True, slots=True)
class GluonPrefill:
    """A kernel that computes what `flash_prefill` defines, of a pool of the query's type."""

    kernel: Any
    rows: int
    """Query rows of a tile: tokens times query heads of a KV head."""
    box_dim: int = 0
    """Dimensions of a head that one load brings; 0 for all."""

    def takes(self, dtype: torch.dtype, kv_dtype: torch.dtype, group: int, block_size: int, dim: int) -> bool:
        """Whether the kernel computes attention of these types and sizes."""
        return dtype in TYPES and kv_dtype == dtype and group <= self.rows and block_size % BOX == 0 and dim in DIMS

    def launch(self, arguments: tuple[Tensor, PagedKV, Tensor, Tensor, int, Tensor], **constants: int) -> Launch | None:
        """Launches the kernel.

        Args:
            arguments: query, KV, block tables, tiles, window and out, as `flash_prefill` has them.
            constants: of the kernel, beside those that follow from the arguments.

        Raises:
            ValueError: a tensor has another shape, type or device than it should, or `takes` says no.
        """
        query, kv, block_tables, tiles, window, out = arguments
        kv_heads, group, block_size, dim = check_attention(query, kv, block_tables, window, out)
        check_tensor("tiles", tiles, (len(tiles), 4), query, torch.int32)
        if not self.takes(query.dtype, kv.pool.dtype, group, block_size, dim):
            raise ValueError(
                f"a pool of {kv.pool.dtype}, pages of {block_size} slots, heads of {dim} in groups of {group} for a"
                f" query of {query.dtype}; allowed: two bytes, the same for both, a multiple of {BOX} slots, {DIMS}, "
                f"at most {self.rows}"
            )
        if not len(tiles):
            return None
        box = [1, BOX, self.box_dim or dim]
        layout = gl.NVMMASharedLayout.get_default_for(box, TYPES[query.dtype])
        pages: Any = TensorDescriptor.from_tensor(kv.pool.view(-1, block_size, dim), box, layout)
        return launch(
            self.kernel,
            (len(tiles) * kv_heads,),
            query,
            pages,
            kv.pool.stride(0) // (block_size * dim),
            kv.of_layer()["key_row"],
            block_tables,
            tiles,
            out,
            LOG2_E * dim**-0.5,
            window,
            block_tables.stride(0),
            HEADS_KV=kv_heads,
            GROUP=group,
            DIM=dim,
            BLOCK_SIZE=block_size,
            WINDOWED=window > 0,
            ROWS=self.rows,
            num_warps=4,
            **constants,
        )
