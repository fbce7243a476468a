"""Numbers, tensors in registers and global memory, for `gluon_interpreter`."""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from kvrelay.kernels.gluon_prefill import TYPES

TORCH = {gl.float32: torch.float32, gl.int32: torch.int32, gl.int64: torch.int64}
TORCH |= {gluon: plain for plain, gluon in TYPES.items()}
"""torch's types, by Gluon's."""


class Whole(int):
    """An integer that is divided as in C: towards zero."""

    def to(self, dtype: Any) -> "Whole":
        return self

    def __floordiv__(self, other: Any) -> "Whole":
        quotient = abs(int(self)) // abs(int(other))
        return Whole(quotient if (self < 0) == (other < 0) else -quotient)

    def __mod__(self, other: Any) -> "Whole":
        return Whole(int(self) - int(self // other) * int(other))

    def __add__(self, other: Any) -> Any:
        return Whole(int(self) + int(other)) if isinstance(other, int) else NotImplemented

    def __sub__(self, other: Any) -> Any:
        return Whole(int(self) - int(other)) if isinstance(other, int) else NotImplemented

    def __mul__(self, other: Any) -> Any:
        return Whole(int(self) * int(other)) if isinstance(other, int) else NotImplemented

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: int) -> "Whole":
        return Whole(int(other) - int(self))


def plain(value: Any) -> Any:
    return value.data if isinstance(value, Tile) else value


def _binary(operation: Callable[[Any, Any], Tensor]) -> Any:
    return lambda self, other: Tile(operation(self.data, plain(other)))


def _reversed(operation: Callable[[Any, Any], Tensor]) -> Any:
    return lambda self, other: Tile(operation(plain(other), self.data))


class Tile:
    """A tensor in registers."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.type = types.SimpleNamespace(layout=None)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def to(self, dtype: Any) -> "Tile":
        return Tile(self.data.to(TORCH[dtype]))

    def __getitem__(self, key: Any) -> "Tile":
        return Tile(self.data[key])

    __add__ = __radd__ = _binary(torch.add)
    __mul__ = __rmul__ = _binary(torch.mul)
    __sub__, __rsub__ = _binary(torch.sub), _reversed(torch.sub)
    __truediv__ = _binary(torch.true_divide)
    __floordiv__ = _binary(lambda a, b: torch.div(a, b, rounding_mode="trunc"))
    __mod__ = _binary(torch.fmod)
    __and__ = _binary(torch.bitwise_and)
    __lt__, __le__, __gt__, __ge__ = map(_binary, (torch.lt, torch.le, torch.gt, torch.ge))


@dataclass(frozen=True)
class Pointer:
    """A place, or a tile of places, in global memory."""

    memory: Tensor
    offset: Any = 0

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + other)


def load(pointer: Pointer, mask: Tile | None = None, other: float = 0.0) -> Any:
    offset = plain(pointer.offset)
    if not isinstance(offset, Tensor):
        return Whole(pointer.memory[offset])
    inside = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask.data.expand(offset.shape)
    _check_inside(pointer.memory, offset[inside])
    return Tile(torch.where(inside, pointer.memory[torch.where(inside, offset, 0)], other))


def store(pointer: Pointer, value: Tile, mask: Tile) -> None:
    offset = plain(pointer.offset)
    inside = mask.data.expand(offset.shape)
    _check_inside(pointer.memory, offset[inside])
    pointer.memory[offset[inside]] = value.data[inside]


def _check_inside(memory: Tensor, offsets: Tensor) -> None:
    if len(offsets) and (offsets.min() < 0 or offsets.max() >= len(memory)):
        raise IndexError(f"offsets {offsets.min()} to {offsets.max()} of a tensor of {len(memory)}")


def reducing(whole: Callable[..., Tensor]) -> Callable[[Tile, int], Any]:
    def reduce(value: Tile, axis: int) -> Any:
        result = whole(value.data, axis)
        return Tile(result) if result.dim() else Whole(result)

    return reduce


def pairwise(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Any]:
    def apply(a: Any, b: Any) -> Any:
        result = operation(torch.as_tensor(plain(a)), torch.as_tensor(plain(b)))
        return Tile(result) if isinstance(a, Tile) or isinstance(b, Tile) else Whole(result)

    return apply


def where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, Tile):
        return Tile(torch.where(condition.data, plain(yes), plain(no)))
    return yes if condition else no
