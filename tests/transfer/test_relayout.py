"""Frames cut out of KV of any layout, and pairs of workers with different ones: each number lands where it belongs."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.degree import Degree
from kvrelay.engine.kv.layout import CacheLayout, KVLayout, LayerPart
from kvrelay.engine.kv.pool import TORCH_DTYPES, KVPool
from kvrelay.kernels.kv_codes import dequantize, quantize
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.frames.frames import ConvertedFrame, NarrowedFrame, PoolFrame
from kvrelay.transfer.protocol.events import Frame
from kvrelay.transfer.protocol.handshake import FrameCut, LocalWorker
from kvrelay.transfer.protocol.messages import MAX_FRAME_BYTES, MAX_PARTS, Key
from kvrelay.transfer.protocol.routes import held_by, routes_of
from support.handoff import RECEIVER, SENDER, Pair, links_of, pair, prompt

LAYERS, HEADS, DIM = 3, 2, 4
DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8")


@pytest.mark.parametrize("layers", [32, 80], ids=["8B", "70B"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_pages_of_large_models_fit_into_frames_of_the_default_size(layers: int, block_size: int) -> None:
    """A Llama's KV: 8 heads of 128, in bfloat16."""
    layout = KVLayout(layers, kv_heads=8, head_dim=128, block_size=block_size, dtype="bfloat16", order="HND")
    announced = LocalWorker(SENDER, CacheLayout.of(layout), "").hello(RECEIVER, TransferConfig()).frame_bytes
    assert announced <= TransferConfig().frame_bytes


