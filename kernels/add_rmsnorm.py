"""RMS norm, on its own or of a sum that is written back: what stands between the blocks of a decoder.

    total[t] = x[t] + residual[t]                                        (rounded to the tensors' type)
    out[t]   = total[t] / sqrt(mean(total[t]^2) + eps) * weight          (in float32)

    x         [T, N] of any row stride, unit stride within a row
    residual  [T, N] contiguous, or none: then total is x and isn't written
    weight    [N]
    out       [T, N] contiguous

Grid: (T,), one program a row, which stays in registers between the sum and the product, so every byte moves once.
Limit: memory. `bytes_moved` counts it.
Source: Zhang, Sennrich: Root Mean Square Layer Normalization, arXiv:1910.07467.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.checks import check_tensor

MAX_COLUMNS = 65536


def bytes_moved(rows: int, columns: int, element_size: int, add: bool) -> int:
    """Bytes that must move: x and out, and with a sum the residual in and out; the weight once."""
    return (rows * (4 if add else 2) + 1) * columns * element_size


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
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        place = residual + row * columns + column
        total = (total.to(tl.float32) + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(total.dtype)
        tl.store(place, total, mask=inside)
    value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / columns + eps)
    value = value * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """The norm of each row of x [T, N].

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    return _launch(x, None, weight, eps, out)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`(rms_norm(total), total)` of total = x + residual, which is written into `residual`.

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    return _launch(x, residual, weight, eps, out), residual


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    if x.dim() != 2 or x.stride(1) != 1 or not 0 < x.shape[1] <= MAX_COLUMNS:
        raise ValueError(f"x is {list(x.shape)}, strides {x.stride()}; allowed: [T, 1 to {MAX_COLUMNS}], unit stride")
    rows, columns = x.shape
    check_tensor("weight", weight, (columns,), x)
    if residual is not None:
        check_tensor("residual", residual, (rows, columns), x)
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    else:
        check_tensor("out", out, (rows, columns), x)
    if rows:
        block = triton.next_power_of_2(columns)
        add_rmsnorm_kernel[(rows,)](
            x,
            residual,
            weight,
            out,
            eps,
            columns,
            x.stride(0),
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=warps_for(block),
        )
    return out


def warps_for(block: int) -> int:
    """Warps of a program over `block` columns: about 16 values a thread."""
    return min(max(block // 512, 1), 16)
