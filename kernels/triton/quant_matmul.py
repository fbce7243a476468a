"""Products with weights of 8 or 4 bits, for any number of rows: each tile of weights is decoded as it is read.

    int8   y[t, n] = scale[n] * sum_k x[t, k] * q[n, k]                            + bias[n]
    fp8    y[t, n] = sum_k x[t, k] * e4m3(q[n, k]) * scale[n, k / G]               + bias[n]
    int4   y[t, n] = sum_k x[t, k] * (q[n, k] - zero[n, k / G]) * scale[n, k / G]  + bias[n]
           y[t, n] = sum_k x[t, k] * (q[n, k] * scale[n, k / G] + minimum[n, k / G]) + bias[n]

    x      [T, K] contiguous, float16 or bfloat16 (float32 under the interpreter)
    q      int8 [N, K]; uint8 [N, K] of E4M3; or uint8 [N, K / 2] with two weights in a byte (`pack_int4`)
    scale  float32 [N]; float32 [N, K / G], G a multiple of 32 or K; of x's type [N, K / G]
    zero   of x's type [N, K / G], int4 only; or minimum, of scale's type (float16 or float32)
    bias   of x's type [N], or none
    y      [T, N]

Grid: (ceil(N / BLOCK_N), ceil(T / BLOCK_M)). Limit: with few rows the reading of q, with many the products. Each
BLOCK_M rows decode the weights again.
"""

import triton
import triton.language as tl
from torch import Tensor, dtype

from kvrelay.kernels.triton.checks import check_tensor
from kvrelay.kernels.triton.launch import Repeat, launch
from kvrelay.kernels.triton.quant_decode import e4m3
from kvrelay.kernels.triton.quant_gemv import QuantizedWeight, check_weight

BLOCK_N = 128


@triton.jit(do_not_specialize=["rows"])
def quant_matmul_kernel(
    x,
    q,
    scale,
    shift,
    bias,
    y,
    rows,
    outputs,
    inputs,
    groups,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    MINIMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    wide = column.to(tl.int64)[:, None]
    source = x + row.to(tl.int64)[:, None] * inputs
    valid, filled = (column < outputs)[:, None], (row < rows)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        if FORMAT == "INT4":
            # A step is one group, whose halves are the halves of its bytes.
            half = tl.arange(0, BLOCK_K // 2)
            packed = tl.load(q + wide * (inputs // 2) + (start // 2 + half)[None, :], mask=valid, other=0)
            at = wide * groups + start // BLOCK_K
            s = tl.load(scale + at, mask=valid, other=0.0).to(tl.float32)
            moved = tl.load(shift + at, mask=valid, other=0.0).to(tl.float32)
            low = tl.load(source + (start + half)[None, :], mask=filled, other=0.0)
            high = tl.load(source + (start + BLOCK_K // 2 + half)[None, :], mask=filled, other=0.0)
            first, second = (packed & 15).to(tl.float32), (packed >> 4).to(tl.float32)
            if MINIMA:
                first, second = first * s + moved, second * s + moved
            else:
                first, second = (first - moved) * s, (second - moved) * s
            total = tl.dot(low, tl.trans(first.to(low.dtype)), total)
            total = tl.dot(high, tl.trans(second.to(low.dtype)), total)
        else:
            k = start + tl.arange(0, BLOCK_K)
            inside = (k < inputs)[None, :]
            codes = tl.load(q + wide * inputs + k[None, :], mask=valid & inside, other=0)
            values = tl.load(source + k[None, :], mask=filled & inside, other=0.0)
            if FORMAT == "FP8":
                numbers = e4m3(codes)
                if GROUP > 0:
                    at = wide * groups + start // GROUP
                    numbers = numbers * tl.load(scale + at, mask=valid, other=0.0)
            else:
                numbers = codes.to(tl.float32)
            total = tl.dot(values, tl.trans(numbers.to(values.dtype)), total)
    if GROUP == 0:
        total *= tl.load(scale + column, mask=column < outputs, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    target = y + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=filled & (column < outputs)[None, :])


class QuantMatmul:
    """A product with one weight, prepared: but for the first of its kind, a call repeats a launch."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        """
        Raises:
            ValueError: a tensor has another shape, type or device than it should.
        """
        check_weight(weight, bias)
        self._weight, self._shape, self._bias = weight, weight.shape, bias
        self._group, self._step = weight.steps
        self._columns = triton.cdiv(weight.shape[0], BLOCK_N)
        self._known: dict[tuple[int, dtype], Repeat] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """y [T, N] of x [T, K].

        Raises:
            ValueError: x has another shape or device than it should.
        """
        weight = self._weight
        outputs, inputs = self._shape
        rows = x.shape[0]
        block_m = 16 if rows <= 16 else 64
        grid = (self._columns, -(-rows // block_m), 1)
        known = self._known.get((block_m, x.dtype))
        if known is None or x.shape[1] != inputs or not x.is_contiguous():
            check_tensor("x", x, (rows, inputs), weight.q, x.dtype)
        y = x.new_empty((rows, outputs))
        if known is not None:
            known(grid, x, y, rows)
            return y
        made = launch(
            quant_matmul_kernel,
            grid,
            x,
            weight.q,
            weight.scale,
            weight.shift,
            self._bias,
            y,
            rows,
            outputs,
            inputs,
            triton.cdiv(inputs, self._group) if self._group else 1,
            GROUP=self._group,
            FORMAT=weight.type.name,
            MINIMA=weight.minimum is not None,
            HAS_BIAS=self._bias is not None,
            BLOCK_M=block_m,
            BLOCK_N=BLOCK_N,
            BLOCK_K=self._step,
            num_warps=8 if block_m == 64 else 4,
            num_stages=3,
        )
        self._known[block_m, x.dtype] = made.repeating("x", "y", "rows")
        return y
