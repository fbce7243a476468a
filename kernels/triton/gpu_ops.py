"""The model's operations on GPU: Triton kernels, cuBLAS for dense products, torch's kernels for what few models have.

Triton's interpreter runs the same functions on CPU tensors.
"""

from torch import Tensor
from torch.nn import functional

from kvrelay.kernels.cpu.ops import gelu, layer_norm
from kvrelay.kernels.ops import Linear
from kvrelay.kernels.triton.add_rmsnorm import Norms
from kvrelay.kernels.triton.embed import Embed
from kvrelay.kernels.triton.silu_mul import SiluMul


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """`x [T, in] -> x @ weight.T + bias [T, out]`; weight is [out, in]."""
    return lambda x: functional.linear(x, weight, bias)


class GpuOps:
    """Implements `Ops` for one model, whose layers and steps repeat each other's launches. Not thread-safe."""

    def __init__(self) -> None:
        norms = Norms()
        self.linear = linear
        self.embed = Embed()
        self.rms_norm = norms.rms_norm
        self.add_rms_norm = norms.add_rms_norm
        self.silu_mul = SiluMul()
        self.gelu_mul = SiluMul(gelu=True)
        self.layer_norm = layer_norm
        self.gelu = gelu
