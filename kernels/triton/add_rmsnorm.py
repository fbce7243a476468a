"""RMS norm, alone or fused with the addition of the residual: what is between the blocks of a decoder.

    total[t] = x[t] + residual[t]                                        (rounded to the tensors' type)
    out[t]   = total[t] / sqrt(mean(total[t]^2) + eps) * weight          (in float32)

    x         [T, N] of any row stride, unit stride within a row
    residual  [T, N] contiguous, overwritten with total; or none: then total is x
    weight    [N], of the tensors' type or float32
    out       [T, N] contiguous

Grid: (T,), one program for each row. The row stays in registers between the sum and the product, so each byte moves
once. Limit: memory: x, out and the weight, and the residual, which is read and written.
Source: Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv:1910.07467.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.triton.checks import check_tensor
from kvrelay.kernels.triton.launch import Launch, Repeat, launch
from kvrelay.kernels.triton.overlap import begin_after_inputs, overlapping

MAX_COLUMNS = 65536


@triton.jit
def add_rmsnorm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    columns,
    x_stride,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_after_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        target = residual + row * columns + column
        total = (total.to(tl.float32) + tl.load(target, mask=inside, other=0.0).to(tl.float32)).to(total.dtype)
        tl.store(target, total, mask=inside)
    value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / columns + eps)
    value = value * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)


class Norms:
    """The norms, prepared: a call with tensors like those of a call before repeats its launch.

    So the types of all tensors and the shape of the weight are checked in the first call of its kind only: ValueError,
    if a tensor has another shape, type or device than it should.
    """

    def __init__(self) -> None:
        self._known: dict[object, Repeat] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm of each row of x [T, N]."""
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`(rms_norm(total), total)` of total = x + residual, which overwrites `residual`."""
        return self._norm(x, residual, weight, eps), residual

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = _out(x)
        shape = x.shape
        like = shape[1:], x.stride(), x.dtype, weight.dtype, eps, residual is None
        known = self._known.get(like)
        if known is None or not shape[0] or (residual is not None and residual.shape != shape):
            made = _launch_norm(x, residual, weight, eps, out)
            if made is not None:
                varying = ("x", "weight", "out") if residual is None else ("x", "residual", "weight", "out")
                self._known[like] = made.repeating(*varying)
        elif residual is None:
            known((shape[0], 1, 1), x, weight, out)
        else:
            known((shape[0], 1, 1), x, residual, weight, out)
        return out


def _out(x: Tensor) -> Tensor:
    """Contiguous, of the shape of x."""
    return torch.empty_like(x) if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _launch_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Launch | None:
    """Writes the norm into `out`; None if there are no rows."""
    if x.dim() != 2 or x.stride(1) != 1 or not 0 < x.shape[1] <= MAX_COLUMNS:
        raise ValueError(f"x is {list(x.shape)}, strides {x.stride()}; allowed: [T, 1 to {MAX_COLUMNS}], unit stride")
    rows, columns = x.shape
    check_tensor("weight", weight, (columns,), x, x.dtype, torch.float32)
    if residual is not None:
        check_tensor("residual", residual, (rows, columns), x)
    if not rows:
        return None
    block = triton.next_power_of_2(columns)
    # About 16 values for each thread.
    warps = min(max(block // 512, 1), 16)
    return launch(
        add_rmsnorm_kernel,
        (rows,),
        x,
        residual,
        weight,
        out,
        eps,
        columns,
        x.stride(0),
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=warps,
        **overlapping(),
    )
