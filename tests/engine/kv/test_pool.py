"""Frames: token-exact copies of a sequence's KV out of and into the pool."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrelay.engine.kv.layout import KVLayout, LayerPart, Order
from kvrelay.engine.kv.pool import KVPool, fields

BLOCKS = 7
SIZE = 8
DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8")


def layout_of(order: Order = "NHD", dtype: str = "float32") -> KVLayout:
    return KVLayout(layers=3, kv_heads=2, head_dim=4, block_size=SIZE, dtype=dtype, order=order)


def filled(layout: KVLayout) -> KVPool:
    """A pool in which all numbers differ, as far as the type can tell them apart."""
    pool = KVPool(layout, BLOCKS)
    if layout.scaled:
        pool.bytes.copy_(torch.arange(pool.nbytes).remainder(251).view(pool.bytes.shape))
    else:
        pool.tensor.copy_(torch.arange(pool.tensor.numel()).remainder(2039).view(pool.tensor.shape))
    return pool


def tokens_of(pool: KVPool, blocks: list[int], first: int, count: int) -> Tensor:
    """The bytes of the tokens' KV, gathered one by one: [token, layer, k|v, head, bytes]."""
    held = torch.cat(fields(pool.bytes, pool.layout), -1)
    slots = [(blocks[token // SIZE], token % SIZE) for token in range(first, first + count)]
    if pool.layout.order == "NHD":
        return torch.stack([held[block, :, :, slot] for block, slot in slots])
    return torch.stack([held[block, :, :, :, slot] for block, slot in slots])


tables = st.permutations(range(BLOCKS)).flatmap(
    lambda blocks: st.tuples(st.just(blocks), st.integers(0, BLOCKS - 1)).flatmap(
        lambda drawn: st.tuples(st.just(drawn[0]), st.just(drawn[1] * SIZE), st.integers(1, (BLOCKS - drawn[1]) * SIZE))
    )
)


@settings(max_examples=60, deadline=None)
@given(tables, tables, st.sampled_from(["NHD", "HND"]), st.sampled_from(DTYPES))
def test_a_frame_carries_its_tokens_to_any_blocks_and_touches_no_others(
    source: tuple[list[int], int, int], target: tuple[list[int], int, int], order: Order, dtype: str
) -> None:
    layout = layout_of(order, dtype)
    sender = filled(layout)
    before = sender.bytes.clone()
    blocks, first, count = source
    other_blocks, other_first, room = target
    count = min(count, room)
    frame = torch.full((count * layout.token_bytes + 5,), 77, dtype=torch.uint8)
    assert sender.read(blocks, first, count, frame) == count * layout.token_bytes
    assert torch.equal(sender.bytes, before)
    assert (frame[-5:] == 77).all()

    receiver = filled(layout)
    receiver.write(other_blocks, other_first, count, frame)
    assert torch.equal(tokens_of(receiver, other_blocks, other_first, count), tokens_of(sender, blocks, first, count))
    used = other_blocks[other_first // SIZE : layout.blocks_for(other_first + count)]
    others = [block for block in range(BLOCKS) if block not in used]
    assert torch.equal(receiver.bytes[others], before[others])
    rest = len(used) * SIZE - count
    if rest:
        assert not tokens_of(receiver, other_blocks, other_first + count, rest).any()


@settings(max_examples=30, deadline=None)
@given(tables, st.integers(1, 3), st.sampled_from(["NHD", "HND"]))
def test_parts_by_layers_carry_what_one_frame_does_and_each_its_own_layers(
    source: tuple[list[int], int, int], parts: int, order: Order
) -> None:
    layout = layout_of(order)
    sender, whole, pieces = filled(layout), filled(layout), filled(layout)
    blocks, first, count = source
    frame = torch.empty(count * layout.token_bytes, dtype=torch.uint8)
    sender.read(blocks, first, count, frame)
    whole.tensor.fill_(5)
    pieces.tensor.fill_(5)
    whole.write(blocks, first, count, frame)
    sizes = []
    for index in range(parts):
        part = LayerPart(index, parts)
        before = pieces.tensor.clone()
        sizes.append(sender.read(blocks, first, count, frame, part))
        pieces.write(blocks, first, count, frame, part)
        others = [layer for layer in range(3) if layer not in part.layers(3)]
        assert torch.equal(pieces.tensor[:, others], before[:, others])
        runs = b"".join(sender.runs(blocks, first, count, part))
        tail = sizes[-1] - len(runs)
        assert runs == frame[: len(runs)].numpy().tobytes()
        assert (tail > 0) == (count % SIZE > 0)
    assert sum(sizes) == count * layout.token_bytes
    assert torch.equal(pieces.tensor, whole.tensor)


def test_whole_blocks_lie_in_a_frame_as_in_the_pool_and_a_part_is_compacted_layer_by_layer() -> None:
    layout = layout_of()
    pool = filled(layout)
    frame = torch.empty(layout.nbytes(2 * SIZE + 3), dtype=torch.uint8)
    pool.read([5, 1, 4, 6], SIZE, 2 * SIZE + 3, frame)
    expected = torch.cat((pool.tensor[[1, 4]].flatten(), pool.tensor[6, :, :, :3].flatten()))
    assert torch.equal(frame.view(torch.float32), expected)


@pytest.mark.parametrize(
    ("blocks", "first", "count", "message"),
    [
        ([0, 1], 3, 1, "first_token is 3; allowed: multiples of the block size, 8"),
        ([0, 1], -8, 1, "first_token is -8"),
        ([0, 1], 0, 0, "num_tokens is 0"),
        ([0, 1], 8, 9, "num_tokens is 9 from 8 on; 2 blocks of 8 are held"),
        ([0, BLOCKS], 8, 1, "blocks holds 7 to 7; allowed: 0 to 6"),
        ([0, -1], 0, 16, "blocks holds -1 to 0"),
    ],
)
def test_a_range_outside_the_blocks_is_refused(blocks: list[int], first: int, count: int, message: str) -> None:
    pool = filled(layout_of())
    before = pool.tensor.clone()
    frame = torch.zeros(32 * pool.layout.token_bytes, dtype=torch.uint8)
    for access in (pool.read, pool.write):
        with pytest.raises(ValueError, match=message):
            access(blocks, first, count, frame)
    assert torch.equal(pool.tensor, before)


@pytest.mark.parametrize(
    "frame",
    [
        torch.zeros(3 * 192 - 1, dtype=torch.uint8),
        torch.zeros(3 * 192, dtype=torch.int8),
        torch.zeros(3, 192, dtype=torch.uint8),
        torch.zeros(6 * 192, dtype=torch.uint8)[::2],
    ],
)
def test_a_frame_of_another_shape_is_refused(frame: Tensor) -> None:
    pool = filled(layout_of())
    assert pool.layout.token_bytes == 192
    with pytest.raises(ValueError, match=r"allowed: torch\.uint8 \[576 or more\]"):
        pool.write([0], 0, 3, frame)


@settings(max_examples=8, deadline=None)
@given(
    order=st.sampled_from(["HND", "NHD"]),
    dtype=st.sampled_from(["float16", "int8"]),
    source=tables,
    part=st.sampled_from([LayerPart(), LayerPart(0, 2), LayerPart(1, 2), LayerPart(2, 3)]),
)
def test_frames_that_a_kernel_copies_are_the_same_bytes(
    order: Order, dtype: str, source: tuple[list[int], int, int], part: LayerPart
) -> None:
    """A pool that copies by kernels, on a GPU if there is one and else interpreted, is compared with a plain one."""
    layout, (blocks, first, tokens) = layout_of(order, dtype), source
    plain, by_kernel = filled(layout), KVPool(layout, BLOCKS, "cuda" if torch.cuda.is_available() else "cpu")
    by_kernel._by_kernel = True
    by_kernel.bytes.copy_(plain.bytes)
    frames = [torch.zeros(tokens * layout.token_bytes + 5, dtype=torch.uint8) for _ in range(2)]
    sizes = [
        pool.read(blocks, first, tokens, frame, part) for pool, frame in zip((by_kernel, plain), frames, strict=True)
    ]
    assert sizes[0] == sizes[1]
    assert torch.equal(*frames)
    data = torch.randint(0, 256, (len(frames[0]),), dtype=torch.uint8)
    for pool in (by_kernel, plain):
        pool.write(blocks, first, tokens, data, part)
    assert torch.equal(by_kernel.bytes.cpu(), plain.bytes)
