"""Routes: every rank of the receiver gets all that it holds, once, from a rank that has it."""

import asyncio
from collections import Counter
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvrelay.engine.degree import ONE, Degree
from kvrelay.engine.kv.layout import CacheLayout, KVLayout, LayerGroup
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.kv.writes import WRITTEN, StepWrites
from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.links.rank_links import RankLinks
from kvrelay.transfer.protocol import routes as routing
from kvrelay.transfer.protocol.handshake import LocalWorker, cuts_of, tracks_of
from kvrelay.transfer.protocol.messages import Code, Key
from kvrelay.transfer.protocol.routes import RankPair, held_by, routes_of, unroutable, unsuited
from support.fake_transport import Fault
from support.handoff import FIRST_TOKEN, RECEIVER, Pair, links_of, pair, prompt
from support.late_writes import LateWrites
from support.ranks import rank_cache

BLOCK = 16
SLOT = KVLayout(layers=2, kv_heads=1, head_dim=64, block_size=1, dtype="raw", planes=1)


def layout_of(layers: int, heads: int, dim: int = 8, planes: int = 2) -> KVLayout:
    return KVLayout(layers, heads, dim, BLOCK, "float32", planes=planes)


degrees = st.builds(Degree, st.integers(1, 16), st.integers(1, 4))


@st.composite
def caches(draw: st.DrawFn) -> CacheLayout:
    """A model with a full or latent group, and perhaps windows of another number of heads, and states. All ranks may
    compute all heads."""
    layers, heads = draw(st.integers(4, 9)), st.integers(1, 16)
    first = LayerGroup("full", (replace(layout_of(layers, draw(heads)), replicated=draw(st.booleans())),))
    if draw(st.booleans()):
        first = LayerGroup("latent", tuple(layout_of(layers, 1, dim, 1) for dim in (64, 16)))
    window = LayerGroup("window", (layout_of(layers, draw(heads)),), 40)
    state = LayerGroup("state", (replace(SLOT, layers=layers),))
    return CacheLayout((first, *draw(st.sampled_from([(), (window,), (state,), (window, state)]))), BLOCK)


@given(caches(), degrees, degrees)
def test_each_rank_gets_each_layer_and_head_that_it_holds_once_from_a_rank_that_holds_it(
    cache: CacheLayout, sender: Degree, receiver: Degree
) -> None:
    assume(unroutable(cache, sender, receiver) is None)
    routes = routes_of(cache, sender, receiver)
    links = routing.links_of(routes)
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
    assert routing.links_of(routes) == (RankPair(0, 0),)
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
    """The model has 8 heads. A copy counts as one head."""
    routes = routes_of(CacheLayout.of(layout_of(2, 8)), Degree(sender), Degree(receiver))
    assert [route.ranks.sender for route in routes] == senders
    assert {route.layout.kv_heads for route in routes} == {1}


def test_what_cannot_be_divided_is_named() -> None:
    full, window = LayerGroup("full", (layout_of(4, 8),)), LayerGroup("window", (layout_of(2, 8),), 40)
    for cache, degree, reason in (
        (CacheLayout((full, window), BLOCK), Degree(1, 2), r"layers: \[4, 2\] in the tracks"),
        (CacheLayout((full,), BLOCK), Degree(1, 5), "layers: 4; too few for 5 pipeline stages"),
        (CacheLayout((full,), BLOCK), Degree(3), "kv_heads: tensor parallel degree is 3"),
    ):
        assert unsuited(cache, ONE) is None
        with pytest.raises(ValueError, match=reason):
            rank_cache(cache, degree, 0)
        with pytest.raises(ValueError, match=f"can't be handed over: {reason}"):
            LocalWorker(WorkerId("w", "1"), cache, "model", degree=degree)
    one = LocalWorker(WorkerId("w", "1"), CacheLayout((full,), BLOCK), "model")
    hello = replace(one.hello(one.id, TransferConfig()), degree=Degree(3))
    objection = one.objection(hello, TransferConfig())
    assert objection is not None
    assert objection[0] is Code.INCOMPATIBLE
    assert "kv_heads: tensor parallel degree is 3" in objection[1]


def test_too_many_routes_are_refused() -> None:
    tracks = tuple(layout_of(4, 64, dim) for dim in range(1, 18))
    cache = CacheLayout((LayerGroup("full", tracks),), BLOCK)
    reason = unroutable(cache, Degree(64), Degree(1))
    assert reason is not None
    assert "1088 routes; allowed: up to 1024" in reason


