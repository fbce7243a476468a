"""Products with weights of 8 or 4 bits, for the few rows of a decode step.

    int8   y[t, n] = scale[n] * sum_k x[t, k] * q[n, k]                            + bias[n]
    int4   y[t, n] = sum_k x[t, k] * (q[n, k] - zero[n, k / G]) * scale[n, k / G]  + bias[n]
           y[t, n] = sum_k x[t, k] * (q[n, k] * scale[n, k / G] + minimum[n, k / G]) + bias[n]

    x      [T, K] contiguous, float16 or bfloat16 (float32 under the interpreter); T from 1 to 16
    q      int8 [N, K]; or uint8 [N, K / 2] with two weights in a byte (see `pack_int4`)
    scale  float32 [N]; or of x's type [N, K / G], with minima float16 or float32
    zero   of x's type [N, K / G], int4 only: whole numbers from 0 to 15; or
    minimum of scale's type [N, K / G], int4 only
    bias   of x's type [N], or none
    y      [T, N]

The weights are the matrix operand with many rows (tiles [BLOCK_N, BLOCK_K] times [BLOCK_K, 16]). So one tile serves all
rows of x, and 1 row costs as much as 16: the reading of q. Where N is too small to fill the device, K is split. The
program that finishes a tile last adds up the parts in a fixed order, so the same input gives the same output bits.

Grid: (ceil(N / BLOCK_N), splits). Limit: memory. `bytes_moved` counts it.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.codes import CodeType
from kvrelay.kernels.triton.checks import check_tensor
from kvrelay.kernels.triton.launch import Repeat, launch
from kvrelay.kernels.triton.overlap import begin_after_inputs, overlapping

MAX_ROWS = 16
GROUPS = (32, 64, 128, 256)
"""Allowed numbers of weights along K that share a scale and a zero."""
PROGRAMS = 4
"""Programs of a multiprocessor, which hide each other's waits."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of a program's work; the fastest of those tried on an H100, see benchmarks/NOTES.md."""

    outputs: int
    """BLOCK_N."""
    step: int
    """Weights along K of one step; with 4 bits at least a group."""
    warps: int
    stages: int


TILES = {8: Tile(32, 128, 2, 3), 4: Tile(64, 128, 4, 3)}
"""By the bits of a weight."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [N, K] of 8 or 4 bits."""

    q: Tensor
    """int8 [N, K]; uint8 [N, K] of E4M3; or uint8 [N, K / 2] of 4 bits."""
    scale: Tensor
    """float32 [N] of int8; float32 [N, ceil(K / group)] of E4M3; or [N, K / group] of 4 bits."""
    zero: Tensor | None = None
    """[N, K / group] of 4 bits."""
    minimum: Tensor | None = None
    """[N, K / group] of 4 bits, in place of `zero`."""
    fp8_group: int | None = None
    """Number of E4M3 weights along K that share a scale, of which the last group may have fewer; None for integers."""

    @property
    def type(self) -> CodeType:
        """INT8, INT4 or FP8."""
        if self.fp8_group is not None:
            return CodeType.FP8
        return CodeType.INT8 if self.shift is None else CodeType.INT4

    @property
    def shift(self) -> Tensor | None:
        """Zeros or minima of 4 bits."""
        return self.zero if self.minimum is None else self.minimum

    @property
    def bits(self) -> int:
        return 8 if self.shift is None else 4

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.q.shape[0], self.q.shape[1] * (8 // self.bits)

    @property
    def group(self) -> int:
        """Weights along K that share a scale; of int8, K."""
        if self.fp8_group is not None:
            return self.fp8_group
        return self.shape[1] if self.shift is None else self.shape[1] // self.scale.shape[1]

    @property
    def steps(self) -> tuple[int, int]:
        """Weights along K that share a scale, and those of a step, for products that scale weights as they are read.
        One scale for an output is applied to the sum, so its weights are in no groups: 0."""
        if self.type is CodeType.INT4:
            return self.group, self.group
        group = 0 if self.group == self.shape[1] else self.group
        return group, 64 if group % 64 == 0 else 32


def pack_int4(values: Tensor, group: int) -> Tensor:
    """uint8 [N, K / 2] of values 0 to 15, uint8 [N, K].

    Byte i of a group has weight i of the group in its low half, and weight i + group / 2 in its high half. So each half
    of a tile is multiplied with contiguous values of x.
    """
    halves: Tensor = values.unflatten(1, (-1, 2, group // 2))
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def bytes_moved(rows: int, weight: QuantizedWeight, element_size: int) -> int:
    """Bytes that must move: the weight with its scales and x are read, y is written."""
    outputs, inputs = weight.shape
    parts = [part.numel() * part.element_size() for part in (weight.q, weight.scale, weight.shift) if part is not None]
    return sum(parts) + rows * (inputs + outputs) * element_size


@triton.jit
def _finish(y, bias, total, row, column, rows, outputs, HAS_BIAS: tl.constexpr):
    """Stores total [BLOCK_N, ROWS] as y [T, N]."""
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[:, None]
    target = y + row[None, :].to(tl.int64) * outputs + column[:, None]
    inside = (row[None, :] < rows) & (column[:, None] < outputs)
    tl.store(target, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _above_zero(codes, zero):
    """codes - zero, exactly, in zero's type; codes are 0 to 15.

    The conversion from integers is slower than the product. So a code is written into the last bits of a number whose
    last bits count ones: 128 in bfloat16, 1024 in float16.
    """
    if zero.dtype == tl.bfloat16:
        found = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (zero + 128.0)
    elif zero.dtype == tl.float16:
        found = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (zero + 1024.0)
    else:
        found = codes.to(zero.dtype) - zero
    return found


@triton.jit(do_not_specialize=["rows"])
def quant_gemv_kernel(
    x,
    q,
    scale,
    shift,
    bias,
    y,
    parts,
    arrivals,
    rows,
    outputs,
    inputs,
    span,
    BITS: tl.constexpr,
    MINIMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS_OF_STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_after_inputs(OVERLAP)
    tile, split = tl.program_id(0), tl.program_id(1)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    wide = column.to(tl.int64)[:, None]
    valid = (column < outputs)[:, None]
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    first = split * span
    for start in range(first, tl.minimum(first + span, inputs), BLOCK_K * GROUPS_OF_STEP):
        if BITS == 8:
            k = start + tl.arange(0, BLOCK_K)
            weights = tl.load(q + wide * inputs + k[None, :], mask=valid & (k < inputs)[None, :], other=0)
            source = x + row[None, :] * inputs + k[:, None]
            values = tl.load(source, mask=(row < rows)[None, :] & (k < inputs)[:, None], other=0.0)
            total = tl.dot(weights.to(values.dtype), values, total)
        else:
            half = tl.arange(0, BLOCK_K // 2)
            filled = (row < rows)[None, :]
            for number in tl.static_range(GROUPS_OF_STEP):
                # A group's scale is applied to its product.
                k = start + number * BLOCK_K
                packed = tl.load(q + wide * (inputs // 2) + (k // 2 + half)[None, :], mask=valid, other=0)
                source = x + row[None, :] * inputs + (k + half)[:, None]
                group = wide * (inputs // BLOCK_K) + k // BLOCK_K
                moved = tl.load(shift + group, mask=valid, other=0.0)
                first_half = tl.load(source, mask=filled, other=0.0)
                second_half = tl.load(source + BLOCK_K // 2, mask=filled, other=0.0)
                zero = tl.zeros((BLOCK_N, 1), first_half.dtype) if MINIMA else moved
                part = tl.dot(_above_zero(packed & 15, zero), first_half)
                part = tl.dot(_above_zero(packed >> 4, zero), second_half, part)
                total += part * tl.load(scale + group, mask=valid, other=0.0).to(tl.float32)
                if MINIMA:
                    values = tl.sum(first_half.to(tl.float32) + second_half.to(tl.float32), 0)
                    total += moved.to(tl.float32) * values[None, :]
    if BITS == 8:
        total *= tl.load(scale + column, mask=column < outputs, other=0.0)[:, None]
    if SPLITS == 1:
        _finish(y, bias, total, row, column, rows, outputs, HAS_BIAS)
    else:
        within = tl.arange(0, BLOCK_N)[:, None] * ROWS + row[None, :]
        base = parts + tile.to(tl.int64) * SPLITS * BLOCK_N * ROWS
        tl.store(base + split * BLOCK_N * ROWS + within, total, cache_modifier=".cg")
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            tl.debug_barrier()
            total = tl.zeros((BLOCK_N, ROWS), tl.float32)
            for part in range(SPLITS):
                total += tl.load(base + part * BLOCK_N * ROWS + within, cache_modifier=".cg")
            _finish(y, bias, total, row, column, rows, outputs, HAS_BIAS)
            # This was the tile's last program: reset the count for the next launch.
            tl.store(arrivals + tile, 0)


class QuantGemv:
    """A product with one weight, and the workspace of its splits; but for the first of a type, a call repeats a launch.

    Launches of one object must not overlap.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, processors: int) -> None:
        """
        Args:
            processors: multiprocessors of the device; all should get work.

        Raises:
            ValueError: a tensor has another shape, type or device than it should.
        """
        outputs, inputs = weight.shape
        check_weight(weight, bias)
        if weight.type is CodeType.FP8:
            raise ValueError("weight is FP8; allowed: INT8, INT4")
        self._tile = TILES[weight.bits]
        tiles = triton.cdiv(outputs, self._tile.outputs)
        self._weight = weight
        self._bias = bias
        self._block = self._tile.step if weight.bits == 8 else weight.group
        # With groups smaller than a step, a step has as many of them as divide K.
        self._groups = math.gcd(max(1, self._tile.step // self._block), triton.cdiv(inputs, self._block))
        step = self._block * self._groups
        steps = triton.cdiv(inputs, step)
        # A split of fewer than 4 steps is mostly overhead.
        wanted = max(1, min(PROGRAMS * processors // tiles, steps // 4))
        self._span = triton.cdiv(steps, wanted) * step
        self.splits = triton.cdiv(inputs, self._span)
        self._tiles = tiles
        device = weight.q.device
        size = tiles * self.splits * self._tile.outputs * MAX_ROWS if self.splits > 1 else 0
        self._parts = torch.empty(size, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(tiles, dtype=torch.int32, device=device)
        self._known: dict[torch.dtype, Repeat] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """y [T, N] of x [T, K], 1 to 16 rows.

        Raises:
            ValueError: x has another shape, type or device than it should.
        """
        outputs, inputs = self._weight.shape
        if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_ROWS:
            raise ValueError(f"x is {list(x.shape)}; allowed: [1 to {MAX_ROWS}, {inputs}]")
        weight, rows = self._weight, x.shape[0]
        known = self._known.get(x.dtype)
        if known is None or x.shape[1] != inputs or not x.is_contiguous():
            typed = weight.zero if self._bias is None else self._bias
            check_tensor("x", x, (rows, inputs), weight.q, x.dtype if typed is None else typed.dtype)
        y = x.new_empty((rows, outputs))
        grid = (self._tiles, self.splits, 1)
        if known is not None:
            known(grid, x, y, rows)
            return y
        made = launch(
            quant_gemv_kernel,
            grid,
            x,
            weight.q,
            weight.scale,
            weight.shift,
            self._bias,
            y,
            self._parts,
            self._arrivals,
            rows,
            outputs,
            inputs,
            self._span,
            BITS=weight.bits,
            MINIMA=weight.minimum is not None,
            HAS_BIAS=self._bias is not None,
            SPLITS=self.splits,
            ROWS=MAX_ROWS,
            BLOCK_N=self._tile.outputs,
            BLOCK_K=self._block,
            GROUPS_OF_STEP=self._groups,
            num_warps=self._tile.warps,
            num_stages=self._tile.stages,
            **overlapping(),
        )
        self._known[x.dtype] = made.repeating("x", "y", "rows")
        return y


def check_weight(weight: QuantizedWeight, bias: Tensor | None) -> None:
    """Checks a weight, and the bias of its products.

    Raises:
        ValueError: a tensor has another shape, type or device than it should.
    """
    outputs, inputs = weight.shape
    q, scale, zero, minimum = weight.q, weight.scale, weight.zero, weight.minimum
    if (
        q.dim() != 2
        or q.dtype != (torch.int8 if weight.type is CodeType.INT8 else torch.uint8)
        or not q.is_contiguous()
    ):
        raise ValueError(
            f"q of {weight.type.name} is {q.dtype} {list(q.shape)}, strides {q.stride()}; "
            "allowed: int8 [N, K], uint8 [N, K] of FP8, or uint8 [N, K / 2] of INT4, contiguous"
        )
    if weight.fp8_group is not None:
        if zero is not None or not (weight.group == inputs or (0 < weight.group < inputs and not weight.group % 32)):
            raise ValueError(f"group of FP8 is {weight.group}; allowed: a multiple of 32, or {inputs}, without zeros")
        check_tensor("scale", scale, (outputs, triton.cdiv(inputs, weight.group)), q, torch.float32)
    elif weight.shift is None:
        check_tensor("scale", scale, (outputs,), q, torch.float32)
    else:
        if scale.dim() != 2 or weight.group not in GROUPS or inputs % weight.group:
            raise ValueError(f"scale is {list(scale.shape)}; allowed: [{outputs}, {inputs} / one of {GROUPS}]")
        if zero is not None and minimum is not None:
            raise ValueError("a weight has zeros and minima; allowed: one of them")
        check_tensor("scale", scale, (outputs, inputs // weight.group), q, scale.dtype)
        name = "minimum" if zero is None else "zero"
        check_tensor(name, weight.shift, (outputs, inputs // weight.group), scale)
    if bias is not None:
        check_tensor("bias", bias, (outputs,), q, bias.dtype if zero is None else zero.dtype)
