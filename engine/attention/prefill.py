"""The interface between attention on a GPU and the kernels for rows of several tokens."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvrelay.engine.attention.base import AttentionInputs
from kvrelay.engine.config import PrefillKernel
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.packages import TYPES, Unavailable
from kvrelay.kernels.triton.paged import PagedKV


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes and types of the attention that is to be computed."""

    layout: KVLayout
    """Layout of the KV pool."""
    dtype: torch.dtype
    """Dtype of queries."""
    heads: int
    """Number of query heads."""
    windows: tuple[int, ...]
    """Windows of the layers in tokens, each once; see `Traits`."""
    architecture: int
    """Compute capability of the GPU, times ten."""
    device: torch.device

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.layout.kv_heads

    def __str__(self) -> str:
        layout = self.layout
        return (
            f"{self.dtype} with KV of {layout.dtype}, blocks of {layout.block_size}, heads of {layout.head_dim} in"
            f" groups of {self.group}"
        )


def check_shapes(shapes: Shapes, package: str, dims: range | tuple[int, ...]) -> None:
    """Checks that a package takes numbers of 16 bits in heads of these sizes.

    Raises:
        Unavailable: it doesn't.
    """
    if shapes.dtype not in TYPES or shapes.layout.scaled or shapes.layout.head_dim not in dims:
        raise Unavailable(f"{package} doesn't take {shapes}")


class PlannedPrefill(Protocol):
    """Attention that is planned for a step's rows of several tokens, in every layer."""

    def launch(self, query: Tensor, kv: PagedKV, window: int, out: Tensor) -> None:
        """Writes the result of these rows' tokens into `out`; the other tokens' rows of `out` aren't touched.

        Args:
            query: [T, H, D], of all tokens of the step, and perhaps of more behind them.
            window: of the layer.
            out: [T, H, D].
        """
        ...


class Prefill(Protocol):
    """Attends for rows of several tokens."""

    @property
    def name(self) -> PrefillKernel: ...

    def plan(self, inputs: AttentionInputs, first: int) -> PlannedPrefill:
        """Prepares a step, for its rows from `first` on, of which there is at least one."""
        ...
