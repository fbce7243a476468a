"""Weights of 4 or 8 bits: codes, and a scale for each output and group of inputs.

    value = (number of the code - zero) * scale + minimum

    format  number of the code                                     of a group's largest magnitude
    int8    -127 to 127                                            127
    int4    0 to 15; zero 8, or any                                7, or the whole range 15
    fp8     float8 E4M3: sign, 4 exponent bits, 3 of mantissa      448
    fp4     float4 E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and negative  6

Scales and minima are float32; a weight has zeros, minima or neither. The formats are those of Open Compute's OFP8 and
MX specifications, of common int4 checkpoints, and of GGUF files.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import overload

import torch
from torch import Tensor

GROUP_MULTIPLE = 32
"""Divisor of the number of inputs in a group, unless a group has all inputs."""
SMALLEST_GROUP = 16
"""Smallest number of inputs in a group of int8."""
PAGED_BYTES = 2**18
"""Tensors of this many bytes or more get pages of their own."""


class CodeType(IntEnum):
    """Types of codes, numbered as `WeightType` in native/linear.h."""

    INT8 = 2
    INT4 = 3
    FP8 = 4
    FP4 = 5

    @property
    def bits(self) -> int:
        return 4 if self in (CodeType.INT4, CodeType.FP4) else 8


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A weight [out, in] as codes."""

    type: CodeType
    codes: Tensor
    """uint8 [out, in], one code in each byte; int8 as two's complement."""
    scales: Tensor
    """float32 [out, groups]."""
    zeros: Tensor | None
    """Zeros, uint8 [out, groups]; None for 0."""
    group: int
    """Number of inputs that share a scale; the last group may be shorter."""
    round_inputs: bool = False
    """Whether products round their inputs to int8 too, each row by its largest magnitude: W8A8."""
    minima: Tensor | None = None
    """Numbers that are added to a group's weights, float32 [out, groups]; None for 0."""

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        shifted = self.zeros is not None or self.minima is not None
        if self.round_inputs and (self.type is not CodeType.INT8 or self.group < inputs or shifted):
            raise ValueError("inputs can be rounded only for int8 weights with a scale for each output, without zeros")
        if self.zeros is not None and self.minima is not None:
            raise ValueError("a weight has zeros and minima; allowed: one of them")
        smallest = self.type is CodeType.INT8 and self.group == SMALLEST_GROUP
        if self.group < inputs and self.group % GROUP_MULTIPLE and not smallest:
            raise ValueError(f"group is {self.group}; allowed: a multiple of {GROUP_MULTIPLE}, or {inputs}, all inputs")
        expected = (outputs, -(-inputs // self.group))
        for name, tensor in (("scales", self.scales), ("zeros", self.zeros), ("minima", self.minima)):
            if tensor is not None and tensor.shape != expected:
                raise ValueError(f"{name} has shape {list(tensor.shape)}; allowed: {list(expected)}")

    @property
    def nbytes(self) -> int:
        """Bytes when packed."""
        groups = sum(part.nbytes for part in (self.scales, self.zeros, self.minima) if part is not None)
        return self.codes.numel() * self.type.bits // 8 + groups

    def is_finite(self) -> bool:
        """Whether all weights are: scales, minima and, in fp8, codes."""
        if self.type is CodeType.FP8 and bool(((self.codes & 0x7F) == 0x7F).any()):
            return False
        return all(part is None or bool(torch.isfinite(part).all()) for part in (self.scales, self.minima))

    def outputs(self, rows: Tensor) -> "CodedWeight":
        """The weight of these outputs, int64 [rows]."""
        zeros, minima = (None if part is None else part[rows] for part in (self.zeros, self.minima))
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros, minima=minima)

    def inputs(self, begin: int, end: int) -> "CodedWeight":
        """The weight of some inputs, whole groups of them."""
        if self.group >= self.codes.shape[1]:
            return replace(self, codes=self.codes[:, begin:end], group=max(1, end - begin))
        first, last = begin // self.group, -(-end // self.group)
        zeros, minima = (None if part is None else part[:, first:last] for part in (self.zeros, self.minima))
        codes, scales = self.codes[:, begin:end], self.scales[:, first:last]
        return replace(self, codes=codes, scales=scales, zeros=zeros, minima=minima)

    def padded(self, outputs: int, inputs: int) -> "CodedWeight":
        """The weight with zeros as further outputs and inputs, up to so many."""
        rows, columns = outputs - len(self.codes), inputs - self.codes.shape[1]
        if rows == columns == 0:
            return self
        group = inputs if self.group >= self.codes.shape[1] else self.group
        more = (0, -(-inputs // group) - self.scales.shape[1], 0, rows)
        pad = torch.nn.functional.pad
        return replace(
            self,
            codes=pad(self.codes, (0, columns, 0, rows)),
            scales=pad(self.scales, more),
            zeros=None if self.zeros is None else pad(self.zeros, more),
            minima=None if self.minima is None else pad(self.minima, more),
            group=group,
        )

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        inputs = self.codes.shape[1]
        numbers = NUMBERS[self.type]().to(self.codes.device)[self.codes.int()]
        if self.zeros is not None:
            numbers -= self.zeros.float().repeat_interleave(self.group, 1)[:, :inputs]
        numbers *= self.scales.repeat_interleave(self.group, 1)[:, :inputs]
        if self.minima is not None:
            numbers += self.minima.repeat_interleave(self.group, 1)[:, :inputs]
        return numbers


QuantizeColumns = Callable[[Tensor, Tensor], CodedWeight]
"""Quantizes some columns of a weight, given the largest magnitude of each whole row."""


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor, in pages of its own if it is large.

    Such pages return to the system with the tensor. On the heap, each weight that is read, packed and dropped would
    leave a hole that the next one doesn't quite fit: in the end a third of the model's size.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < PAGED_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)


def int8(weight: Tensor, largest: Tensor | None = None) -> CodedWeight:
    """A weight as int8: symmetric, with a scale for each output.

    Args:
        largest: float32 [out] magnitudes, if the weight has only some of the inputs and its scales are those of all.
    """
    values = weight.float()
    scales = _scales(_largest(values, largest), 127)
    codes = (values / scales).round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    return CodedWeight(CodeType.INT8, codes, scales, None, weight.shape[1])


def w8a8(weight: Tensor, largest: Tensor | None = None) -> CodedWeight:
    """As `int8`, and inputs are rounded too."""
    return replace(int8(weight, largest), round_inputs=True)


def int4(weight: Tensor, group: int = 64) -> CodedWeight:
    """A weight as int4, with zeros. Each group takes the scale with the least squared error, of that which covers its
    range and smaller ones.
    """
    grouped, shape = _grouped(weight, group), weight.shape
    low, high = grouped.amin(-1).clamp_(max=0), grouped.amax(-1).clamp_(min=0)
    best = torch.full_like(low, torch.inf)
    scales, zeros = torch.ones_like(low), torch.zeros_like(low)
    codes = torch.zeros_like(grouped)
    tried, work = torch.empty_like(grouped), torch.empty_like(grouped)
    for share in (1.0, 0.95, 0.9, 0.85, 0.8):
        scale = _scales((high - low) * share, 15)
        zero = (-low * share / scale).round_().clamp_(0, 15)
        torch.div(grouped, scale[..., None], out=tried).round_().add_(zero[..., None]).clamp_(0, 15)
        torch.sub(tried, zero[..., None], out=work).mul_(scale[..., None]).sub_(grouped).square_()
        error = work.sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
        torch.where(better[..., None], tried, codes, out=codes)
    flat = codes.to(torch.uint8).flatten(1)[:, : shape[1]].contiguous()
    return CodedWeight(CodeType.INT4, flat, scales, zeros.to(torch.uint8), min(group, shape[1]))


def fp8(weight: Tensor, largest: Tensor | None = None) -> CodedWeight:
    """A weight as fp8, with a scale for each output; `largest` as for `int8`."""
    values = weight.float()
    scales = _scales(_largest(values, largest), 448)
    codes = (values / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    return CodedWeight(CodeType.FP8, codes, scales, None, weight.shape[1])


def join(weights: Sequence[CodedWeight]) -> CodedWeight:
    """Weights with the same inputs, one below the other.

    Raises:
        ValueError: they aren't quantized alike.
    """
    first = weights[0]
    kinds = {
        (weight.type, weight.group, weight.zeros is None, weight.minima is None, weight.round_inputs)
        for weight in weights
    }
    if len(kinds) > 1:
        raise ValueError("weights that are multiplied together are quantized differently; allowed: all alike")
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    minima = [weight.minima for weight in weights if weight.minima is not None]
    return replace(
        first,
        codes=torch.cat([weight.codes for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=torch.cat(zeros) if zeros else None,
        minima=torch.cat(minima) if minima else None,
    )


@overload
def outputs_or_zeros(weight: Tensor, rows: Tensor) -> Tensor: ...


@overload
def outputs_or_zeros(weight: CodedWeight, rows: Tensor) -> CodedWeight: ...


@overload
def outputs_or_zeros(weight: Tensor | CodedWeight, rows: Tensor) -> Tensor | CodedWeight: ...


def outputs_or_zeros(weight: Tensor | CodedWeight, rows: Tensor) -> Tensor | CodedWeight:
    """The weight [out, in], or the bias [out], with reordered outputs.

    Args:
        rows: int64 [outputs], of which -1 stands for zeros.
    """
    chosen, added = rows.clamp(min=0), rows < 0
    if isinstance(weight, CodedWeight):
        coded = weight.outputs(chosen)
        coded.scales[added] = 0
        if coded.minima is not None:
            coded.minima[added] = 0
        return coded
    found = weight[chosen]
    found[added] = 0
    return found


def alike(weights: Sequence[CodedWeight]) -> list[CodedWeight]:
    """The same weights, of int8 or int4, in one format, so that `join` takes them."""
    if len({(weight.type, weight.group, weight.zeros is None, weight.minima is None) for weight in weights}) == 1:
        return list(weights)
    return [_as_int8(weight, min(each.group for each in weights)) for weight in weights]


def _as_int8(weight: CodedWeight, group: int) -> CodedWeight:
    """The weight as int8 with minima, in groups of which its own is a multiple."""
    codes, parts = weight.codes, weight.group // group
    if weight.zeros is not None:
        codes = codes - weight.zeros.repeat_interleave(weight.group, 1)[:, : codes.shape[1]]
    minima = torch.zeros_like(weight.scales) if weight.minima is None else weight.minima
    scales, minima = (tensor.repeat_interleave(parts, 1) for tensor in (weight.scales, minima))
    return replace(weight, type=CodeType.INT8, codes=codes, scales=scales, zeros=None, minima=minima, group=group)


def _grouped(weight: Tensor, group: int) -> Tensor:
    """float32 [out, groups, inputs of a group], padded with zeros."""
    values = weight.float()
    group = min(group, values.shape[1])
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % group))
    return padded.view(len(values), -1, group)


def _largest(values: Tensor, largest: Tensor | None) -> Tensor:
    """[out, 1] the largest magnitude of each output, unless given."""
    return values.abs().amax(1, keepdim=True) if largest is None else largest[:, None]


def _scales(range_: Tensor, steps: float) -> Tensor:
    """The scales of groups with these ranges; 1 for a group of zeros."""
    return torch.where(range_ > 0, range_ / steps, 1.0)


def _e2m1() -> Tensor:
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat((magnitudes, -magnitudes))


NUMBERS: dict[CodeType, Callable[[], Tensor]] = {
    CodeType.INT8: lambda: torch.arange(256, dtype=torch.uint8).view(torch.int8).float(),
    CodeType.INT4: lambda: torch.arange(16).float(),
    CodeType.FP8: lambda: torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
    CodeType.FP4: _e2m1,
}
"""float32 number of each code."""
