"""Products of experts: each row has several of them, and all pairs of one expert are multiplied with its weights.

    y[p, n] = sum_k x[source[p], k] * w[e, n, k] + bias[e, n]     for the pairs p of expert e: from begins[e] on

    x        [T, K] contiguous, float16 or bfloat16 (float32 under the interpreter)
    source   int32 [P] row of each pair, in the order of the experts; or none, where x has the pairs in that order
    begins   int32 [E + 1]
    tiles    int32 [E + 1] tiles of pairs of the experts before each one
    w        of x's type [E * N, K]; or codes of all experts, one below the other (`QuantizedWeight`)
    bias     of x's type [E * N], or none
    y        [P, N]; rows of pairs without an expert, which come last, aren't written

Grid: (as many programs as run at once,), which go on from tile to tile of pairs and outputs, so that experts with few
pairs, and with many, keep all of them busy. Limit: in a decode step the reading of the chosen experts' weights, each
once for BLOCK_M pairs; with many rows the products.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor, dtype

from kvrelay.kernels.codes import CodedWeight, CodeType
from kvrelay.kernels.triton.checks import check_tensor
from kvrelay.kernels.triton.launch import Repeat, launch, processors_of
from kvrelay.kernels.triton.quant_decode import e4m3
from kvrelay.kernels.triton.quant_gemv import QuantizedWeight, check_weight
from kvrelay.kernels.triton.quant_linear import quantized

BLOCK_N = 128
FEW, MANY = 16, 64
"""Pairs of a tile where experts have few pairs on average, and where they have many."""
DENSE = "DENSE"


@triton.jit
def grouped_matmul_kernel(
    x,
    source,
    begins,
    tiles,
    w,
    scale,
    zero,
    bias,
    y,
    outputs,
    inputs,
    groups,
    experts,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SOURCE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    each = tl.arange(0, EXPERTS)
    ends = tl.load(tiles + 1 + each, mask=each < experts, other=2147483647)
    columns = tl.cdiv(outputs, BLOCK_N)
    total_tiles = tl.load(tiles + experts) * columns
    for tile in range(tl.program_id(0), total_tiles, tl.num_programs(0)):
        block, part = tile // columns, tile % columns
        expert = tl.sum((ends <= block).to(tl.int32), 0)
        first = tl.load(begins + expert) + (block - tl.load(tiles + expert)) * BLOCK_M
        pair = first + tl.arange(0, BLOCK_M)
        filled = (pair < tl.load(begins + expert + 1))[:, None]
        row = tl.load(source + pair, mask=pair < tl.load(begins + expert + 1), other=0) if HAS_SOURCE else pair
        column = part * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = (column < outputs)[:, None]
        # Beyond an expert's outputs, those of its last one are read, and not stored.
        wide = (expert.to(tl.int64) * outputs + tl.minimum(column, outputs - 1))[:, None]
        values_of = x + row.to(tl.int64)[:, None] * inputs
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, inputs, BLOCK_K):
            if FORMAT == "INT4":
                # A step is one group, whose halves are the halves of its bytes.
                half = tl.arange(0, BLOCK_K // 2)
                packed = tl.load(w + wide * (inputs // 2) + (start // 2 + half)[None, :])
                at = wide * groups + start // BLOCK_K
                s, z = tl.load(scale + at).to(tl.float32), tl.load(zero + at).to(tl.float32)
                low = tl.load(values_of + (start + half)[None, :], mask=filled, other=0.0)
                high = tl.load(values_of + (start + BLOCK_K // 2 + half)[None, :], mask=filled, other=0.0)
                total = tl.dot(low, tl.trans((((packed & 15).to(tl.float32) - z) * s).to(low.dtype)), total)
                total = tl.dot(high, tl.trans((((packed >> 4).to(tl.float32) - z) * s).to(low.dtype)), total)
            else:
                k = start + tl.arange(0, BLOCK_K)
                inside = (k < inputs)[None, :]
                codes = tl.load(w + wide * inputs + k[None, :], mask=inside, other=0)
                values = tl.load(values_of + k[None, :], mask=filled & inside, other=0.0)
                if FORMAT == "DENSE":
                    total = tl.dot(values, tl.trans(codes), total)
                else:
                    numbers = e4m3(codes) if FORMAT == "FP8" else codes.to(tl.float32)
                    if GROUP > 0:
                        numbers = numbers * tl.load(scale + wide * groups + start // GROUP)
                    total = tl.dot(values, tl.trans(numbers.to(values.dtype)), total)
        own = expert.to(tl.int64) * outputs + column
        if GROUP == 0 and FORMAT != "DENSE":
            total *= tl.load(scale + own, mask=column < outputs, other=0.0)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + own, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
        target = y + pair.to(tl.int64)[:, None] * outputs + column[None, :]
        tl.store(target, total.to(y.dtype.element_ty), mask=filled & tl.trans(valid))


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs of a step's rows and their experts, in the order of the experts."""

    block: int
    """Pairs of a tile."""
    begins: Tensor
    """int32 [E + 1] first pair of each expert."""
    tiles: Tensor
    """int32 [E + 1] tiles of pairs of the experts before each one."""
    source: Tensor
    """int32 [P] row of each pair."""
    places: Tensor
    """int64 [T, top] number of each pair, in the order of rows."""

    @classmethod
    def of(cls, chosen: Tensor, experts: int, load: Tensor | None = None) -> "Pairs":
        """The pairs of a step. No value is read on the host.

        Args:
            chosen: integers [T, top]; those from `experts` on name no expert, and such pairs come last.
            load: int64 [E], to which the pairs of each expert are added.
        """
        rows, top = chosen.shape
        flat = chosen.flatten().clamp(max=experts).long()
        order = flat.argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        block = FEW if rows * top <= FEW * experts else MANY
        own = counts[:experts]
        if load is not None:
            load += own
        begins, tiles = (
            torch.nn.functional.pad(count.cumsum(0), (1, 0)).int() for count in (own, (own + block - 1) // block)
        )
        return cls(block, begins, tiles, (order // top).int(), places.view(rows, top))


class GroupedMatmul:
    """A product with the weights of all experts, prepared: but for the first of its kind, a call repeats a launch."""

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None, experts: int, programs: int) -> None:
        """
        Args:
            weight: [E * N, K].
            bias: [E * N] or None.
            programs: that run at once.

        Raises:
            ValueError: a tensor has another shape, type or device than it should, or isn't that of so many experts.
        """
        shape = (int(weight.shape[0]), int(weight.shape[1]))
        if shape[0] % experts:
            raise ValueError(f"weight has {shape[0]} outputs; allowed: a multiple of {experts}, the number of experts")
        self._scale: Tensor | None = None
        self._zero: Tensor | None = None
        if isinstance(weight, QuantizedWeight):
            check_weight(weight, bias)
            self._group, self._step = weight.steps
            self._format, self._w, self._scale, self._zero = weight.type.name, weight.q, weight.scale, weight.zero
        else:
            check_tensor("weight", weight, shape, weight, weight.dtype)
            self._group, self._step, self._format = 0, 64, DENSE
            self._w = weight
        self._bias, self._experts, self._programs = bias, experts, programs
        self._outputs, self._inputs = shape[0] // experts, shape[1]
        self._known: dict[tuple[int, dtype, bool], Repeat] = {}

    def __call__(self, x: Tensor, pairs: Pairs, *, gathered: bool) -> Tensor:
        """y [P, N].

        Args:
            x: [T, K], or [P, K] if it has the pairs already.
            gathered: whether it has.

        Raises:
            ValueError: x has another shape or device than it should.
        """
        count, key = len(pairs.source), (pairs.block, x.dtype, gathered)
        known = self._known.get(key)
        y = x.new_empty((count, self._outputs))
        if known is None or x.shape[1] != self._inputs or not x.is_contiguous():
            rows = count if gathered else x.shape[0]
            check_tensor("x", x, (rows, self._inputs), self._w, x.dtype)
        grid = (self._programs, 1, 1)
        if known is not None:
            known(grid, x, pairs.source, pairs.begins, pairs.tiles, y)
            return y
        # Tiles and warps with which no architecture spills registers.
        made = launch(
            grouped_matmul_kernel,
            grid,
            x,
            pairs.source,
            pairs.begins,
            pairs.tiles,
            self._w,
            self._scale,
            self._zero,
            self._bias,
            y,
            self._outputs,
            self._inputs,
            triton.cdiv(self._inputs, self._group) if self._group else 1,
            self._experts,
            GROUP=self._group,
            FORMAT=self._format,
            HAS_SOURCE=not gathered,
            HAS_BIAS=self._bias is not None,
            EXPERTS=triton.next_power_of_2(self._experts),
            BLOCK_M=pairs.block,
            BLOCK_N=BLOCK_N // 2 if self._format == CodeType.INT4.name else BLOCK_N,
            BLOCK_K=self._step,
            num_warps=8 if pairs.block == MANY and self._format != DENSE else 4,
            num_stages=3,
        )
        self._known[key] = made.repeating("x", "source", "begins", "tiles", "y")
        return y


class GroupedExperts:
    """Calls a layer of experts: `run(x, chosen, shares)`, as `reference.experts`."""

    def __init__(
        self,
        up: GroupedMatmul,
        gate: Callable[[Tensor], Tensor],
        down: GroupedMatmul,
        experts: int,
        norm: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """
        Args:
            gate: the operation between the products, [P, outputs] -> [P, inputs of the second product].
            norm: an operation on the second product's results [P, hidden], before they are added up.
        """
        self._up, self._gate, self._down, self.experts, self._norm = up, gate, down, experts, norm
        self._load: Tensor | None = None

    def count(self, load: Tensor) -> None:
        """Has the pairs of each expert added to `load`, int64 [experts], from now on."""
        self._load = load

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """[T, hidden] of x [T, hidden], chosen [T, top] and shares [T, top]."""
        pairs = Pairs.of(chosen, self.experts, self._load)
        inner = self._gate(self._up(x.contiguous(), pairs, gathered=False))
        parts = self._down(inner.contiguous(), pairs, gathered=True)
        if self._norm is not None:
            parts = self._norm(parts)
        of_rows = parts[pairs.places].float() * shares[:, :, None].float()
        named = (chosen < self.experts)[:, :, None]
        # What isn't written of pairs without an expert may be NaN.
        return torch.where(named, of_rows, 0.0).sum(1).to(x.dtype)


def grouped_matmul(
    weight: CodedWeight | Tensor, bias: Tensor | None, experts: int, kind: dtype, device: torch.device
) -> GroupedMatmul:
    """A product with the weights of all experts on a device, for x of type `kind`. Codes that no kernel reads become
    dense weights."""
    programs = processors_of(device)
    offset = None if bias is None else bias.to(device, kind)
    found = quantized(weight, kind) if isinstance(weight, CodedWeight) else None
    if found is not None:
        zero = None if found.zero is None else found.zero.to(device)
        placed = replace(found, q=found.q.to(device), scale=found.scale.to(device), zero=zero)
        return GroupedMatmul(placed, offset, experts, programs)
    dense = weight.dequantize() if isinstance(weight, CodedWeight) else weight
    return GroupedMatmul(dense.to(device, kind).contiguous(), offset, experts, programs)
