"""Pools of more than 2^31 elements: the last blocks hold and give what the first blocks of a small pool do.

Here the pool is memory that is only reserved, of which the test uses a few pages, and kernels are interpreted.
"""

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from paged_kv import LAYER, LAYERS, Sequences, make_sequences
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from kvrelay.kernels.triton.decode_work import DecodeParts, DecodeWork, plan_decode
from kvrelay.kernels.triton.flash_prefill import Tile, choose_tile, flash_prefill, plan_tiles
from kvrelay.kernels.triton.kv_frame import kv_frame
from kvrelay.kernels.triton.paged import PagedKV
from kvrelay.kernels.triton.paged_decode import paged_decode
from kvrelay.kernels.triton.rope_kv_write import rope_kv_write

BLOCK_SIZE, KV_HEADS, DIM = 64, 8, 64
BLOCKS = 2**31 // (LAYERS * 2 * KV_HEADS * BLOCK_SIZE * DIM) + 64
CONTEXTS = [130, 65]
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
def cases(far: Tensor, device: torch.device) -> tuple[Sequences, PagedKV, Tensor]:
    """Sequences in a small pool, and the same KV in the last blocks of the large one, with its block tables."""
    near = make_sequences((2 * KV_HEADS, KV_HEADS, DIM), CONTEXTS, [8, 5], block_size=BLOCK_SIZE, device=device)
    held = near.kv.pool
    offset = BLOCKS - len(held)
    far[offset:] = held
    assert offset * far.stride(0) > 2**31
    return near, PagedKV(far, LAYER), near.block_tables + offset


def decode(case: Sequences, kv: PagedKV, tables: Tensor) -> Tensor:
    query = case.query[:2]
    work = DecodeWork.view(torch.zeros(sum(DecodeWork.sizes(2, 2)), dtype=torch.int32), 2, 2)
    plan_decode(np.array(CONTEXTS), 0, work)
    work = DecodeWork(*(tensor.to(query.device) for tensor in work))
    out = torch.empty_like(query)
    paged_decode(query, kv, tables, work, DecodeParts.empty(2, query.shape[1], KV_HEADS, DIM, query.device), out)
    return out


def prefill(case: Sequences, kv: PagedKV, tables: Tensor, tile: Tile) -> Tensor:
    lengths = np.array(case.lengths)
    work = plan_tiles(np.array(CONTEXTS) - lengths, lengths, tile.rows // 2)
    out = torch.empty_like(case.query)
    flash_prefill(case.query, kv, tables, torch.from_numpy(work).to(out.device), tile, 0, out)
    return out


def test_decode(cases: tuple[Sequences, PagedKV, Tensor]) -> None:
    near, far, tables = cases
    assert torch.equal(decode(near, far, tables), decode(near, near.kv, near.block_tables))


@pytest.mark.parametrize("tma", [False, pytest.param(True, marks=pytest.mark.more)])
def test_prefill(cases: tuple[Sequences, PagedKV, Tensor], tma: bool) -> None:
    near, far, tables = cases
    tile = Tile(32, 32, 4, 2, tma=tma)
    if near.query.is_cuda:
        tile = choose_tile(DIM, torch.float16, BLOCK_SIZE if tma else 16)
    found = prefill(near, far, tables, tile)
    assert torch.equal(found, prefill(near, near.kv, near.block_tables, tile))


def test_writes(cases: tuple[Sequences, PagedKV, Tensor], device: torch.device) -> None:
    _, far, _ = cases
    qkv = torch.randn(3, 4 * KV_HEADS, DIM).to(device, torch.float16)
    rotation = torch.randn(3, 1, DIM, device=device), torch.randn(3, 1, DIM, device=device)
    small = PagedKV(torch.zeros_like(far.pool[:3]), LAYER)
    slots = torch.tensor([5, BLOCK_SIZE + 1, 3 * BLOCK_SIZE - 1], device=device)
    rope_kv_write(qkv, rotation, slots, small)
    far.pool[-3:] = 0
    rope_kv_write(qkv, rotation, slots + (BLOCKS - 3) * BLOCK_SIZE, far)
    assert small.pool.any()
    assert torch.equal(far.pool[-3:], small.pool)


def test_frames(cases: tuple[Sequences, PagedKV, Tensor], device: torch.device) -> None:
    _, far, _ = cases
    planes = far.pool.view(torch.uint8).flatten(3)
    frame = torch.randint(0, 256, planes[:3].shape, dtype=torch.uint8, device=device)
    blocks = torch.tensor([BLOCKS - 1, BLOCKS - 3, BLOCKS - 2], device=device)
    total = torch.zeros(1, dtype=torch.int64, device=device)
    kv_frame("write", planes, blocks, frame.flatten(), total)
    assert torch.equal(planes[blocks], frame)
    found = torch.empty_like(frame).flatten()
    kv_frame("read", planes, blocks, found, total)
    assert torch.equal(found, frame.flatten())
