"""The operations that a model consists of. A module that has them is a backend: `cpu.ops`, `gpu_ops`."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Linear = Callable[[Tensor], Tensor]


class Ops(Protocol):
    """The functions of a backend; formulas and shapes are in `reference.py`."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
