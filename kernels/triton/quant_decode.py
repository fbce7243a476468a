"""Weights of 8 or 4 bits as numbers of x's type, in one pass: for products of so many rows that a dense one pays.

    int8   out[n, k] = q[n, k] * scale[n]
    fp8    out[n, k] = e4m3(q[n, k]) * scale[n, k / G]
    int4   out[n, k] = (q[n, k] - zero[n, k / G]) * scale[n, k / G], or q[n, k] * scale[n, k / G] + minimum[n, k / G]

    q      int8 [N, K]; uint8 [N, K] of E4M3; or uint8 [N, K / 2] with two weights in a byte (`pack_int4`)
    scale  float32 [N]; float32 [N, ceil(K / G)], G a multiple of 32 or K; of x's type [N, K / G]
    zero   of x's type [N, K / G], int4 only; or minimum, of scale's type (float16 or float32)
    out    [N, K] of float16, bfloat16 or float32

Numbers are computed in float32 and rounded once.

A run is a piece of an output's weights that have one scale, and is contiguous in q and in out. Grid: (ceil(runs /
BLOCK),). Limit: memory, q is read and out is written. E4M3 is decoded by arithmetic, which every GPU has.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.codes import CodeType
from kvrelay.kernels.triton.launch import Repeat, launch
from kvrelay.kernels.triton.overlap import begin_after_inputs, overlapping
from kvrelay.kernels.triton.quant_gemv import QuantizedWeight, check_weight

TYPES = (torch.float16, torch.bfloat16, torch.float32)


WEIGHTS, WARPS = 4096, 4
"""Weights of a program, and its warps: each thread should move vectors of 16 bytes, and several of them."""
RUN = 1024
"""Most weights of a run; int4 has a group in each."""


@triton.jit
def e4m3(codes):
    """float32 numbers of uint8 codes: sign, exponent and mantissa at their places in float16 are 2^-8 of the number."""
    wide = codes.to(tl.int16)
    return ((wide & 0x80) << 8 | (wide & 0x7F) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit(do_not_specialize=["runs", "row_runs", "groups", "group"])
def quant_decode_kernel(
    q,
    scale,
    shift,
    out,
    runs,
    row_runs,
    inputs,
    groups,
    group,
    FORMAT: tl.constexpr,
    MINIMA: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_after_inputs(OVERLAP)
    run = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = run < runs
    if FORMAT == "INT4":
        # All groups are full, so runs follow each other across outputs. The halves of a group are those of its bytes.
        first = run.to(tl.int64)[:, None]
        half = tl.arange(0, RUN // 2)[None, :]
        packed = tl.load(q + first * (RUN // 2) + half, mask=valid[:, None], other=0)
        s = tl.load(scale + run, mask=valid, other=0.0).to(tl.float32)[:, None]
        moved = tl.load(shift + run, mask=valid, other=0.0).to(tl.float32)[:, None]
        low, high = (packed & 15).to(tl.float32), (packed >> 4).to(tl.float32)
        if MINIMA:
            low, high = low * s + moved, high * s + moved
        else:
            low, high = (low - moved) * s, (high - moved) * s
        target = out + first * RUN + half
        tl.store(target, low.to(out.dtype.element_ty), mask=valid[:, None])
        tl.store(target + RUN // 2, high.to(out.dtype.element_ty), mask=valid[:, None])
    else:
        row, start = (run // row_runs).to(tl.int64), run % row_runs * RUN
        k = start[:, None] + tl.arange(0, RUN)[None, :]
        inside = valid[:, None] & (k < inputs)
        place = row[:, None] * inputs + k
        codes = tl.load(q + place, mask=inside, other=0)
        s = tl.load(scale + row * groups + start // group, mask=valid, other=0.0)[:, None]
        numbers = e4m3(codes) if FORMAT == "FP8" else codes.to(tl.float32)
        tl.store(out + place, (numbers * s).to(out.dtype.element_ty), mask=inside)


class QuantDecode:
    """Decodes one weight, prepared: but for the first of a type, a call repeats a launch."""

    def __init__(self, weight: QuantizedWeight) -> None:
        """
        Raises:
            ValueError: a tensor has another shape, type or device than it should.
        """
        check_weight(weight, None)
        self._weight, self._shape = weight, weight.shape
        outputs, inputs = weight.shape
        if weight.type is CodeType.INT4:
            self._run = weight.group
        else:
            # Starts of groups are starts of runs too.
            own = triton.next_power_of_2(inputs) if weight.group == inputs else weight.group & -weight.group
            self._run = min(RUN, own)
        self._row_runs = triton.cdiv(inputs, self._run)
        self._block = max(1, WEIGHTS // self._run)
        self._grid = (triton.cdiv(outputs * self._row_runs, self._block), 1, 1)
        self._known: dict[torch.dtype, Repeat] = {}

    def __call__(self, dtype: torch.dtype) -> Tensor:
        """The weight, [N, K] of `dtype`.

        Raises:
            ValueError: `dtype` is another type than float16, bfloat16 or float32.
        """
        weight = self._weight
        outputs, inputs = self._shape
        known = self._known.get(dtype)
        if known is None and dtype not in TYPES:
            raise ValueError(f"dtype is {dtype}; allowed: {', '.join(map(str, TYPES))}")
        out = torch.empty((outputs, inputs), dtype=dtype, device=weight.q.device)
        if known is not None:
            known(self._grid, out)
            return out
        made = launch(
            quant_decode_kernel,
            self._grid,
            weight.q,
            weight.scale,
            weight.shift,
            out,
            outputs * self._row_runs,
            self._row_runs,
            inputs,
            triton.cdiv(inputs, weight.group),
            weight.group,
            FORMAT=weight.type.name,
            MINIMA=weight.minimum is not None,
            RUN=self._run,
            BLOCK=self._block,
            num_warps=WARPS,
            **overlapping(),
        )
        self._known[dtype] = made.repeating("out")
        return out
