"""The memory layout of KV, as a value that two workers can compare. No torch."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
SCALED = frozenset({"int8", "fp8"})
"""The dtypes of 8 bits; fp8 is E4M3 without infinities. Each head of a token has a scale for its keys and one for its
values, a bfloat16."""
SCALE_BYTES = 2

FloatDtype = Literal["float32", "bfloat16", "float16"]
"""Dtypes of weights and of computation."""
KVDtype = Literal["float32", "bfloat16", "float16", "int8", "fp8"]
Order = Literal["NHD", "HND"]


class LayerPart(NamedTuple):
    """The KV of some tokens in some layers: part `number`, from 0 on, of `of` parts that are as equal as possible."""

    number: int = 0
    of: int = 1

    def layers(self, layers: int) -> range:
        """The numbers of the part's layers, in a model with so many `layers`."""
        return range(self.number * layers // self.of, (self.number + 1) * layers // self.of)


ALL_LAYERS = LayerPart()


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and order of a block-first KV pool: `[block, layer, k|v, plane]`.

    A block across all layers is one contiguous run of `block_bytes`. A plane is the keys, or the values, of one layer
    in one block: numbers `[*inner]` and, if the dtype is one of SCALED, then their scales `[*inner without dim]`.
    `inner` is `[slot, head, dim]` for NHD (CPU) and `[head, slot, dim]` for HND (GPU, where a tensor-parallel slice of
    heads then stays contiguous).
    """

    layers: int
    kv_heads: int
    """KV heads held here: the model's, divided by the tensor-parallel degree."""
    head_dim: int
    block_size: int
    dtype: KVDtype
    order: Order = "NHD"
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_size", "tp_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVLayout.{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(f"KVLayout.tp_rank is {self.tp_rank}; it must be in [0, {self.tp_size})")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"KVLayout.dtype is {self.dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")
        if self.scaled and self.head_dim % 2:
            raise ValueError(f"KVLayout.head_dim is {self.head_dim}; with dtype {self.dtype!r} it must be even")

    @property
    def inner(self) -> tuple[int, int, int]:
        """Shape of one layer's keys in one block."""
        if self.order == "NHD":
            return self.block_size, self.kv_heads, self.head_dim
        return self.kv_heads, self.block_size, self.head_dim

    @property
    def scaled(self) -> bool:
        """Whether numbers are codes that have scales."""
        return self.dtype in SCALED

    @property
    def head_bytes(self) -> int:
        """Bytes of one token's keys, or values, in one head: `head_dim` numbers and their scale."""
        return self.head_dim * DTYPE_BYTES[self.dtype] + (SCALE_BYTES if self.scaled else 0)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers: `2 * layers * kv_heads * head_bytes`."""
        return 2 * self.layers * self.kv_heads * self.head_bytes

    @property
    def plane_bytes(self) -> int:
        """Bytes of the keys, or values, of one layer in one block."""
        return self.block_size * self.kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    def nbytes(self, tokens: int, part: LayerPart = ALL_LAYERS) -> int:
        """Bytes of the KV of `tokens` tokens."""
        return tokens * self.token_bytes // self.layers * len(part.layers(self.layers))

    def shape(self, blocks: int) -> tuple[int, ...]:
        """Shape of a pool of `blocks` blocks."""
        return blocks, self.layers, 2, *self.inner

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return math.ceil(tokens / self.block_size)

    def blocks_in(self, memory_bytes: int) -> int:
        """Blocks that fit into `memory_bytes`.

        Raises:
            ValueError: not even one fits.
        """
        blocks = memory_bytes // self.block_bytes
        if blocks < 1:
            raise ValueError(f"kv_memory_bytes is {memory_bytes}; one KV block of this model takes {self.block_bytes}")
        return blocks

    def sent_to(self, receiver: "KVLayout") -> "KVLayout":
        """The layout of frames from a pool of this layout to one of `receiver`'s.

        It has 8 bits if either has them: the sender converts to them. All other conversions are the receiver's.
        """
        return replace(self, dtype=receiver.dtype) if receiver.scaled and not self.scaled else self

    def mismatch(self, other: "KVLayout") -> str | None:
        """Names the first field that keeps KV of `other` from being converted to this layout; None if nothing does."""
        return self._differing(other, ("layers", "head_dim", "tp_size", "tp_rank", "kv_heads"))

    def conversion(self, other: "KVLayout") -> str | None:
        """Names the first field for which KV of `other` must be converted; None if the bytes are the same."""
        return self._differing(other, ("dtype", "block_size", "order"))

    def _differing(self, other: "KVLayout", names: Iterable[str]) -> str | None:
        for name in names:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine} here, {theirs} there"
        return None


def memory_runs(layout: KVLayout, blocks: Iterable[int], part: LayerPart = ALL_LAYERS) -> Iterator[tuple[int, int]]:
    """[first, end) of each run of bytes that `blocks` are in a pool, in their order; neighbours make one run."""
    whole, size = layout.block_bytes, layout.nbytes(layout.block_size, part)
    offset = whole // layout.layers * part.layers(layout.layers).start
    first = end = -1
    for block in blocks:
        start = block * whole + offset
        if start != end:
            if end > first:
                yield first, end
            first = start
        end = start + size
    if end > first:
        yield first, end
