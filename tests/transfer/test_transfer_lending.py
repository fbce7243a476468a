"""Frames that are sent from where they lie in the pool: the same bytes as through a buffer, wherever the blocks lie."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from kvrelay.engine.kv.layout import KVLayout, LayerPart
from kvrelay.engine.kv.pool import KVPool
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.frames.checks import ChecksumKind, FrameCheck
from kvrelay.transfer.frames.places import PoolFrame
from kvrelay.transfer.protocol.events import Frame
from kvrelay.transfer.transports.base import LinkError, Transport
from kvrelay.transfer.transports.nixl import NixlLink, nixl_missing
from support.handoff import LAYOUT, links_of, pair, prompt, raw

BLOCK = LAYOUT.block_size
LENGTHS = (1, BLOCK, BLOCK + 1, 5 * BLOCK, 19 * BLOCK + 3)
CONFIG = TransferConfig(frame_bytes=65536, gpu_frame_bytes=65536, gpu_buffer_bytes=2**20)
GPU_LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, block_size=8, dtype="float16", order="HND")
KEY = ("r", 1)
Transports = Mapping[str, Transport]
without_nixl = pytest.mark.skipif(nixl_missing() is not None, reason=f"nixl: {nixl_missing()}")


def hand_over(
    transports: tuple[Transports, Transports], source: KVPool, table_of: Callable[[int], list[int]]
) -> tuple[int, int]:
    """Hands over prompts of LENGTHS and compares them; bytes of the frames sent in place, and of all frames."""
    sent = 0

    async def test() -> int:
        nonlocal sent
        async with pair(CONFIG, transports=transports, source=source) as world:
            raw(world.source).random_(0, 256)
            for number, count in enumerate(LENGTHS):
                key, table = (f"r{number}", 1), table_of(count)
                world.announce(key, prompt(count))
                world.compute(key, table, chunk_blocks=3)
                await world.settled(key)
                world.check_equal(key, table, count)
                world.reuse(key)
                sent += world.ends.exported[key].nbytes
            return world.sender.in_place_bytes

    return asyncio.run(test()), sent


def scattered(count: int) -> list[int]:
    return random.Random(count).sample(range(256), LAYOUT.blocks_for(count))


def neighbours(count: int) -> list[int]:
    return list(range(40, 40 + LAYOUT.blocks_for(count)))


@without_nixl
@pytest.mark.parametrize("table_of", [scattered, neighbours])
def test_nixl_writes_blocks_from_wherever_they_lie(table_of: Callable[[int], list[int]]) -> None:
    in_place, sent = hand_over(links_of("nixl"), KVPool(LAYOUT, 256), table_of)
    assert 0 <= sent - in_place <= 5 * LAYOUT.token_bytes
    assert in_place > 0


@without_nixl
def test_a_pool_that_cannot_be_lent_is_copied(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, call = KVPool(LAYOUT, 256), NixlLink._call

    def refusing(link: NixlLink, name: str, *arguments: Any) -> Any:
        if name == "register_memory" and arguments[0] is source.bytes:
            raise LinkError("nixl: no registration")
        return call(link, name, *arguments)

    monkeypatch.setattr(NixlLink, "_call", refusing)
    in_place, sent = hand_over(links_of("nixl"), source, neighbours)
    assert (in_place, sent > 0) == (0, True)
    assert caplog.text.count("frames are copied before they are sent") == 1, "once for a link"


class Lending:
    """A lender, and what it lends."""

    def __init__(self, most_runs: int) -> None:
        self.most_runs = most_runs
        self.lent: list[torch.Tensor] = []

    def lend(self, memory: torch.Tensor) -> bool:
        self.lent.append(memory)
        return True

    def send_runs(self, parts: Sequence[torch.Tensor]) -> None:
        raise AssertionError("only made ready")


@pytest.mark.parametrize("kind", list(ChecksumKind))
@pytest.mark.parametrize("part", [LayerPart(), LayerPart(1, 2)])
@pytest.mark.parametrize("table", [[2, 3, 4], [4, 1, 6], [5, 6, 1]])
@pytest.mark.parametrize("tokens", [16, 21, 24])
def test_parts_are_the_bytes_of_the_frame(table: list[int], tokens: int, part: LayerPart, kind: ChecksumKind) -> None:
    """The sums are computed by kernels as on a GPU (MIX64), and on the CPU."""
    pool = KVPool(GPU_LAYOUT, 8)
    pool.bytes.random_(0, 256)
    pool._by_kernel = kind is ChecksumKind.MIX64
    frame = Frame(1, 0, 0, tokens, GPU_LAYOUT.nbytes(tokens, part), part)
    check, place = FrameCheck(kind, None, KEY, frame), PoolFrame(pool, table, frame)
    expected, buffer = (torch.full((frame.nbytes + check.nbytes,), 9, dtype=torch.uint8) for _ in range(2))
    if place.queues(expected, check):
        place.begin_read(expected, check)
    else:
        place.read(expected[: frame.nbytes])
        if check.nbytes:
            expected[frame.nbytes :] = torch.frombuffer(
                bytearray(check.of(expected[: frame.nbytes])), dtype=torch.uint8
            )
    whole = tokens // GPU_LAYOUT.block_size
    lender = Lending(3)
    parts = place.lend(lender, buffer, check)  # type: ignore[arg-type]  # it is only made ready
    assert parts is not None
    assert torch.equal(torch.cat(parts), expected)
    assert lender.lent[0] is pool.bytes
    inside = [piece for piece in parts if piece.untyped_storage().data_ptr() == pool.bytes.untyped_storage().data_ptr()]
    assert sum(map(len, inside)) == GPU_LAYOUT.nbytes(whole * GPU_LAYOUT.block_size, part)
    assert place.lend(Lending(len(inside) - 1), buffer, check) is None  # type: ignore[arg-type]  # it is only made ready