# Workers whose ranks are all in this process.

MODEL = KVLayout(layers=4, kv_heads=4, head_dim=64, block_size=16, dtype="float32")
CONFIG = TransferConfig(frame_bytes=65536, frame_timeout_seconds=5.0)
KEY = ("r", 1)
COUNT = 203
PAIRS = [
    (Degree(2), Degree(1)),
    (Degree(2), Degree(1, 2)),
    (Degree(2), Degree(4)),
    (Degree(2), Degree(8)),
    (Degree(1), Degree(2)),
    (Degree(1, 2), Degree(2)),
    (Degree(4), Degree(2)),
    (Degree(2, 2), Degree(1, 4)),
    (Degree(8), Degree(4)),
]


def workers(degrees: tuple[Degree, Degree], **more: Any) -> AbstractAsyncContextManager[Pair]:
    """A pair whose ends have so many ranks; `more` is of `pair`."""
    return pair(CONFIG, layout=MODEL, blocks=64, degrees=degrees, **more)


def filled(world: Pair) -> KVPool:
    """The model's KV, of which each rank of the sender has its part."""
    degree = world.sender.local.degree
    layout = world.sender.local.cache.tracks[0][1]
    model = KVPool(layout, world.source.num_blocks)
    model.tensor.copy_(torch.rand(model.tensor.shape, generator=torch.Generator().manual_seed(1)))
    for rank, pool in enumerate(world.sources):
        pool.tensor.copy_(model.slice(*held_by(layout, degree, rank)).tensor)
    return model


def begin(world: Pair, key: Key = KEY, count: int = COUNT, have: int = 0) -> list[int]:
    """Hands a prompt over; its blocks in the pools of the sender."""
    table = [(block * 5 + 2) % world.source.num_blocks for block in range(world.source.layout.blocks_for(count))]
    world.announce(key, prompt(count), have)
    world.compute(key, table)
    return table


def check(world: Pair, model: KVPool, table: list[int], key: Key = KEY, count: int = COUNT, have: int = 0) -> None:
    """Every rank of the receiver has its layers and heads of all tokens."""
    assert key in world.ends.imported, world.ends.import_failed.get(key)
    there, degree = world.ends.imported[key][0].hold.blocks, world.receiver.local.degree
    whole = world.receiver.local.cache.tracks[0][1]
    for rank, pool in enumerate(world.targets):
        part = held_by(whole, degree, rank)
        wanted = by_token(model.slice(*part), table)[have:count]
        assert torch.equal(by_token(pool, there)[have:count], wanted), f"rank {rank}"
        assert not by_token(pool, there)[count:].any(), "slots behind the last token are not zero"


def by_token(pool: KVPool, table: list[int]) -> torch.Tensor:
    """[token, layer, k|v, head, dim] of the tokens in these blocks."""
    return pool.tensor[table].movedim(3 if pool.layout.order == "NHD" else 4, 1).flatten(0, 1)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["fake", *(pytest.param(kind, marks=pytest.mark.more) for kind in ("tcp", "shm"))])
@pytest.mark.parametrize("change", [{}, {"block_size": 8}, {"block_size": 24, "order": "HND"}], ids=str)
@pytest.mark.parametrize(("sender", "receiver"), PAIRS, ids=str)
@pytest.mark.some(4)
async def test_every_rank_gets_its_part_of_the_kv(
    sender: Degree, receiver: Degree, change: dict[str, Any], kind: str
) -> None:
    there = replace(MODEL, **change)
    async with workers((sender, receiver), receiver_layout=there, transports=links_of(kind)) as world:
        model = filled(world)
        for number, have in enumerate((0, 96, COUNT)):
            key = (f"r{number}", 1)
            table = begin(world, key, have=have)
            await world.settled(key)
            check(world, model, table, key, have=have)
            world.reuse(key)
            for pool in world.targets:
                pool.bytes.zero_()
        assert world.sender.epoch(RECEIVER.incarnation) == 1
        assert not any(ranks.active for side in world.ranks for ranks in side.transfers)
        assert not kept_by_links(world)


