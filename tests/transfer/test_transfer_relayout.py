"""Pairs of workers with different KV layouts: each token's KV arrives with the values that were computed."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.events import Frame
from kvrelay.transfer.frames import ConvertedFrame, PoolFrame
from kvrelay.transfer.handshake import LocalWorker
from kvrelay.transfer.messages import Key
from support.handoff import RECEIVER, SENDER, Pair, links_of, pair

LAYERS, HEADS, DIM = 3, 2, 4
DTYPES = ("float32", "bfloat16", "float16")

layouts = st.builds(
    lambda size, dtype, order: KVLayout(LAYERS, HEADS, DIM, size, dtype, order),
    st.integers(1, 9),
    st.sampled_from(DTYPES),
    st.sampled_from(("NHD", "HND")),
)


def filled(layout: KVLayout, blocks: int, seed: int) -> KVPool:
    pool = KVPool(layout, blocks)
    values = torch.rand(pool.tensor.shape, generator=torch.Generator().manual_seed(seed)) * 8 - 4
    pool.tensor.copy_(values)
    return pool


def token(pool: KVPool, table: list[int], position: int, tensor: torch.Tensor | None = None) -> torch.Tensor:
    """One token's KV [layer, k|v, head, dim], in the pool or in `tensor`, an earlier copy of it."""
    size = pool.layout.block_size
    block = (pool.tensor if tensor is None else tensor)[table[position // size]]
    return block[:, :, position % size] if pool.layout.order == "NHD" else block[:, :, :, position % size]


@settings(max_examples=150, deadline=None)
@given(st.data(), layouts, layouts, st.integers(1, 40), st.integers(0, 2**31))
def test_every_number_lands_where_it_belongs_and_nothing_else_moves(
    data: st.DataObject, theirs: KVLayout, mine: KVLayout, count: int, seed: int
) -> None:
    rng = random.Random(seed)
    source, target = filled(theirs, 48, seed), filled(mine, 48, seed + 1)
    table, there = (rng.sample(range(48), layout.blocks_for(count)) for layout in (theirs, mine))
    before = target.tensor.clone()
    keep = data.draw(st.integers(0, count // mine.block_size)) * mine.block_size
    first = keep // theirs.block_size * theirs.block_size
    hello = LocalWorker(SENDER, theirs, "").hello(RECEIVER, TransferConfig())
    written = []
    while first < count:
        frame_tokens = min(count - first, rng.randrange(1, 4) * theirs.block_size)
        frame = Frame(1, 0, first, frame_tokens, frame_tokens * theirs.token_bytes)
        buffer = torch.empty(frame.nbytes, dtype=torch.uint8)
        PoolFrame(source, table, frame).read(buffer)
        ConvertedFrame(target, hello, there, frame, keep).write(buffer)
        written.append((first, frame_tokens))
        first += frame_tokens
    for position in range(keep, count):
        wanted = token(source, table, position).to(target.tensor.dtype)
        assert torch.equal(token(target, there, position), wanted), f"token {position} of frames {written}"
    for position in range(keep):
        assert torch.equal(token(target, there, position), token(target, there, position, before)), position
    others = [block for block in range(48) if block not in there]
    assert torch.equal(target.tensor[others], before[others])
    if keep < count:
        for position in range(count, len(there) * mine.block_size):
            assert not token(target, there, position).any(), "slots behind the last token are not zero"


BASE = KVLayout(LAYERS, HEADS, DIM, 16, "float32", "NHD")


@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])
@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 32},
        {"block_size": 8},
        {"block_size": 24},
        {"order": "HND"},
        {"dtype": "bfloat16"},
        {"dtype": "float16", "order": "HND", "block_size": 5},
    ],
    ids=str,
)
def test_a_pair_of_different_layouts_hands_over(change: dict[str, object], transport: str) -> None:
    mine = replace(BASE, **change)  # type: ignore[arg-type]  # the fields named by the parameters
    config = TransferConfig(frame_bytes=65536)
    count = 1203

    async def test() -> None:
        async with pair(config, layout=BASE, receiver_layout=mine, transports=links_of(transport), blocks=320) as world:
            values = torch.rand(world.source.tensor.shape, generator=torch.Generator().manual_seed(1))
            world.source.tensor.copy_(values)
            await hand_over(world, ("r", 1), have=0)
            await hand_over(world, ("r", 2), have=48)
            await hand_over(world, ("r", 3), have=count)

    async def hand_over(world: Pair, key: Key, have: int) -> None:
        have -= have % mine.block_size if have < count else 0
        table = list(range(BASE.blocks_for(count)))
        world.announce(key, list(range(count)), have=have)
        world.compute(key, table)
        await world.ends.until(lambda: key in world.ends.imported and key in world.ends.exported)
        reservation, _, stats = world.ends.imported[key]
        there = reservation.hold.blocks
        for position in range(have, count):
            wanted = token(world.source, table, position).to(world.target.tensor.dtype)
            assert torch.equal(token(world.target, there, position), wanted), position
        kept = [token(world.target, there, position) for position in range(have)]
        assert not kept or not torch.stack(kept).any(), "tokens that were there already were overwritten"
        assert stats.nbytes == world.ends.exported[key].nbytes
        world.target.tensor.zero_()
        world.receiving.free += there

    asyncio.run(test())


def test_the_field_that_cannot_be_converted_is_named() -> None:
    for change in ({"layers": 4}, {"head_dim": 8}, {"kv_heads": 4}, {"tp_size": 2}):
        other = replace(BASE, **change)  # type: ignore[arg-type]  # the fields named by the loop
        assert str(BASE.mismatch(other)).startswith(next(iter(change)))
    for change in ({"block_size": 8}, {"order": "HND"}, {"dtype": "float16"}):
        other = replace(BASE, **change)  # type: ignore[arg-type]  # the fields named by the loop
        assert BASE.mismatch(other) is None
        assert str(BASE.conversion(other)).startswith(next(iter(change)))
