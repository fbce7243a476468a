"""Routes: which rank of the sender hands which layers and KV heads to which rank of the receiver. No torch.

Both ends compute the same routes from the layout of the whole model and the degrees of both workers. Every rank of the
receiver gets each layer and head that it holds from exactly one rank of the sender: a head that several ranks of the
sender hold comes from one of them, and one that several ranks of the receiver hold is sent to each.

    8 KV heads, tensor 2 to tensor 4       sender 0  heads 0-3 ---- heads 0, 1 --> receiver 0
                                                            `------ heads 2, 3 --> receiver 1
                                           sender 1  heads 4-7 ---- heads 4, 5 --> receiver 2
                                                            `------ heads 6, 7 --> receiver 3

All ranks of a stage hold all heads of a replicated track, and a state; one of them sends it. A stage has an equal share
of each track's layers. Between two workers of one rank each, the routes are the tracks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from kvrelay.engine.degree import ONE, Degree
from kvrelay.engine.kv.layout import CacheLayout, KVLayout
from kvrelay.transfer.protocol.messages import MAX_ROUTES


class RankPair(NamedTuple):
    """The two ends of a link."""

    sender: int = 0
    """Rank of the sending worker."""
    receiver: int = 0
    """Rank of the receiving worker."""


class Slice(NamedTuple):
    """Some layers and some KV heads of a track. Both count from the first one of what it is a slice of."""

    layers: range
    heads: range

    def within(self, held: "Slice") -> "Slice":
        """This slice of the model as a slice of what a rank holds."""
        layer, head = held.layers.start, held.heads.start
        return Slice(
            range(self.layers.start - layer, self.layers.stop - layer),
            range(self.heads.start - head, self.heads.stop - head),
        )

    def of(self, layout: KVLayout) -> KVLayout:
        """The layout of this slice of KV of that layout."""
        return replace(layout, layers=len(self.layers), kv_heads=len(self.heads))


@dataclass(frozen=True, slots=True)
class Route:
    """The way of some layers and KV heads of one track from a rank to a rank."""

    track: int
    """Index of the track, in the model's cache layout and among a rank's pools."""
    group: int
    """Index of the track's layer group."""
    part: Slice
    """Layers and heads of the model's track."""
    layout: KVLayout
    """Layout of the route's frames."""
    ranks: RankPair
    link: int
    """Index of the pair of ranks in `links_of`."""
    places: tuple[Slice, Slice]
    """The part within the pools of both ranks: the sender's and the receiver's."""
    on_gpus: bool = False
    """Whether both workers' pools are in GPU memory."""


def held_by(layout: KVLayout, degree: Degree, rank: int) -> Slice:
    """The layers and KV heads of a model's track that a rank holds.

    Raises:
        ValueError: the degree doesn't suit the number of KV heads.
    """
    heads = range(layout.kv_heads) if layout.replicated else degree.kv_heads(rank, layout.kv_heads)
    return Slice(degree.layers(rank, layout.layers), heads)


def unsuited(cache: CacheLayout, degree: Degree) -> str | None:
    """Why a model of this `cache` can't be divided over ranks like that; None if it can."""
    if degree == ONE:
        return None
    layers = [track.layers for _, track in cache.tracks]
    if degree.pipeline > 1 and len(set(layers)) > 1:
        return f"layers: {layers} in the tracks; layers of several kinds can't be divided over stages yet ({degree})"
    for _, track in cache.tracks:
        if track.layers < degree.pipeline:
            return f"layers: {track.layers}; too few for {degree.pipeline} pipeline stages"
        try:
            held_by(track, degree, 0)
        except ValueError as error:
            return f"kv_heads: {error}"
    return None


def unroutable(cache: CacheLayout, one: Degree, other: Degree) -> str | None:
    """Why workers of these degrees can't hand over KV of a model of this `cache`; None if they can, either way."""
    for degree in (one, other):
        if (reason := unsuited(cache, degree)) is not None:
            return reason
    count = max(len(routes_of(cache, one, other)), len(routes_of(cache, other, one)))
    if count > MAX_ROUTES:
        return f"degree: {one} and {other} take {count} routes; allowed: up to {MAX_ROUTES}"
    return None


@lru_cache(maxsize=256)
def routes_of(cache: CacheLayout, sender: Degree, receiver: Degree, on_gpus: bool = False) -> tuple[Route, ...]:
    """All routes, in order of the tracks, then of the receiver's and the sender's ranks.

    Args:
        cache: of the whole model, as its frames are on the link (`CacheLayout.sent_to`).
        on_gpus: whether both workers' pools are in GPU memory.

    Raises:
        ValueError: a degree doesn't suit the number of KV heads.
    """
    found: list[Route] = []
    links: dict[RankPair, int] = {}
    for track, (group, layout) in enumerate(cache.tracks):
        for rank in range(receiver.ranks):
            to = held_by(layout, receiver, rank)
            for owner, part in _parts(layout, to, sender, rank):
                ranks = RankPair(owner, rank)
                places = part.within(held_by(layout, sender, owner)), part.within(to)
                link = links.setdefault(ranks, len(links))
                found.append(Route(track, group, part, part.of(layout), ranks, link, places, on_gpus))
    return tuple(found)


def _parts(layout: KVLayout, wanted: Slice, sender: Degree, wish: int) -> list[tuple[int, Slice]]:
    """Ranks of the sender, and the part of `wanted` that each hands over."""
    found: dict[int, Slice] = {}
    for first in range(0, sender.ranks, sender.tensor):
        stage = sender.layers(first, layout.layers)
        layers = range(max(stage.start, wanted.layers.start), min(stage.stop, wanted.layers.stop))
        if layers and layout.replicated:
            found[first + wish % sender.tensor] = Slice(layers, wanted.heads)
            continue
        for head in wanted.heads if layers else ():
            owner = sender.owner(layers.start, head, layout.layers, layout.kv_heads, wish)
            start = found[owner].heads.start if owner in found else head
            found[owner] = Slice(layers, range(start, head + 1))
    return sorted(found.items())


def links_of(routes: Sequence[Route]) -> tuple[RankPair, ...]:
    """The pairs of ranks that share a route, each once; the first is that of both ranks 0. One pair if there is no
    route."""
    return tuple(dict.fromkeys(route.ranks for route in routes)) or (RankPair(),)