@pytest.mark.anyio
async def test_a_cancelled_hand_off_leaves_nothing_at_a_link_that_stays_up() -> None:
    async with workers((Degree(2), ONE), script=lambda number: Fault("delay", 0.2)) as world:
        keys = [(f"r{number}", 1) for number in range(6)]
        for key in keys:
            begin(world, key, 4 * BLOCK)
        ranks = world.ranks[0].transfers[0]
        await world.ends.until(lambda: ranks.active > 3)
        for key in keys:
            world.sender.cancel(key)
        await world.ends.until(lambda: not ranks.active and not world.sending.leaked)
        assert world.sender.epoch(RECEIVER.incarnation) == 1
        await world.ends.until(lambda: not kept_by_links(world))


def kept_by_links(world: Pair) -> int:
    """Calls that the sender's links to other ranks have yet to make."""
    links = world.sender.links
    epochs = links._epochs.values() if isinstance(links, RankLinks) else ()
    return sum(len(each.behind) + len(each.announcing) for each in epochs)


@pytest.mark.anyio
@pytest.mark.parametrize("number", range(0, 12, 3))
@pytest.mark.parametrize(("sender", "receiver"), [PAIRS[2], PAIRS[7], PAIRS[6]], ids=str)
@pytest.mark.some(4)
async def test_when_one_link_is_lost_the_next_epoch_of_all_takes_over(
    sender: Degree, receiver: Degree, number: int
) -> None:
    async with workers((sender, receiver), script=lambda at: Fault("fail") if at == number else None) as world:
        model = filled(world)
        table = begin(world)
        await world.settled(KEY)
        check(world, model, table)
        assert world.sender.epoch(RECEIVER.incarnation) == 2
        assert world.sender.links_ended == world.receiver.links_ended == 1, "an epoch ends once"


@pytest.mark.anyio
async def test_each_rank_sends_a_chunk_when_its_own_step_has_ended() -> None:
    """As a pipeline stage does, which has the last layers, and begins the step behind the first stage."""
    async with workers((Degree(1, 2), ONE), transports=links_of("fake")) as world:
        first, second, count = LateWrites(), LateWrites(), 4 * BLOCK
        step = StepWrites(7, first)
        for pool in world.sources:
            pool.bytes.fill_(1)
        world.announce(KEY, prompt(count))
        world.sender.progress(KEY, world.sending.hold([0, 1, 2, 3]), step)
        await world.ends.until(lambda: KEY in world.receiving.reservations)
        await asyncio.sleep(0.05)
        assert not world.target.bytes.any()
        world.sources[0].bytes.fill_(9)
        first.end()
        border = MODEL.layers // 2
        sent = world.target.tensor[:, :border], world.target.tensor[:, border:]
        await world.ends.until(lambda: sent[0].any())
        world.ranks[0].writes[1].launched(7, second)
        await asyncio.sleep(0.05)
        assert not sent[1].any()
        world.sources[1].bytes.fill_(9)
        second.end()
        await world.ends.until(lambda: sent[1].any())
        step.become(WRITTEN)
        world.sender.finished(KEY, FIRST_TOKEN, world.sending.hold([0, 1, 2, 3]))
        await world.settled(KEY)
        there = world.ends.imported[KEY][0].hold.blocks
        assert (world.target.bytes[there] == 9).all()


@pytest.mark.anyio
async def test_a_lost_rank_fails_its_hand_offs_at_once_and_keeps_its_blocks() -> None:
    """Nobody knows whether the rank's threads still touch them: the worker as a whole has to be replaced. The other
    end learns that the worker is lost, and not only its link, so that nothing more is sent there."""
    keys = [(f"r{number}", 1) for number in range(6)]
    async with workers((Degree(2), ONE), script=lambda number: Fault("delay", 2.0)) as world:
        for key in keys:
            begin(world, key, 4 * BLOCK)
        # A link sends one frame after the other, so the others' blocks have yet to be read.
        await world.ends.until(lambda: world.ranks[0].transfers[0].active > 3)
        world.ranks[0].channels[1].lose()
        await world.ends.until(lambda: world.ends.import_failed.keys() == set(keys))
        for code, text in world.ends.import_failed.values():
            assert code is Code.CLOSED
            assert "rank 1 is lost" in text
        await asyncio.sleep(0.1)
        assert not world.ends.export_failed, "their worker ends, and says so itself"
        assert world.sending.leaked
        await world.ends.until(lambda: not world.receiving.leaked)
