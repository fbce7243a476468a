"""Frames read from the pool and written into it equal their definition; `KVPool` copies them by these kernels."""

import random
import re
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor
from triton_compile import Compiler, each_architecture

from kvrelay.kernels import reference
from kvrelay.kernels.triton.kv_gather import kv_gather, kv_scatter

Order = Literal["NHD", "HND"]
BLOCKS, LAYERS = 9, 3
ALL = (0, LAYERS)
CASES = [
    # heads, block size, head size, type, tokens, heads and layers of the frame
    ((2, 16, 64), torch.float16, 53, (0, 2), ALL),
    ((4, 8, 128), torch.bfloat16, 40, (2, 2), ALL),  # whole blocks, a slice of a tensor-parallel rank
    ((3, 16, 80), torch.float16, 17, (1, 1), (1, 2)),
    ((2, 8, 20), torch.int8, 21, (0, 2), ALL),  # the bytes of a head aren't a multiple of 16
    ((2, 8, 15), torch.int8, 9, (1, 1), (0, 1)),  # nor of 4
    ((2, 16, 1), torch.float32, 30, (0, 2), ALL),  # scales
    ((1, 128, 256), torch.float32, 1, (0, 1), ALL),
    ((8, 16, 128), torch.bfloat16, 75, (2, 4), (1, 2)),
]


def make_pool(order: Order, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    kv_heads, block_size, dim = shape
    inner = (kv_heads, block_size) if order == "HND" else (block_size, kv_heads)
    whole = (BLOCKS, LAYERS, 2, *inner, dim * dtype.itemsize)
    generator = torch.Generator().manual_seed(dim)
    return torch.randint(0, 256, whole, generator=generator, dtype=torch.uint8).to(device).view(dtype)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize(("shape", "dtype", "tokens", "heads", "layers"), CASES, ids=str)
def test_equals_its_definition(
    device: torch.device,
    order: Order,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    tokens: int,
    heads: tuple[int, int],
    layers: tuple[int, int],
) -> None:
    used, block_size = slice(layers[0], sum(layers)), shape[1]
    pool = make_pool(order, shape, dtype, device)
    blocks = random.Random(tokens).sample(range(BLOCKS), -(-tokens // block_size))
    chosen = torch.tensor(blocks, device=device)
    source = reference.kv_frame(pool[:, used], blocks, tokens, order, heads)
    expected = reference.kv_gather(source)
    out = torch.full((len(expected) + 16,), 99, dtype=torch.uint8, device=device)
    assert kv_gather(pool, chosen, tokens, out, order, heads, layers) == len(expected)
    assert torch.equal(out[: len(expected)], expected)
    assert (out[len(expected) :] == 99).all()

    found = make_pool(order, shape, dtype, device)
    found.view(torch.uint8).bitwise_not_()
    wanted = found.clone()
    kv_scatter(found, chosen.int(), tokens, expected, order, heads, layers)
    wanted_frame = partial(reference.kv_frame, wanted[:, used], blocks, order=order, heads=heads)
    wanted_frame(len(blocks) * block_size)[-1].view(torch.uint8).zero_()
    for target, part in zip(wanted_frame(tokens), source, strict=True):
        target.view(torch.uint8).copy_(part.view(torch.uint8))
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": "DHN"}, "order is 'DHN'"),
        ({"heads": (-1, 1)}, "heads are 1 from -1 on; there are 2"),
        ({"num_tokens": 0}, "num_tokens is 0"),
        ({"num_tokens": 17}, r"blocks is \[2\]; allowed: \[3\]"),
        ({"blocks": torch.zeros(2)}, "blocks is torch.float32"),
        ({"out": torch.zeros(10, dtype=torch.uint8)}, r"frame is torch.uint8 \[10\]; allowed: torch.uint8 \[12288 or"),
        ({"out": torch.zeros(10000)}, "frame is torch.float32"),
        ({"pool": torch.zeros(2, 3, 2, 16)}, r"pool is \[2, 3, 2, 16\]"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {
        "pool": torch.zeros(BLOCKS, LAYERS, 2, 2, 8, 32, dtype=torch.float16),
        "blocks": torch.tensor([1, 2]),
        "num_tokens": 16,
        "out": torch.zeros(16 * LAYERS * 2 * 2 * 64, dtype=torch.uint8),
    }
    with pytest.raises(ValueError, match=message):
        kv_gather(**(given | change))


def launch_blank(order: Order, scatter: bool) -> None:
    inner = (8, 16) if order == "HND" else (16, 8)
    pool = torch.zeros(2, LAYERS, 2, *inner, 128, dtype=torch.bfloat16)
    frame = torch.zeros(20 * LAYERS * 2 * 8 * 256, dtype=torch.uint8)
    copy = kv_scatter if scatter else kv_gather
    copy(pool, torch.zeros(2, dtype=torch.int64), 20, frame, order)


@each_architecture
@pytest.mark.parametrize(("order", "scatter"), [("HND", True), ("HND", False), ("NHD", True)])
def test_compiled(compiler: Compiler, order: Order, scatter: bool, architecture: int) -> None:
    (kernel,) = compiler.compile(architecture, launch_blank, order, scatter)
    kernel.check_fits()
    loads, stores = (re.findall(rf"{what}\.global\S*\.v4\.b32", kernel.ptx) for what in ("ld", "st"))
    assert loads, "no load of 16 bytes"
    assert stores, "no store of 16 bytes"


def launch_least(order: Order) -> None:
    pool = torch.zeros(2, 1, 2, 1, 1, 16, dtype=torch.bfloat16)
    kv_gather(pool, torch.zeros(1, dtype=torch.int64), 1, torch.zeros(64, dtype=torch.uint8), order)


@pytest.mark.more
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_arguments_of_1_compile(compiler: Compiler, order: Order) -> None:
    """The compiler makes them constants, the interpreter doesn't."""
    compiler.compile(90, launch_least, order)[0].check_fits()
