"""Weights of 4 or 8 bits: codes, and a scale for each output and group of inputs.

    value = (number of the code - zero) * scale

    format  number of the code                                     of a group's largest magnitude
    int8    -127 to 127                                            127
    int4    0 to 15; zero 8, or any                                7, or the whole range 15
    fp8     float8 E4M3: sign, 4 exponent bits, 3 of mantissa      448
    fp4     float4 E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and negative  6

Scales are float32. The formats are those of Open Compute's OFP8 and MX specifications, and of common int4 checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

GROUP_MULTIPLE = 32
"""Groups are a multiple of this many inputs, or all inputs."""


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
    """Whether products round their inputs to int8 too, each row by its largest (`round_rows`): W8A8."""

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        if self.round_inputs and (self.type is not CodeType.INT8 or self.group < inputs or self.zeros is not None):
            raise ValueError("inputs can be rounded only for int8 weights with a scale for each output, without zeros")
        if self.group < inputs and self.group % GROUP_MULTIPLE:
            raise ValueError(f"group is {self.group}; allowed: a multiple of {GROUP_MULTIPLE}, or {inputs}, all inputs")
        expected = (outputs, -(-inputs // self.group))
        for name, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tensor is not None and tensor.shape != expected:
                raise ValueError(f"{name} has shape {list(tensor.shape)}; allowed: {list(expected)}")

    @property
    def nbytes(self) -> int:
        """Bytes when packed."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.numel() * self.type.bits // 8 + self.scales.nbytes + zeros

    def outputs(self, rows: Tensor) -> "CodedWeight":
        """The weight of these outputs, int64 [rows]."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros)

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        inputs = self.codes.shape[1]
        numbers = NUMBERS[self.type]().to(self.codes.device)[self.codes.int()]
        if self.zeros is not None:
            numbers -= self.zeros.float().repeat_interleave(self.group, 1)[:, :inputs]
        return numbers * self.scales.repeat_interleave(self.group, 1)[:, :inputs]


def int8(weight: Tensor) -> CodedWeight:
    """A weight as int8: symmetric, with a scale for each output."""
    values = weight.float()
    scales = _scales(values.abs().amax(1, keepdim=True), 127)
    codes = (values / scales).round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    return CodedWeight(CodeType.INT8, codes, scales, None, weight.shape[1])


def w8a8(weight: Tensor) -> CodedWeight:
    """As `int8`, and inputs are rounded too."""
    return replace(int8(weight), round_inputs=True)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, in] as int8, by its largest magnitude in each row, and the scales [T, 1]."""
    values = x.float()
    scales = _scales(values.abs().amax(1, keepdim=True), 127)
    return (values / scales).round_().to(torch.int8), scales


def int4(weight: Tensor, group: int = 64) -> CodedWeight:
    """A weight as int4, with zeros. Each group takes the scale with the least squared error, of that which covers its
    range and smaller ones.
    """
    grouped, shape = _grouped(weight, group), weight.shape
    low, high = grouped.amin(-1).clamp_(max=0), grouped.amax(-1).clamp_(min=0)
    best = torch.full_like(low, torch.inf)
    scales, zeros = torch.ones_like(low), torch.zeros_like(low)
    codes = torch.zeros_like(grouped)
    for share in (1.0, 0.95, 0.9, 0.85, 0.8):
        scale = _scales((high - low) * share, 15)
        zero = (-low * share / scale).round_().clamp_(0, 15)
        tried = (grouped / scale[..., None]).round_().add_(zero[..., None]).clamp_(0, 15)
        error = ((tried - zero[..., None]) * scale[..., None] - grouped).square_().sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
        codes = torch.where(better[..., None], tried, codes)
    flat = codes.to(torch.uint8).flatten(1)[:, : shape[1]].contiguous()
    return CodedWeight(CodeType.INT4, flat, scales, zeros.to(torch.uint8), min(group, shape[1]))


def fp8(weight: Tensor) -> CodedWeight:
    """A weight as fp8, with a scale for each output."""
    values = weight.float()
    scales = _scales(values.abs().amax(1, keepdim=True), 448)
    codes = (values / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    return CodedWeight(CodeType.FP8, codes, scales, None, weight.shape[1])


def join(weights: Sequence[CodedWeight]) -> CodedWeight:
    """Weights with the same inputs, one below the other.

    Raises:
        ValueError: they aren't quantized alike.
    """
    first = weights[0]
    kinds = {(weight.type, weight.group, weight.zeros is None, weight.round_inputs) for weight in weights}
    if len(kinds) > 1:
        raise ValueError("weights that are multiplied together are quantized differently; allowed: all alike")
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    return CodedWeight(
        first.type,
        torch.cat([weight.codes for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        torch.cat(zeros) if zeros else None,
        first.group,
        first.round_inputs,
    )


def _grouped(weight: Tensor, group: int) -> Tensor:
    """float32 [out, groups, inputs of a group], padded with zeros."""
    values = weight.float()
    group = min(group, values.shape[1])
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % group))
    return padded.view(len(values), -1, group)


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
