"""What a model asks of attention, and a runner of its backend."""

from typing import NamedTuple, Protocol

from torch import Tensor

from kvrelay.engine.batch import ForwardBatch


class HeadNorm(NamedTuple):
    """RMS norm of each head's query and key, ahead of the rotation."""

    weight: Tensor
    """[H + Hkv, D], each query head's and each key head's."""
    eps: float


class Rotation(NamedTuple):
    """The angles of a step's tokens, as `kernels.reference.rope` takes them; the same in every layer."""

    cos: Tensor
    """float32 [T, 1, D]."""
    sin: Tensor
    """float32 [T, 1, D], its first half negated."""


class Attention(Protocol):
    """Attention over paged KV. `plan` is called once a step, `run` once a layer with the same tokens."""

    def plan(self, batch: ForwardBatch) -> None:
        """Works out, for all layers, where the step's KV goes and which KV each token sees."""
        ...

    def run(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        """Norms and rotates queries and keys, writes keys and values into the pool, then attends.

        One call, so that a backend can fuse what comes before attention.

        Args:
            qkv: [T, H + 2 Hkv, D], the projection as it is: all queries, then all keys, then all values. May be
                written to.

        Returns:
            [T, H * D].
        """
        ...
