"""Sequences in a paged KV pool as GPUs keep it, for the tests of attention kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.kernels.kv_codes import LARGEST, SCALE, dequantize, quantize
from kvrelay.kernels.reference import paged_attention
from kvrelay.kernels.triton.decode_work import DecodeParts, DecodeWork, plan_decode
from kvrelay.kernels.triton.flash_prefill import Tile, flash_prefill, plan_tiles
from kvrelay.kernels.triton.paged import PagedKV
from kvrelay.kernels.triton.paged_decode import paged_decode

LAYERS = 2
LAYER = 1
SMALL = Tile(rows=32, keys=32, warps=4, stages=2)


@dataclass
class Sequences:
    """Rows of a step, each with so many new tokens at the end of so long a context."""

    query: Tensor
    """Queries as a tensor [T, H, D]."""
    kv: PagedKV
    block_tables: Tensor
    contexts: list[int]
    lengths: list[int]

    softcap: float = 0.0
    sinks: Tensor | None = None

    def expected(self, window: int = 0) -> Tensor:
        """[T, H, D] by the definition, in float32 or better."""
        pool, layer, scales = self.kv
        held = pool.float() if scales is None else dequantize(pool, scales)
        # What nobody wrote must not count.
        held = held.nan_to_num(0.0, 0.0, 0.0).transpose(3, 4)
        rows = []
        for query, context, table in zip(
            self.query.split(self.lengths), self.contexts, self.block_tables.tolist(), strict=True
        ):
            rows.append(
                paged_attention(query, held, layer, table, context, window, torch.float64, self.softcap, self.sinks)
            )
        return torch.cat(rows)


def make_sequences(
    shape: tuple[int, int, int],
    contexts: Sequence[int],
    lengths: Sequence[int],
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float16,
    kv_dtype: torch.dtype | None = None,
    device: torch.device,
    seed: int = 0,
) -> Sequences:
    """Random sequences on blocks in random order; slots without a token hold NaN, or 127 in 8 bits.

    Args:
        shape: H, Hkv, D.
        kv_dtype: of the pool; `dtype` unless given.
    """
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // block_size) for context in contexts]
    blocks = sum(counts) + 1
    order = (torch.randperm(blocks - 1, generator=generator) + 1).to(torch.int32)
    tables = torch.zeros(len(contexts), max(1, *counts) + 1, dtype=torch.int32)
    for table, mine in zip(tables, order.split(counts), strict=True):
        table[: len(mine)] = mine
    values = torch.randn(blocks, LAYERS, 2, kv_heads, block_size, dim, generator=generator)
    written = torch.zeros(blocks, block_size, dtype=torch.bool)
    for table, context in zip(tables, contexts, strict=True):
        positions = torch.arange(context)
        written[table[positions // block_size].long(), positions % block_size] = True
    unwritten = ~written[:, None, None, None, :, None]
    if kv_dtype in LARGEST:
        codes, scales = quantize(values, kv_dtype)
        layout = KVLayout(LAYERS, kv_heads, dim, block_size, "int8" if kv_dtype == torch.int8 else "fp8", "HND")
        held = KVPool(layout, blocks, device)
        held.tensor.copy_(codes.float().masked_fill(unwritten, 127.0).to(kv_dtype))
        held.scales.copy_(scales.masked_fill(unwritten[..., 0], torch.nan))
        kv = PagedKV(held.tensor, LAYER, held.scales)
    else:
        kv = PagedKV(values.masked_fill(unwritten, torch.nan).to(kv_dtype or dtype).to(device), LAYER)
    return Sequences(
        torch.randn(sum(lengths), heads, dim, generator=generator).to(device, dtype),
        kv,
        tables.to(device),
        list(contexts),
        list(lengths),
    )


def coded_sequences(
    shape: tuple[int, int, int],
    contexts: Sequence[int],
    lengths: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = 16,
) -> Sequences:
    """Sequences as `make_sequences` makes them, but all keys have the same weight, and a value tells its position.

    The key at `position` adds 1 to the dimension `position % (D / 2)`, and 1 to `D / 2 + position // (D / 2)`, modulo
    D / 2. So each dimension of the result counts few keys, and one that is lost or read twice shows.
    """
    case = make_sequences(shape, contexts, lengths, block_size=block_size, dtype=dtype, device=device)
    case.query.zero_()
    half = shape[2] // 2
    for table, context in zip(case.block_tables, contexts, strict=True):
        position = torch.arange(context, device=device)
        values = torch.zeros(context, shape[2], dtype=dtype, device=device)
        values[position, position % half] = 1
        values[position, half + position // half % half] = 1
        case.kv.pool[table[position // block_size].long(), LAYER, 1, :, position % block_size] = values[:, None]
    return case


def prefill(case: Sequences, window: int = 0, tile: Tile = SMALL) -> Tensor:
    """[T, H, D] by the kernel of prompts."""
    group = case.query.shape[1] // case.kv.pool.shape[3]
    lengths = np.array(case.lengths)
    tiles = plan_tiles(np.array(case.contexts) - lengths, lengths, tile.rows // group, window)
    tiles = torch.from_numpy(tiles).to(case.query.device)
    out = torch.empty_like(case.query)
    flash_prefill(case.query, case.kv, case.block_tables, tiles, tile, window, out, case.softcap, case.sinks)
    return out


def make_work(rows: int, programs: int, fill: int = 0) -> DecodeWork:
    """Memory of a work list on the host, full of `fill`."""
    words = torch.full((sum(DecodeWork.sizes(rows, programs)),), fill, dtype=torch.int32)
    return DecodeWork.view(words, rows, programs)


def planned(
    contexts: Sequence[int], programs: int, shape: tuple[int, int, int], device: torch.device, window: int = 0
) -> tuple[DecodeWork, DecodeParts]:
    """The work list of decode rows, with room for more of them, and memory for their parts, full of NaN.

    Args:
        shape: H, Hkv, D.
    """
    work = make_work(len(contexts) + 3, programs)
    plan_decode(np.array(contexts), window, work)
    parts = DecodeParts.empty(programs, *shape, device)
    for unwritten in parts[:2]:
        unwritten.fill_(torch.nan)
    return DecodeWork(*(tensor.to(device) for tensor in work)), parts


def decode(case: Sequences, window: int = 0, programs: int = 4) -> Tensor:
    """[R, H, D] by the kernel of decode rows; fails unless it resets its counters."""
    heads, dim = case.query.shape[1:]
    shape = heads, case.kv.pool.shape[3], dim
    work, parts = planned(case.contexts, programs, shape, case.query.device, window)
    out = torch.full_like(case.query, torch.nan)
    paged_decode(case.query, case.kv, case.block_tables, work, parts, out, case.softcap, case.sinks)
    assert not parts.arrivals.any(), "the next launch counts from 0"
    return out


def check_counts(found: Tensor, expected: Tensor) -> None:
    """Compares results for `coded_sequences`, where one key more or less changes a dimension by 1.5 % at least (up to
    66 keys)."""
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-6, rtol=7e-3)


def check_close(found: Tensor, expected: Tensor) -> None:
    """`expected` is of more precision than `found`; the bound is a part of the spread of each vector."""
    part = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}[found.dtype]
    expected = expected.double()
    spread = expected.square().mean(-1, keepdim=True).sqrt()
    off = (found.double() - expected).abs()
    assert torch.isfinite(found).all()
    worst = (off / spread.clamp(min=1e-30)).max()
    assert (off <= part * spread + part * expected.abs()).all(), (
        f"off by {worst:.2%} of the spread; allowed: {part:.2%}"
    )


def blank(
    shape: tuple[int, int, int], rows: int, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[Tensor, PagedKV, Tensor]:
    """Query, KV and block tables of so many tokens: as much as a launch that is only compiled needs."""
    heads, kv_heads, dim = shape
    pool = torch.zeros(2, LAYERS, 2, kv_heads, block_size, dim, dtype=kv_dtype)
    scales = torch.zeros(pool.shape[:5], dtype=SCALE) if kv_dtype in LARGEST else None
    # A width that is no multiple of 16, as contexts make it.
    tables = torch.zeros(rows, 17, dtype=torch.int32)
    return torch.zeros(rows, heads, dim, dtype=dtype), PagedKV(pool, LAYER, scales), tables
