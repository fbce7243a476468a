"""From what a cache holds in each layer to layer groups, tracks, and the place of each tensor in them."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvrelay.engine.degree import ONE, Degree
from kvrelay.engine.kv.layout import CacheLayout, FloatDtype, GroupKind, KVDtype, KVLayout, LayerGroup, Order

ALIGNMENT = 16


class StateShape(NamedTuple):
    """One tensor of a layer's state."""

    name: str
    """Attribute of the cache layer that holds it, `conv_states` or `recurrent_states`."""
    number: int
    """Key of the tensor in it."""
    shape: tuple[int, ...]
    """Shape without the batch."""
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Contents of one layer of a model's cache, whatever the ranks."""

    keys: tuple[int, int] | None = None
    """(heads, numbers of a head) of a token's keys; None without any."""
    values: tuple[int, int] | None = None
    indexer: int = 0
    """Numbers of a token's indexer key; 0 without any."""
    window: int = 0
    """Number of tokens that a token sees, itself included; 0 for all."""
    states: tuple[StateShape, ...] = ()
    replicated: bool = False
    """Whether each of several ranks has all heads."""

    @property
    def latent(self) -> bool:
        """Whether all heads' keys and values are computed from what is kept."""
        return self.keys is not None and self.keys[0] == 1 and self.keys != self.values


class Place(NamedTuple):
    """Place of one kind of a layer's numbers in the pools."""

    track: int
    """Index in `CacheLayout.tracks`."""
    layer: int
    """Layer of the track."""
    plane: int


class StatePlace(NamedTuple):
    """Place of a tensor of a layer's state in the bytes of a slot."""

    state: StateShape
    track: int
    layer: int
    offset: int


@dataclass(frozen=True, slots=True)
class LayerPlaces:
    """Places of a cache layer's tensors."""

    cache: LayerCache
    keys: Place | None = None
    values: Place | None = None
    indexer: Place | None = None
    states: tuple[StatePlace, ...] = ()


@dataclass(frozen=True, slots=True)
class Placing:
    """Everything that a model keeps of a sequence, with its places in the pools."""

    layout: CacheLayout
    """The layout of this rank's pools."""
    whole: CacheLayout
    """The layout as if one rank kept everything."""
    layers: tuple[LayerPlaces, ...]
    """Layers of the model's cache, in order."""
    tokens: Place | None = None
    """The sequence's tokens themselves, as 32-bit integers, for ways that compute them again."""


TOKENS_TRACK = "tokens"


def arrange(
    layers: tuple[LayerCache, ...],
    dtype: FloatDtype,
    kv_dtype: KVDtype,
    block_size: int,
    order: Order,
    *,
    with_tokens: bool = False,
    slides: bool = True,
    degree: Degree = ONE,
    rank: int = 0,
) -> Placing:
    """Puts layers that need the same tokens into one group, and tensors of one shape into one track.

    Args:
        dtype: of the model.
        kv_dtype: of keys and values.
        with_tokens: whether the sequence's tokens are kept too.
        slides: whether layers with a window keep the KV of their windows only.
        degree, rank: of the part that is kept here.
    """
    replicated = any(layer.replicated for layer in layers)
    tracks: dict[tuple[int, str, int, int, int], list[int]] = {}
    """Layers of each track, by (window, kind, heads, numbers, planes)."""
    found: dict[tuple[int, str], tuple[int, str, int, int, int]] = {}

    def put(layer: int, name: str, window: int, kind: str, heads: int, dim: int, planes: int) -> None:
        key = (window, kind, heads, dim, planes)
        tracks.setdefault(key, []).append(layer)
        found[layer, name] = key

    if with_tokens:
        put(0, "tokens", 0, TOKENS_TRACK, 1, 1, 1)
    for number, layer in enumerate(layers):
        window = layer.window if slides else 0
        if layer.keys is not None and layer.keys == layer.values:
            put(number, "kv", window, "kv", *layer.keys, 2)
        elif layer.keys is not None and layer.values is not None:
            put(number, "keys", window, "keys", *layer.keys, 1)
            put(number, "values", window, "values", *layer.values, 1)
        if layer.indexer:
            put(number, "indexer", window, "indexer", 1, layer.indexer, 1)

    windows = sorted({window for window, *_ in tracks} - {0})
    groups: list[LayerGroup] = []
    order_of: dict[tuple[int, str, int, int, int], int] = {}
    for window in (0, *windows):
        inside = [key for key in tracks if key[0] == window]
        kept = []
        for key in inside:
            _, kind, heads, dim, planes = key
            order_of[key] = len(order_of)
            numbers = {TOKENS_TRACK: "float32", "indexer": dtype}.get(kind, kv_dtype)
            all_heads = replicated and heads > 1
            kept.append(KVLayout(len(tracks[key]), heads, dim, block_size, numbers, order, planes, all_heads))
        latent = (
            not window
            and any(layer.latent for layer in layers)
            and all(layer.latent or layer.keys is None or layer.window for layer in layers)
        )
        of_group: GroupKind = "window" if window else "latent" if latent else "full"
        groups.append(LayerGroup(of_group, tuple(kept), window))
    state_layers = [number for number, layer in enumerate(layers) if layer.states]
    if state_layers:
        sizes = [sum(_aligned(state.nbytes) for state in layers[number].states) for number in state_layers]
        groups.append(LayerGroup("state", (KVLayout(len(sizes), 1, max(sizes), 1, "raw", "NHD", planes=1),)))

    def at(layer: int, name: str, plane: int = 0) -> Place | None:
        key = found.get((layer, name))
        return None if key is None else Place(order_of[key], tracks[key].index(layer), plane)

    placed = []
    for number, layer in enumerate(layers):
        states, offset = [], 0
        for state in layer.states:
            states.append(StatePlace(state, len(order_of), state_layers.index(number), offset))
            offset += _aligned(state.nbytes)
        keys, values = at(number, "kv", 0) or at(number, "keys"), at(number, "kv", 1) or at(number, "values")
        placed.append(LayerPlaces(layer, keys, values, at(number, "indexer"), tuple(states)))
    whole = CacheLayout(tuple(groups), block_size)
    return Placing(_held(whole, degree, rank), whole, tuple(placed), at(0, "tokens") if with_tokens else None)


def _held(cache: CacheLayout, degree: Degree, rank: int) -> CacheLayout:
    """The part of a model's `cache` that a rank holds."""

    def held(track: KVLayout) -> KVLayout:
        return track if track.replicated else replace(track, kv_heads=len(degree.kv_heads(rank, track.kv_heads)))

    groups = tuple(replace(group, tracks=tuple(map(held, group.tracks))) for group in cache.groups)
    return replace(cache, groups=groups)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
