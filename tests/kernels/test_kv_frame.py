"""Whole blocks read, written and summed in one pass equal the pool's frames and the checksum's definition."""

import random
import re

import pytest
import torch
from triton_compile import Compiler, each_architecture

from kvrelay.engine.kv.layout import KVLayout, LayerPart
from kvrelay.engine.kv.pool import KVPool
from kvrelay.kernels.reference import kv_checksum
from kvrelay.kernels.triton.kv_checksum import add_words, of_length
from kvrelay.kernels.triton.kv_frame import SPAN, Way, kv_frame

BLOCKS, LAYERS = 9, 3
PLANES = [8, 48, 1000, 8 * SPAN + 16]
"""Sizes in bytes: less than a vector, of odd words, and more than one program's share of a block."""
PARTS = [LayerPart(), LayerPart(1, 2)]


def pool_of(plane: int, device: torch.device) -> torch.Tensor:
    data = random.Random(plane).randbytes(BLOCKS * LAYERS * 2 * plane)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(BLOCKS, LAYERS, 2, plane).to(device)


def number(total: torch.Tensor) -> int:
    return int(total) % 2**64


def total_of(length: int, device: torch.device) -> torch.Tensor:
    return torch.full((1,), of_length(length), dtype=torch.int64, device=device)


def check(plane: int, part: LayerPart, device: torch.device) -> None:
    pool, chosen = pool_of(plane, device), [7, 2, 8, 0]
    blocks, used = torch.tensor(chosen, device=device), part.layers(LAYERS)
    layers = used.start, len(used)
    expected = pool[chosen, used.start : used.stop].flatten()
    size, digest = len(expected), kv_checksum(bytes(expected.cpu().numpy()))

    total, out = total_of(size, device), torch.full((size + 16,), 99, dtype=torch.uint8, device=device)
    assert kv_frame("read", pool, blocks, out, total, layers) == size
    assert torch.equal(out[:size], expected)
    assert (out[size:] == 99).all()
    assert number(total) == digest

    total = total_of(size, device)
    assert kv_frame("sum", pool, blocks, None, total, layers) == size
    assert number(total) == digest

    total, target = total_of(size, device), torch.full_like(pool, 5)
    wanted = target.clone()
    wanted[chosen, used.start : used.stop] = pool[chosen, used.start : used.stop]
    kv_frame("write", target, blocks, out, total, layers)
    assert torch.equal(target, wanted)
    assert number(total) == digest


@pytest.mark.parametrize(
    ("plane", "part"),
    [(PLANES[1], PARTS[1]), *(pytest.param(plane, part, marks=pytest.mark.more) for plane in PLANES for part in PARTS)],
)
def test_equals_its_definition(device: torch.device, plane: int, part: LayerPart) -> None:
    check(plane, part, device)


@pytest.mark.parametrize("tokens", [24, 21, 5], ids=["whole blocks", "and a part", "a part only"])
def test_words_behind_the_blocks_are_added_to_the_same_sum(device: torch.device, tokens: int) -> None:
    layout = KVLayout(LAYERS, kv_heads=1, head_dim=6, block_size=8, dtype="int8", order="HND")
    pool, size, table = KVPool(layout, BLOCKS, device), layout.nbytes(tokens), [4, 1, 6]
    pool.bytes.copy_(pool_of(layout.plane_bytes, device))
    frame = torch.empty(size, dtype=torch.uint8, device=device)
    pool.read(table, 0, tokens, frame)
    whole, total = tokens // layout.block_size, total_of(size, device)
    done = 0
    if whole:
        done = kv_frame("sum", pool.bytes, torch.tensor(table[:whole], device=device), None, total)
    add_words(total, frame[done:], done // 8)
    assert number(total) == kv_checksum(bytes(frame.cpu().numpy()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"way": "move"}, "way is 'move'; allowed: read, write, sum"),
        ({"frame": None}, "frame is None"),
        ({"frame": torch.zeros(10, dtype=torch.uint8)}, r"frame is torch.uint8 \[10\]; allowed: torch.uint8 \[192 or"),
        ({"frame": torch.zeros(400, dtype=torch.uint8)[8:]}, "frame isn't aligned"),
        ({"pool": torch.zeros(2, LAYERS, 2, 12, dtype=torch.uint8)}, "a plane has 12 bytes; allowed: multiples of 8"),
        ({"pool": torch.zeros(2, LAYERS, 16)}, "pool is torch.float32"),
        ({"layers": (2, 2)}, "layers are 2 from 2 on; there are 3"),
        ({"blocks": torch.zeros(2)}, "blocks is torch.float32"),
        ({"total": torch.zeros(2, dtype=torch.int64)}, r"total is \[2\]"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {
        "way": "read",
        "pool": torch.zeros(BLOCKS, LAYERS, 2, 16, dtype=torch.uint8),
        "blocks": torch.tensor([1, 2]),
        "frame": torch.zeros(200, dtype=torch.uint8),
        "total": torch.zeros(1, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        kv_frame(**(given | change))


def launch_blank(way: Way) -> None:
    pool = torch.zeros(2, 32, 2, 4096, dtype=torch.uint8)
    frame = None if way == "sum" else torch.zeros(pool.numel(), dtype=torch.uint8)
    kv_frame(way, pool, torch.zeros(2, dtype=torch.int64), frame, torch.zeros(1, dtype=torch.int64))


@pytest.mark.more
@each_architecture
@pytest.mark.parametrize("way", ["write", "read", "sum"])
def test_compiled(compiler: Compiler, way: Way, architecture: int) -> None:
    (kernel,) = compiler.compile(architecture, launch_blank, way)
    kernel.check_fits()
    loads, stores = (re.findall(rf"{what}\.global\S*\.v2\.b64", kernel.ptx) for what in ("ld", "st"))
    assert loads, "no load of 16 bytes"
    assert bool(stores) == (way != "sum"), "no store of 16 bytes"
    assert len(re.findall(r"(?:atom|red)\.\S*global", kernel.ptx)) == 1, "one addition a program"
