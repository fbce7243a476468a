"""The memory layout of KV, as a value that two workers can compare. No torch.

A model's layers are in groups. All layers of a group need the same tokens of a sequence, so they share its block table:

    full     the KV of all tokens, in blocks that grow with the sequence
    latent   the same, of numbers from which a layer computes the keys and values of all heads
    window   the KV of the last tokens: blocks outside of the window are freed, and never sent
    state    numbers whose size doesn't depend on the sequence: a slot per sequence, and snapshots at block borders

The KV of a group is in tracks, each a pool of its own that is as its `KVLayout` says: layers whose keys and values have
the same shape are one track with two planes; keys and values of different sizes are a track each, as is whatever else a
layer keeps of a token. A layer that reads another one's KV has none itself.

A state's track has one block for each sequence, of one "token" with `head_dim` bytes in each layer; its dtype is `raw`.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1, "raw": 1}
SCALED = frozenset({"int8", "fp8"})
"""The dtypes of 8 bits; fp8 is E4M3 without infinities. Each head of a token has a scale for its keys and one for its
values, a bfloat16."""
SCALE_BYTES = 2

FloatDtype = Literal["float32", "bfloat16", "float16"]
"""Dtypes of weights and of computation."""
KVDtype = Literal["float32", "bfloat16", "float16", "int8", "fp8", "raw"]
"""Dtypes of KV; `raw` is bytes that nobody converts."""
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
    """Shape and order of a block-first KV pool: `[block, layer, plane of the layer, bytes]`.

    A block across all layers is one contiguous run of `block_bytes`. A plane is the keys, or the values, of one layer
    in one block; a layer has both, unless `planes` is 1. It has numbers `[*inner]` and, if the dtype is one of SCALED,
    then their scales `[*inner without dim]`.
    `inner` is `[slot, head, dim]` for NHD (CPU) and `[head, slot, dim]` for HND (GPU, where a tensor-parallel slice of
    heads then stays contiguous).
    """

    layers: int
    kv_heads: int
    """KV heads held here: the model's, or a rank's part of them."""
    head_dim: int
    block_size: int
    dtype: KVDtype
    order: Order = "NHD"
    planes: int = 2
    """Planes of a layer in a block: 2 for keys and values, 1 for one kind of numbers."""
    replicated: bool = False
    """Whether each rank of a worker's stage holds all of the heads, because each computes all of them."""

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVLayout.{name} is {getattr(self, name)}; it must be at least 1")
        if self.planes not in (1, 2):
            raise ValueError(f"KVLayout.planes is {self.planes}; allowed: 1 or 2")
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
        """Bytes of one token's KV over all layers: `layers * planes * kv_heads * head_bytes`."""
        return self.planes * self.layers * self.kv_heads * self.head_bytes

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
        return blocks, self.layers, self.planes, *self.inner

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks for `tokens` tokens."""
        return math.ceil(tokens / self.block_size)

    def sent_to(self, receiver: "KVLayout") -> "KVLayout":
        """The layout of frames from a pool of this layout to one of `receiver`'s.

        It has 8 bits if either has them: the sender converts to them. All other conversions are the receiver's.
        """
        return replace(self, dtype=receiver.dtype) if receiver.scaled and not self.scaled else self

    def mismatch(self, other: "KVLayout") -> str | None:
        """Names the first field that keeps KV of `other` from being converted to this layout; None if nothing does."""
        return self._differing(other, ("layers", "planes", "head_dim", "kv_heads"))

    def conversion(self, other: "KVLayout") -> str | None:
        """Names the first field for which KV of `other` must be converted; None if the bytes are the same."""
        return self._differing(other, ("dtype", "block_size", "order"))

    def _differing(self, other: "KVLayout", names: Iterable[str]) -> str | None:
        for name in names:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine} here, {theirs} there"
        return None


GroupKind = Literal["full", "latent", "window", "state"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that need the same tokens of a sequence; the module's docstring has the kinds."""

    kind: GroupKind
    tracks: tuple[KVLayout, ...]
    """Tracks of the group, whose blocks have the same ids. None in the first group of a model that keeps nothing of all
    tokens."""
    window: int = 0
    """Number of tokens that a token sees, itself included; 0 unless the kind is `window`."""

    def __post_init__(self) -> None:
        if (self.window > 0) != (self.kind == "window"):
            raise ValueError(f"LayerGroup.window is {self.window}; it must be at least 1 for `window`, else 0")
        for track in self.tracks:
            if (track.dtype == "raw") != (self.kind == "state"):
                raise ValueError(f"LayerGroup.tracks has dtype {track.dtype!r} in a group of kind {self.kind!r}")

    def first_needed(self, tokens: int) -> int:
        """The first of `tokens` tokens whose KV the token behind them needs: a block's border, unless all are needed.

        For a state it is 0: the state is that of all of them.
        """
        if self.kind != "window" or not self.tracks:
            return 0
        size = self.tracks[0].block_size
        return max(0, tokens - self.window + 1) // size * size


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All that a model keeps of a sequence."""

    groups: tuple[LayerGroup, ...]
    """Groups in order. The first is `full` or `latent`, and its blocks count a sequence's tokens, even if it has no
    tracks."""
    block_size: int

    def __post_init__(self) -> None:
        if not self.groups or self.groups[0].kind not in ("full", "latent"):
            raise ValueError("CacheLayout.groups must begin with a group of kind `full` or `latent`")
        for group in self.groups:
            for track in group.tracks:
                size = 1 if group.kind == "state" else self.block_size
                if track.block_size != size:
                    raise ValueError(f"KVLayout.block_size is {track.block_size} in a {group.kind} group, not {size}")

    @classmethod
    def of(cls, layout: KVLayout) -> "CacheLayout":
        """The layout of a model whose layers all keep the same of every token."""
        return cls((LayerGroup("full", (layout,)),), layout.block_size)

    @property
    def tracks(self) -> tuple[tuple[int, KVLayout], ...]:
        """(index of its group, layout) of every track, in order."""
        return tuple((index, track) for index, group in enumerate(self.groups) for track in group.tracks)

    @property
    def side_groups(self) -> tuple[LayerGroup, ...]:
        """Groups behind the first: those with block tables of their own."""
        return self.groups[1:]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the first group, in all of its tracks."""
        return sum(track.block_bytes for track in self.groups[0].tracks)

    def sent_to(self, receiver: "CacheLayout") -> "CacheLayout":
        """The layout of frames to a worker with this layout, track by track (`KVLayout.sent_to`); the two workers'
        layouts have no `mismatch`."""
        groups = tuple(
            replace(
                mine,
                tracks=tuple(one.sent_to(other) for one, other in zip(mine.tracks, theirs.tracks, strict=True)),
            )
            for mine, theirs in zip(self.groups, receiver.groups, strict=True)
        )
        return replace(self, groups=groups)

    def mismatch(self, other: "CacheLayout") -> str | None:
        """Names the first field that keeps what `other` holds from being converted to this layout; None if nothing
        does."""
        if len(self.groups) != len(other.groups):
            return f"groups: {self.kinds} here, {other.kinds} there"
        for number, (mine, theirs) in enumerate(zip(self.groups, other.groups, strict=True)):
            what = "" if len(self.groups) == 1 else f"groups[{number}]."
            for name, here, there in (
                ("kind", mine.kind, theirs.kind),
                ("window", mine.window, theirs.window),
                ("tracks", len(mine.tracks), len(theirs.tracks)),
            ):
                if here != there:
                    return f"{what}{name}: {here} here, {there} there"
            for one, track in zip(mine.tracks, theirs.tracks, strict=True):
                if (found := one.mismatch(track)) is not None:
                    return what + found
        return None

    def conversion(self, other: "CacheLayout") -> str | None:
        """Names the first field for which what `other` holds must be converted; None if the bytes are the same."""
        pairs = zip(self.tracks, other.tracks, strict=True)
        return next((found for (_, one), (_, track) in pairs if (found := one.conversion(track)) is not None), None)

    @property
    def kinds(self) -> str:
        """The groups' kinds as text, for messages."""
        return ", ".join(group.kind for group in self.groups)

    @property
    def dtype(self) -> KVDtype:
        """The dtype of the first track, for messages and comparisons."""
        return self.tracks[0][1].dtype

    def with_block_size(self, block_size: int) -> "CacheLayout":
        """This layout with blocks of so many tokens."""
        groups = tuple(
            group
            if group.kind == "state"
            else replace(group, tracks=tuple(replace(track, block_size=block_size) for track in group.tracks))
            for group in self.groups
        )
        return CacheLayout(groups, block_size)


def memory_runs(layout: KVLayout, blocks: Iterable[int], layers: range | None = None) -> Iterator[tuple[int, int]]:
    """[first, end) of each run of bytes that `blocks` are in a pool, in their order; neighbours make one run.

    Args:
        layers: all of them unless given.
    """
    whole = layout.block_bytes
    each, layers = whole // layout.layers, range(layout.layers) if layers is None else layers
    size, offset = each * len(layers), each * layers.start
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
