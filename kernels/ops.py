"""The operations that a model consists of. A backend is a module that has all of them: `cpu.ops`, `gpu_ops`."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

Linear = Callable[[Tensor], Tensor]
NONFINITE = -1
"""The token of a row whose logits aren't finite."""


class Feeds(NamedTuple):
    """Tokens of a step that the step before has sampled, and left on the device."""

    rows: Tensor
    """Rows of `sampled` that have the tokens, int64 [T]; negative for a token that the step itself has."""
    sampled: Tensor
    """Sampled tokens, int64 [R]; a negative one is taken as 0."""


class Ops(Protocol):
    """The functions of a backend; formulas and shapes are in `reference.py`."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear: ...

    def embed(
        self, tokens: Tensor, feeds: Feeds | None, positions: Tensor, table: Tensor, rotary: Tensor, scale: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The embeddings [T, N] of tokens, some of them fed, from table [V, N] times `scale`; cos and sin of their
        positions by rotary [R, 2, D / 2], [R, T, 1, D].
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor: ...

    def gelu(self, x: Tensor) -> Tensor: ...
