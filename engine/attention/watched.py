"""Attention whose progress through the layers is told; see `kvrelay.engine.layers`."""

from collections.abc import Callable

from torch import Tensor

from kvrelay.engine.attention.protocol import Attention, HeadNorm, Rotation
from kvrelay.engine.batch import ForwardBatch


class WatchedAttention:
    """An attention backend whose step is told of at `borders`. For backends that have written when they return."""

    def __init__(self, attention: Attention, borders: tuple[int, ...], passed: Callable[[int], None]) -> None:
        self.attention = attention
        self.borders = borders
        self.passed = passed

    def plan(self, batch: ForwardBatch) -> None:
        self.attention.plan(batch)

    def run(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        result = self.attention.run(layer, qkv, rotation, norm)
        if layer + 1 in self.borders:
            self.passed(layer + 1)
        return result
