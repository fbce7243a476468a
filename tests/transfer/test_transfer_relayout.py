"""Pairs of workers with different KV layouts: each token's KV arrives with the values that were computed."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import TORCH_DTYPES, KVPool
from kvrelay.kernels.kv_codes import dequantize, quantize
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.frames.frames import ConvertedFrame, NarrowedFrame, PoolFrame
from kvrelay.transfer.protocol.events import Frame
from kvrelay.transfer.protocol.messages import Key
from support.handoff import Pair, links_of, pair

LAYERS, HEADS, DIM = 3, 2, 4
DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8")

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


def token(tensor: torch.Tensor, layout: KVLayout, table: list[int], position: int) -> torch.Tensor:
    """One token's KV [layer, k|v, head, dim], in the numbers of a pool."""
    block, slot = tensor[table[position // layout.block_size]], position % layout.block_size
    return block[:, :, slot] if layout.order == "NHD" else block[:, :, :, slot]


@settings(max_examples=150, deadline=None)
@given(st.data(), layouts, layouts, st.integers(1, 40), st.integers(0, 2**31))
def test_every_number_lands_where_it_belongs_and_nothing_else_moves(
    data: st.DataObject, theirs: KVLayout, mine: KVLayout, count: int, seed: int
) -> None:
    rng = random.Random(seed)
    source, target = fill(KVPool(theirs, 48), seed), fill(KVPool(mine, 48), seed + 1)
    table, there = (rng.sample(range(48), layout.blocks_for(count)) for layout in (theirs, mine))
    sent, before, wire = held(source), held(target), theirs.sent_to(mine)
    keep = data.draw(st.integers(0, count // mine.block_size)) * mine.block_size
    first = keep // theirs.block_size * theirs.block_size
    written = []
    while first < count:
        frame_tokens = min(count - first, rng.randrange(1, 4) * theirs.block_size)
        frame = Frame(1, 0, first, frame_tokens, frame_tokens * wire.token_bytes)
        buffer = torch.empty(frame.nbytes, dtype=torch.uint8)
        place = PoolFrame(source, table, frame) if wire == theirs else NarrowedFrame(source, wire, table, frame)
        place.read(buffer)
        ConvertedFrame(target, wire, there, frame, keep).write(buffer)
        written.append((first, frame_tokens))
        first += frame_tokens
    after = held(target)
    for position in range(keep, count):
        wanted = converted(token(sent, theirs, table, position), theirs, mine)
        assert torch.equal(token(after, mine, there, position), wanted), f"token {position} of frames {written}"
    for position in range(keep):
        assert torch.equal(token(after, mine, there, position), token(before, mine, there, position)), position
    others = [block for block in range(48) if block not in there]
    assert torch.equal(after[others], before[others])
    if keep < count:
        for position in range(count, len(there) * mine.block_size):
            assert not token(after, mine, there, position).any(), "slots behind the last token are not zero"


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
        {"dtype": "int8"},
        {"dtype": "int8", "order": "HND", "block_size": 32},
    ],
    ids=str,
)
def test_a_pair_of_different_layouts_hands_over(change: dict[str, object], transport: str) -> None:
    mine = replace(BASE, **change)  # type: ignore[arg-type]  # the fields named by the parameters
    config = TransferConfig(frame_bytes=65536)
    count = 1203

    async def test() -> None:
        async with pair(config, layout=BASE, receiver_layout=mine, transports=links_of(transport), blocks=320) as world:
            fill(world.source, 1)
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
        sent, found = held(world.source), held(world.target)
        for position in range(have, count):
            wanted = converted(token(sent, BASE, table, position), BASE, mine)
            assert torch.equal(token(found, mine, there, position), wanted), position
        kept = [token(found, mine, there, position) for position in range(have)]
        assert not kept or not torch.stack(kept).any(), "tokens that were there already were overwritten"
        begin = have if have == count else have - have % BASE.block_size
        assert stats.nbytes == (count - begin) * BASE.sent_to(mine).token_bytes
        assert stats.nbytes == world.ends.exported[key].nbytes
        world.target.bytes.zero_()
        world.receiving.free += there

    asyncio.run(test())


def test_the_field_that_cannot_be_converted_is_named() -> None:
    for change in ({"layers": 4}, {"head_dim": 8}, {"kv_heads": 4}, {"tp_size": 2}):
        other = replace(BASE, **change)  # type: ignore[arg-type]  # the fields named by the loop
        assert str(BASE.mismatch(other)).startswith(next(iter(change)))
    for change in ({"block_size": 8}, {"order": "HND"}, {"dtype": "float16"}, {"dtype": "int8"}):
        other = replace(BASE, **change)  # type: ignore[arg-type]  # the fields named by the loop
        assert BASE.mismatch(other) is None
        assert str(BASE.conversion(other)).startswith(next(iter(change)))
