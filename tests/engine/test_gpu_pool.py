"""A pool on a GPU copies frames by kernels: the very bytes that a pool in host memory copies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.kv.layout import KVDtype, KVLayout, LayerPart, Order
from kvrelay.engine.kv.pool import KVPool

SIZE = 8


def pools(order: Order, dtype: KVDtype) -> tuple[KVPool, KVPool]:
    """Two equal pools: a plain one, and one that copies by kernels, on a GPU if there is one and else interpreted."""
    layout = KVLayout(layers=3, kv_heads=2, head_dim=4, block_size=SIZE, dtype=dtype, order=order)
    plain = KVPool(layout, 7)
    plain.bytes.random_(0, 256)
    by_kernel = KVPool(layout, 7, "cuda" if torch.cuda.is_available() else "cpu")
    by_kernel._by_kernel = True
    by_kernel.bytes.copy_(plain.bytes)
    return by_kernel, plain


@settings(max_examples=15, deadline=None)
@given(
    order=st.sampled_from(["HND", "NHD"]),
    dtype=st.sampled_from(["float16", "int8"]),
    blocks=st.permutations(range(7)),
    first=st.integers(0, 2),
    tokens=st.integers(1, 4 * SIZE),
    part=st.sampled_from([LayerPart(), LayerPart(0, 2), LayerPart(1, 2), LayerPart(2, 3)]),
)
def test_frames_are_the_same_bytes(
    order: Order, dtype: KVDtype, blocks: list[int], first: int, tokens: int, part: LayerPart
) -> None:
    by_kernel, plain = pools(order, dtype)
    size = tokens * plain.layout.token_bytes + 5
    frames = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    sizes = [
        pool.read(blocks, first * SIZE, tokens, frame, part)
        for pool, frame in zip((by_kernel, plain), frames, strict=True)
    ]
    assert sizes[0] == sizes[1]
    assert torch.equal(*frames)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    for pool in (by_kernel, plain):
        pool.write(blocks, first * SIZE, tokens, data, part)
    assert torch.equal(by_kernel.bytes.cpu(), plain.bytes)


def test_what_is_refused_is_refused_there_too() -> None:
    by_kernel, _ = pools("HND", "float16")
    frame = torch.zeros(10, dtype=torch.uint8)
    with pytest.raises(ValueError, match="first_token is 3"):
        by_kernel.read([0, 1], 3, 4, frame)
    with pytest.raises(ValueError, match="frame is"):
        by_kernel.write([0, 1], 0, 4, frame)