large_layouts = st.builds(
    KVLayout,
    layers=st.integers(1, 128),
    kv_heads=st.integers(1, 16),
    head_dim=st.integers(8, 256),
    block_size=st.sampled_from([8, 16, 32, 64, 128]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


@given(large_layouts, st.integers(2**16, MAX_FRAME_BYTES))
def test_a_cut_fills_frames_and_the_parts_make_the_whole(layout: KVLayout, frame_bytes: int) -> None:
    cut = FrameCut.of(layout, frame_bytes)
    parts = [LayerPart(index, cut.parts) for index in range(cut.parts)]
    sizes = [layout.nbytes(cut.tokens, part) for part in parts]
    assert [layer for part in parts for layer in part.layers(layout.layers)] == list(range(layout.layers))
    assert sum(sizes) == cut.tokens * layout.token_bytes
    assert max(sizes) == cut.nbytes
    one_layer = layout.block_bytes // layout.layers
    assert cut.nbytes <= max(frame_bytes, one_layer)
    if cut.parts == 1:
        assert cut.nbytes + layout.block_bytes > frame_bytes, "one more block would fit"
    else:
        assert cut.tokens == layout.block_size
        assert layout.block_bytes > frame_bytes
        assert cut.parts == layout.layers or cut.nbytes > frame_bytes // 3
    assert cut.parts <= MAX_PARTS


layouts = st.builds(
    lambda size, dtype, order: KVLayout(LAYERS, HEADS, DIM, size, dtype, order),
    st.integers(1, 9),
    st.sampled_from(DTYPES),
    st.sampled_from(("NHD", "HND")),
)


def fill(pool: KVPool, seed: int) -> KVPool:
    """The same pool, with random numbers."""
    values = torch.rand(pool.tensor.shape, generator=torch.Generator().manual_seed(seed)) * 8 - 4
    if pool.scales is not None:
        values, scales = quantize(values, pool.tensor.dtype)
        pool.scales.copy_(scales)
    pool.tensor.copy_(values)
    return pool


def held(pool: KVPool) -> torch.Tensor:
    """A copy of the numbers in the pool."""
    return pool.tensor.clone() if pool.scales is None else dequantize(pool.tensor, pool.scales)


def converted(values: torch.Tensor, theirs: KVLayout, mine: KVLayout) -> torch.Tensor:
    """Numbers of a pool of `theirs` as they are in a pool of `mine` after a hand-off."""
    if mine.dtype == theirs.dtype:
        return values
    dtype = TORCH_DTYPES[mine.dtype]
    return dequantize(*quantize(values, dtype)) if mine.scaled else values.to(dtype)


def tokens_of(tensor: torch.Tensor, layout: KVLayout, table: list[int]) -> torch.Tensor:
    """The KV of the tokens in these blocks, [token, layer, k|v, head, dim], in the numbers of a pool."""
    blocks = tensor[table]
    return (blocks.movedim(3, 1) if layout.order == "NHD" else blocks.movedim(4, 1)).flatten(0, 1)


RANKS = [Degree(1), Degree(2), Degree(4), Degree(8), Degree(1, 2), Degree(2, 3)]
DEGREES = st.just((RANKS[0], RANKS[0])) | st.tuples(st.sampled_from(RANKS), st.sampled_from(RANKS))


@settings(max_examples=100)
@given(st.data(), layouts, layouts, DEGREES, st.integers(1, 40), st.integers(0, 2**31))
def test_every_number_lands_where_it_belongs_and_nothing_else_moves(
    data: st.DataObject, theirs: KVLayout, mine: KVLayout, degrees: tuple[Degree, Degree], count: int, seed: int
) -> None:
    """Whatever ranks hold it: each rank's pool is the model's, cut; the frames of all routes make each pool of the
    receiver. Some first blocks may be there already."""
    theirs, mine = replace(theirs, kv_heads=4), replace(mine, kv_heads=4)
    (sender, receiver), rng, wire = degrees, random.Random(seed), theirs.sent_to(mine)
    table, there = (rng.sample(range(48), layout.blocks_for(count)) for layout in (theirs, mine))
    model = fill(KVPool(theirs, 48), seed)

    def cut(layout: KVLayout, degree: Degree) -> list[KVPool]:
        return [KVPool(held_by(layout, degree, rank).of(layout), 48) for rank in range(degree.ranks)]

    sources, targets = cut(theirs, sender), cut(mine, receiver)
    for rank, pool in enumerate(sources):
        for mine_, whole in zip(pool.fields, model.slice(*held_by(theirs, sender, rank)).fields, strict=True):
            mine_.copy_(whole)
    before = [held(fill(pool, seed + 1)) for pool in targets]
    keep = data.draw(st.integers(0, count // mine.block_size)) * mine.block_size
    routes, written = routes_of(CacheLayout.of(wire), sender, receiver), []
    for route in rng.sample(routes, len(routes)):
        source = sources[route.ranks.sender].slice(*route.places[0])
        target = targets[route.ranks.receiver].slice(*route.places[1])
        parts = data.draw(st.sampled_from((1, len(route.part.layers))))
        first = keep // theirs.block_size * theirs.block_size
        while first < count:
            frame_tokens = min(count - first, rng.randrange(1, 4) * theirs.block_size)
            for part in (LayerPart(index, parts) for index in range(parts)):
                frame = Frame(1, 0, first, frame_tokens, route.layout.nbytes(frame_tokens, part), part)
                buffer = torch.empty(frame.nbytes, dtype=torch.uint8)
                narrowed = route.layout != source.layout
                (
                    NarrowedFrame(source, route.layout, table, frame) if narrowed else PoolFrame(source, table, frame)
                ).read(buffer)
                if target.layout.conversion(route.layout) is None:
                    PoolFrame(target, there, frame).write(buffer)
                else:
                    ConvertedFrame(target, route.layout, there, frame, keep).write(buffer)
            written.append((route.ranks, first, frame_tokens))
            first += frame_tokens
    wanted = converted(tokens_of(held(model), theirs, table), theirs, mine)
    for rank, pool in enumerate(targets):
        part = held_by(mine, receiver, rank)
        found = tokens_of(after := held(pool), mine, there)
        assert torch.equal(found[keep:count], wanted[keep:count, part.layers][:, :, :, part.heads]), f"frames {written}"
        assert torch.equal(found[:keep], tokens_of(before[rank], mine, there)[:keep])
        assert keep == count or not found[count:].any(), "slots behind the last token are not zero"
        others = [block for block in range(48) if block not in there]
        assert torch.equal(after[others], before[rank][others])


BASE = KVLayout(LAYERS, HEADS, DIM, 16, "float32", "NHD")
LARGE = KVLayout(layers=5, kv_heads=4, head_dim=32, block_size=32, dtype="float32")
"""A layout with 160 KiB a block, more than a frame."""


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["tcp", *(pytest.param(name, marks=pytest.mark.more) for name in ("shm", "gloo"))])
@pytest.mark.parametrize(
    ("theirs", "change"),
    [
        (BASE, {"block_size": 32}),
        (BASE, {"block_size": 8}),
        (BASE, {"block_size": 24}),
        (BASE, {"order": "HND"}),
        (BASE, {"dtype": "bfloat16"}),
        (BASE, {"dtype": "float16", "order": "HND", "block_size": 5}),
        (BASE, {"dtype": "int8"}),
        (BASE, {"dtype": "int8", "order": "HND", "block_size": 32}),
        (LARGE, {"order": "HND", "block_size": 16}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else f"{value.block_bytes} bytes a block",
)
@pytest.mark.some(4)
async def test_a_pair_of_different_layouts_hands_over(
    theirs: KVLayout, change: dict[str, object], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    mine = replace(theirs, **change)  # type: ignore[arg-type]  # the fields named by the parameters
    config, count = TransferConfig(frame_bytes=65536), 1203 if theirs is BASE else 103

    async def hand_over(world: Pair, key: Key, have: int) -> None:
        have -= have % mine.block_size if have < count else 0
        table = list(range(theirs.blocks_for(count)))
        world.announce(key, prompt(count), have)
        world.compute(key, table)
        await world.settled(key)
        reservation, _, stats = world.ends.imported[key]
        found = tokens_of(held(world.target), mine, reservation.hold.blocks)
        wanted = converted(tokens_of(held(world.source), theirs, table), theirs, mine)
        assert torch.equal(found[have:count], wanted[have:count])
        assert not found[:have].any(), "tokens that were there already were overwritten"
        begin = have if have == count else have - have % theirs.block_size
        assert stats.nbytes == (count - begin) * theirs.sent_to(mine).token_bytes
        assert stats.nbytes == world.ends.exported[key].nbytes
        world.target.bytes.zero_()
        world.reuse(key)

    async with pair(config, layout=theirs, receiver_layout=mine, transports=links_of(kind), blocks=320) as world:
        fill(world.source, 1)
        for number, have in enumerate((0, 48, count)):
            await hand_over(world, (f"r{number}", 1), have)
    said = [vars(record)["differing"] for record in caplog.records if record.message == "KV is converted on arrival"]
    assert said == ([] if (differing := mine.conversion(theirs.sent_to(mine))) is None else [differing])


def test_the_field_that_cannot_be_converted_is_named() -> None:
    for change in ({"layers": 4}, {"head_dim": 8}, {"kv_heads": 4}, {"planes": 1}):
        other = replace(BASE, **change)  # type: ignore[arg-type]  # the fields named by the loop
        assert str(BASE.mismatch(other)).startswith(next(iter(change)))
    for change in ({"block_size": 8}, {"order": "HND"}, {"dtype": "float16"}, {"dtype": "int8"}):
        other = replace(BASE, **change)  # type: ignore[arg-type]  # the fields named by the loop
        assert BASE.mismatch(other) is None
        assert str(BASE.conversion(other)).startswith(next(iter(change)))
