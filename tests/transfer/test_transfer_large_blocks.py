"""KV blocks that are larger than a frame are sent in several frames, by layers."""

import asyncio
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.kv.layout import KVLayout, LayerPart
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.events import Frame
from kvrelay.transfer.protocol.handshake import FrameCut, LocalWorker
from kvrelay.transfer.protocol.messages import MAX_FRAME_BYTES, MAX_PARTS, decode, encode
from support.fake_transport import FakeTransport, Fault
from support.handoff import RECEIVER, SENDER, Ends, content, links_of, pair

LAYOUT = KVLayout(layers=5, kv_heads=4, head_dim=32, block_size=32, dtype="float32")
"""Layout with 160 KiB a block: three frames of up to 64 KiB."""
CONFIG = TransferConfig(frame_bytes=65536)
COUNT = 3 * LAYOUT.block_size + 7


def of_model(layers: int, block_size: int) -> KVLayout:
    """A Llama's KV: 8 heads of 128, in bfloat16."""
    return KVLayout(layers=layers, kv_heads=8, head_dim=128, block_size=block_size, dtype="bfloat16", order="HND")


@pytest.mark.parametrize("layers", [32, 80], ids=["8B", "70B"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_pages_of_large_models_fit_into_frames_of_the_default_size(layers: int, block_size: int) -> None:
    worker = LocalWorker(SENDER, of_model(layers, block_size), "")
    announced = worker.hello(RECEIVER, TransferConfig()).frame_bytes
    assert announced <= TransferConfig().frame_bytes
    assert decode(encode([worker.hello(RECEIVER, TransferConfig())]))[0] == worker.hello(RECEIVER, TransferConfig())


layouts = st.builds(
    KVLayout,
    layers=st.integers(1, 128),
    kv_heads=st.integers(1, 16),
    head_dim=st.integers(8, 256),
    block_size=st.sampled_from([8, 16, 32, 64, 128]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


@given(layouts, st.integers(2**16, MAX_FRAME_BYTES))
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


async def hand_over(transport: str, receiver: KVLayout, have: int = 0) -> None:
    async with pair(
        CONFIG, layout=LAYOUT, receiver_layout=receiver, transports=links_of(transport), blocks=64
    ) as world:
        world.source.tensor.copy_(torch.randn(world.source.tensor.shape))
        table = list(range(LAYOUT.blocks_for(COUNT)))
        world.announce(("r", 1), list(range(COUNT)), have=have)
        world.compute(("r", 1), table)
        await world.ends.until(lambda: ("r", 1) in world.ends.imported and ("r", 1) in world.ends.exported)
        reservation, _, stats = world.ends.imported["r", 1]
        assert stats.nbytes == (COUNT - have) * LAYOUT.token_bytes
        there = reservation.hold.blocks
        if receiver == LAYOUT:
            assert torch.equal(content(world.target, there, COUNT, have), content(world.source, table, COUNT, have))
            return
        for token in range(have, COUNT):
            mine = world.target.tensor[there[token // receiver.block_size], :, :, :, token % receiver.block_size]
            theirs = world.source.tensor[table[token // LAYOUT.block_size], :, :, token % LAYOUT.block_size]
            assert torch.equal(mine, theirs), token


@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])
def test_every_layer_of_every_token_arrives(transport: str) -> None:
    asyncio.run(hand_over(transport, LAYOUT))


def test_only_what_the_receiver_lacks_is_sent() -> None:
    asyncio.run(hand_over("tcp", LAYOUT, have=LAYOUT.block_size))


def test_a_receiver_of_another_layout_converts_part_by_part() -> None:
    asyncio.run(hand_over("tcp", replace(LAYOUT, block_size=16, order="HND")))


def test_a_link_lost_between_two_parts_of_a_block_sends_that_block_again() -> None:
    """The second part of the second block is lost with its link; whole blocks that have verified are not sent again."""
    broken = FakeTransport(lambda number: Fault("fail") if number == 4 else None)
    sent: list[Frame] = []

    async def test() -> None:
        async with pair(CONFIG, layout=LAYOUT, transports=({"fake": broken}, {"fake": broken}), blocks=64) as world:
            send = world.sender._frames.send

            def recorded(key: object, frame: Frame, *rest: object) -> object:
                sent.append(frame)
                return send(key, frame, *rest)

            world.sender._frames.send = recorded
            world.source.tensor.copy_(torch.randn(world.source.tensor.shape))
            table = list(range(LAYOUT.blocks_for(COUNT)))
            world.announce(("r", 1), list(range(COUNT)))
            world.compute(("r", 1), table)
            await committed(world.ends)
            there = world.ends.imported["r", 1][0].hold.blocks
            assert torch.equal(content(world.target, there, COUNT), content(world.source, table, COUNT))

    async def committed(ends: Ends) -> None:
        await ends.until(lambda: ("r", 1) in ends.imported and ("r", 1) in ends.exported)

    asyncio.run(test())
    again = [frame for frame in sent if frame.epoch == 2]
    assert (again[0].first, again[0].part) in {(0, LayerPart(0, 3)), (LAYOUT.block_size, LayerPart(0, 3))}
    assert len(again) < len([frame for frame in sent if frame.epoch == 1]) + 1
