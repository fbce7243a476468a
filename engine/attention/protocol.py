"""What a model asks of attention, and a runner of its backend."""

from typing import Protocol

from torch import Tensor

from kvrelay.engine.batch import ForwardBatch


class Attention(Protocol):
    """Attention over paged KV. `plan` is called once a step, `run` once a layer with the same tokens."""

    def plan(self, batch: ForwardBatch) -> None:
        """Works out, for all layers, where the step's KV goes and which KV each token sees."""
        ...

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Writes keys and values into the pool, then attends.

        Args:
            query: [T, H, D].
            key, value: [T, Hkv, D].

        Returns:
            [T, H * D].
        """
        ...
