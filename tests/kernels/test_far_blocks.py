"""Pools of more than 2^31 elements: the last blocks hold and give what the first blocks of a small pool do.

Here the pool is memory that is only reserved, of which the test uses a few pages, and kernels are interpreted.
"""

import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from paged_kv import LAYER, LAYERS, Sequences, decode, make_sequences, prefill
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from kvrelay.kernels.triton.flash_prefill import Tile, choose_tile
from kvrelay.kernels.triton.kv_frame import kv_frame
from kvrelay.kernels.triton.paged import PagedKV
from kvrelay.kernels.triton.rope_kv_write import rope_kv_write

BLOCK_SIZE, KV_HEADS, DIM = 64, 8, 64
BLOCKS = 2**31 // (LAYERS * 2 * KV_HEADS * BLOCK_SIZE * DIM) + 64
CONTEXTS = [130, 65]
CasesOf = Callable[..., tuple[Sequences, Sequences]]
MAP_NORESERVE = 0x4000
"""Flag of Linux's mmap; Python has no name for it yet."""


@pytest.fixture(scope="module")
def far(device: torch.device) -> Iterator[Tensor]:
    """A pool of more than 2^31 elements of 16 bits."""
    shape = (BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE, DIM)
    if device.type == "cuda":
        yield torch.zeros(shape, dtype=torch.float16, device=device)
        return
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, 2 * int(np.prod(shape)), flags=flags)
    with pytest.MonkeyPatch.context() as patch:
        # It copies back whole storages, although they are the same here.
        patch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
        yield torch.frombuffer(memory, dtype=torch.float16).view(shape)


@pytest.fixture
def cases_of(far: Tensor, device: torch.device) -> CasesOf:
    """Makes sequences of so many new tokens in a small pool, and the same in the last blocks of the large one."""

    def cases_of(*lengths: int) -> tuple[Sequences, Sequences]:
        near = make_sequences((2 * KV_HEADS, KV_HEADS, DIM), CONTEXTS, lengths, block_size=BLOCK_SIZE, device=device)
        held = near.kv.pool
        offset = BLOCKS - len(held)
        far[offset:] = held
        assert offset * far.stride(0) > 2**31
        return near, replace(near, kv=PagedKV(far, LAYER), block_tables=near.block_tables + offset)

    return cases_of


def test_decode(cases_of: CasesOf) -> None:
    near, far = cases_of(1, 1)
    assert torch.equal(decode(far), decode(near))


@pytest.mark.parametrize("tma", [False, pytest.param(True, marks=pytest.mark.more)])
def test_prefill(cases_of: CasesOf, tma: bool) -> None:
    near, far = cases_of(8, 5)
    tile = Tile(32, 32, 4, 2, tma=tma)
    if near.query.is_cuda:
        tile = choose_tile(DIM, torch.float16, BLOCK_SIZE if tma else 16)
    assert torch.equal(prefill(far, tile=tile), prefill(near, tile=tile))


def test_writes(far: Tensor, device: torch.device) -> None:
    qkv = torch.randn(3, 4 * KV_HEADS, DIM).to(device, torch.float16)
    rotation = torch.randn(3, 1, DIM, device=device), torch.randn(3, 1, DIM, device=device)
    small = PagedKV(torch.zeros_like(far[:3]), LAYER)
    slots = torch.tensor([5, BLOCK_SIZE + 1, 3 * BLOCK_SIZE - 1], device=device)
    rope_kv_write(qkv, rotation, slots, small)
    far[-3:] = 0
    rope_kv_write(qkv, rotation, slots + (BLOCKS - 3) * BLOCK_SIZE, PagedKV(far, LAYER))
    assert small.pool.any()
    assert torch.equal(far[-3:], small.pool)


def test_frames(far: Tensor, device: torch.device) -> None:
    planes = far.view(torch.uint8).flatten(3)
    frame = torch.randint(0, 256, planes[:3].shape, dtype=torch.uint8, device=device)
    blocks = torch.tensor([BLOCKS - 1, BLOCKS - 3, BLOCKS - 2], device=device)
    total = torch.zeros(1, dtype=torch.int64, device=device)
    kv_frame("write", planes, blocks, frame.flatten(), total)
    assert torch.equal(planes[blocks], frame)
    found = torch.empty_like(frame).flatten()
    kv_frame("read", planes, blocks, found, total)
    assert torch.equal(found, frame.flatten())
