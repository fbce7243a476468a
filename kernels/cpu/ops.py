"""The model's operations on CPU; formulas and shapes are in `kernels/reference.py`.

Each uses as few torch calls as possible: with the few rows of a decode step, the calls themselves take most time.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kvrelay.kernels.cpu.linear import linear
from kvrelay.kernels.reference import embed

__all__ = ["add_rms_norm", "embed", "gelu", "gelu_mul", "layer_norm", "linear", "rms_norm", "rope", "silu_mul"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype != x.dtype:
        return rms_norm(x.float(), weight.float(), eps).to(x.dtype)
    if weight.dim() == 1:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x, weight.shape[-1:], None, eps) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x.add_(residual)
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = x.float()
    return torch.addcmul(y * cos, y.roll(y.shape[-1] // 2, -1), sin).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)


def gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def gelu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gelu(gate).mul_(up)
