"""The model's operations on GPU: Triton kernels, and cuBLAS for dense products.

Triton's interpreter runs the same functions on CPU tensors.
"""

from torch import Tensor
from torch.nn import functional

from kvrelay.kernels.add_rmsnorm import add_rms_norm, rms_norm
from kvrelay.kernels.ops import Linear
from kvrelay.kernels.silu_mul import silu_mul

__all__ = ["add_rms_norm", "linear", "rms_norm", "silu_mul"]


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """`x [T, in] -> x @ weight.T + bias [T, out]`; weight is [out, in]."""
    return lambda x: functional.linear(x, weight, bias)
