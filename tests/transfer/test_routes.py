"""Routes: every rank of the receiver gets all that it holds, once, from a rank that has it."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvrelay.engine.kv.degree import ONE, Degree
from kvrelay.engine.kv.layout import CacheLayout, KVLayout, LayerGroup
from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.handshake import LocalWorker, cuts_of, tracks_of
from kvrelay.transfer.protocol.messages import Code
from kvrelay.transfer.protocol.routes import RankPair, held_by, links_of, rank_cache, routes_of, unroutable, unsuited

BLOCK = 16
SLOT = KVLayout(layers=2, kv_heads=1, head_dim=64, block_size=1, dtype="raw", planes=1)


def layout_of(layers: int, heads: int, dim: int = 8, planes: int = 2) -> KVLayout:
    return KVLayout(layers, heads, dim, BLOCK, "float32", planes=planes)


degrees = st.builds(Degree, st.integers(1, 16), st.integers(1, 4))


@st.composite
def caches(draw: st.DrawFn) -> CacheLayout:
    """A model with a full or latent group, and perhaps windows of another number of heads."""
    layers, heads = draw(st.integers(4, 9)), st.integers(1, 16)
    first = LayerGroup("full", (layout_of(layers, draw(heads)),))
    if draw(st.booleans()):
        first = LayerGroup("latent", tuple(layout_of(layers, 1, dim, 1) for dim in (64, 16)))
    window = LayerGroup("window", (layout_of(layers, draw(heads)),), 40)
    return CacheLayout((first, window) if draw(st.booleans()) else (first,), BLOCK)


@given(caches(), degrees, degrees)
def test_each_rank_gets_each_layer_and_head_that_it_holds_once_from_a_rank_that_holds_it(
    cache: CacheLayout, sender: Degree, receiver: Degree
) -> None:
    assume(unroutable(cache, sender, receiver) is None)
    routes = routes_of(cache, sender, receiver)
    links = links_of(routes)
    assert links[0] == RankPair(0, 0), "hidden states take the first link"
    assert len({(route.track, route.ranks) for route in routes}) == len(routes), "one route for a pair and track"
    for track, (group, layout) in enumerate(cache.tracks):
        got = Counter[tuple[int, int, int]]()
        for route in (each for each in routes if each.track == track):
            assert route.group == group
            assert links[route.link] == route.ranks
            for degree, rank, place in zip((sender, receiver), route.ranks, route.places, strict=True):
                held = held_by(layout, degree, rank)
                assert {*route.part.layers} <= {*held.layers}
                assert {*route.part.heads} <= {*held.heads}
                assert list(held.layers[place.layers.start : place.layers.stop]) == list(route.part.layers)
                assert list(held.heads[place.heads.start : place.heads.stop]) == list(route.part.heads)
                pool = rank_cache(cache, degree, rank).tracks[track][1]
                assert (len(held.layers), len(held.heads)) == (pool.layers, pool.kv_heads)
            assert route.layout == replace(layout, layers=len(route.part.layers), kv_heads=len(route.part.heads))
            rank = route.ranks.receiver
            got.update((rank, layer, head) for layer in route.part.layers for head in route.part.heads)
        wanted = {
            (rank, layer, head)
            for rank in range(receiver.ranks)
            for layer in held_by(layout, receiver, rank).layers
            for head in held_by(layout, receiver, rank).heads
        }
        assert got == Counter(wanted)


@given(caches(), st.integers(1, 200))
def test_between_workers_of_one_rank_the_routes_are_the_tracks(cache: CacheLayout, tokens: int) -> None:
    routes = routes_of(cache, ONE, ONE)
    assert [route.layout for route in routes] == [layout for _, layout in cache.tracks]
    assert links_of(routes) == (RankPair(0, 0),)
    for route, track in zip(routes, tracks_of(cache, routes, tokens), strict=True):
        assert (track.token_bytes, track.layers, track.link) == (route.layout.token_bytes, route.layout.layers, 0)


@given(caches(), degrees, degrees, st.integers(1, 200))
def test_both_ends_make_the_same_tracks_whatever_the_frames(
    cache: CacheLayout, sender: Degree, receiver: Degree, tokens: int
) -> None:
    assume(unroutable(cache, sender, receiver) is None)
    routes = routes_of(cache, sender, receiver)
    sent = tracks_of(cache, routes, tokens, cuts_of(routes, 2**16))
    for mine, theirs in zip(tracks_of(cache, routes, tokens), sent, strict=True):
        assert replace(theirs, frame_tokens=mine.frame_tokens, parts=mine.parts) == mine


@pytest.mark.parametrize(
    ("sender", "receiver", "senders"),
    [
        (8, 16, [rank // 2 for rank in range(16)]),
        (16, 16, [*range(16)]),
        (16, 8, [0, 3, 4, 7, 8, 11, 12, 15]),
        (16, 4, [0, 2, 5, 7, 8, 10, 13, 15]),
    ],
)
def test_copies_of_a_head_are_taken_from_all_that_hold_it(sender: int, receiver: int, senders: list[int]) -> None:
    """Of a model with 8 heads. A copy counts as one head."""
    routes = routes_of(CacheLayout.of(layout_of(2, 8)), Degree(sender), Degree(receiver))
    assert [route.ranks.sender for route in routes] == senders
    assert {route.layout.kv_heads for route in routes} == {1}


def test_what_cannot_be_divided_is_named() -> None:
    full, window = LayerGroup("full", (layout_of(4, 8),)), LayerGroup("window", (layout_of(2, 8),), 40)
    state = LayerGroup("state", (SLOT,))
    for cache, degree, reason in (
        (CacheLayout((full, state), BLOCK), Degree(2), "groups: full, state; a state can't be divided"),
        (CacheLayout((full, window), BLOCK), Degree(1, 2), r"layers: \[4, 2\] in the tracks"),
        (CacheLayout((full,), BLOCK), Degree(1, 5), "layers: 4; too few for 5 pipeline stages"),
        (CacheLayout((full,), BLOCK), Degree(3), "kv_heads: tensor parallel degree is 3"),
    ):
        assert unsuited(cache, ONE) is None
        with pytest.raises(ValueError, match=reason):
            rank_cache(cache, degree, 0)
        with pytest.raises(ValueError, match=f"can't be handed over: {reason}"):
            LocalWorker(WorkerId("w", "1"), cache, "model", degree=degree)
    one = LocalWorker(WorkerId("w", "1"), CacheLayout((full, state), BLOCK), "model")
    hello = replace(one.hello(one.id, TransferConfig()), degree=Degree(2))
    objection = one.objection(hello, TransferConfig())
    assert objection is not None
    assert objection[0] is Code.INCOMPATIBLE
    assert "a state can't be divided over ranks yet (tensor 2, pipeline 1)" in objection[1]


def test_too_many_routes_are_refused() -> None:
    tracks = tuple(layout_of(4, 64, dim) for dim in range(1, 18))
    cache = CacheLayout((LayerGroup("full", tracks),), BLOCK)
    reason = unroutable(cache, Degree(64), Degree(1))
    assert reason is not None
    assert "1088 routes; allowed: up to 1024" in reason
