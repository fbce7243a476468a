"""The model's operations on CPU; formulas and shapes are in `kernels/reference.py`.

Each uses as few torch calls as possible: with the few rows of a decode step, the calls themselves take most time.

Weights of linear layers are packed once into the layout that oneDNN uses, by torch's private operators. Prepacked
weights are 2 to 3 times faster than `F.linear` in float32 at any number of rows; in bfloat16 they are up to 2.5 times
faster at up to 32 rows, and equal above. Where torch or the CPU lacks the operators, `F.linear` is used.

oneDNN compiles and keeps code for each number of rows that it meets, a few hundred kilobytes each. So rows are padded
to a multiple of ROWS; otherwise prompts of every length would add hundreds of megabytes to a worker's memory.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from kvrelay.kernels.ops import Linear
from kvrelay.kernels.reference import embed

__all__ = ["add_rms_norm", "embed", "gelu", "gelu_mul", "layer_norm", "linear", "rms_norm", "rope", "silu_mul"]

ROWS = 16
"""Rows of a product are padded to a multiple of this, unless there are fewer."""


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """`x [T, in] -> x @ weight.T + bias [T, out]`. If `weight` could be packed, the result keeps no reference to it.

    Args:
        weight: [out, in].
        bias: [out] or None.
    """
    if not packable(weight.dtype):
        return lambda x: functional.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    run = torch.ops.mkldnn._linear_pointwise.default

    def apply(x: Tensor) -> Tensor:
        rows = x.shape[0]
        missing = -rows % ROWS if rows > ROWS else 0
        out: Tensor = run(functional.pad(x, (0, 0, 0, missing)) if missing else x, packed, bias, "none", [], "")
        return out[:rows] if missing else out

    return apply


@cache
def packable(dtype: torch.dtype) -> bool:
    """Whether oneDNN can pack and multiply weights of this type on this machine."""
    operators = torch.ops.mkldnn
    if dtype not in (torch.float32, torch.bfloat16) or not torch._C._has_mkldnn:
        return False
    if not hasattr(operators, "_reorder_linear_weight") or not hasattr(operators, "_linear_pointwise"):
        return False
    return dtype is torch.float32 or bool(operators._is_mkldnn_bf16_supported())


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
