"""Prefill attention: equals its definition, and compiles for GPUs that this machine doesn't have."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged_kv import Sequences, blank, check_close, check_counts, coded_sequences, make_sequences
from torch import Tensor
from triton_compile import ARCHITECTURES, Compiler

from kvrelay.kernels.triton.flash_prefill import Tile, choose_tile, flash_prefill, flops, plan_tiles
from kvrelay.kernels.triton.paged import PagedKV

BF16 = torch.bfloat16
SMALL = Tile(rows=32, keys=32, warps=4, stages=2)


def run(case: Sequences, window: int = 0, tile: Tile = SMALL) -> Tensor:
    group = case.query.shape[1] // case.kv.pool.shape[3]
    lengths = np.array(case.lengths)
    tiles = plan_tiles(np.array(case.contexts) - lengths, lengths, tile.rows // group, window)
    tiles = torch.from_numpy(tiles).to(case.query.device)
    out = torch.empty_like(case.query)
    flash_prefill(case.query, case.kv, case.block_tables, tiles, tile, window, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("window", [0, 20, *(pytest.param(window, marks=pytest.mark.slow) for window in (1, 50))])
@pytest.mark.parametrize(
    ("shape", "contexts", "lengths"),
    [
        ((4, 2, 64), [33, 70], [33, 9]),  # a prompt, and a chunk after an earlier context
        ((3, 1, 80), [41], [20]),  # a group that doesn't divide the tile, a head size that isn't a power of two
        pytest.param((2, 2, 96), [65, 1, 17], [31, 1, 17], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_its_definition(
    device: torch.device,
    shape: tuple[int, int, int],
    contexts: list[int],
    lengths: list[int],
    window: int,
    dtype: torch.dtype,
) -> None:
    case = make_sequences(shape, contexts, lengths, dtype=dtype, device=device)
    check_close(run(case, window), case.expected(window))


@pytest.mark.parametrize(("block_size", "keys"), [(8, 32), (16, 16), (64, 32)])
@pytest.mark.parametrize("dim", [16, pytest.param(128, marks=pytest.mark.slow), 256])
def test_pages_and_heads_of_every_size(device: torch.device, block_size: int, keys: int, dim: int) -> None:
    case = make_sequences((4, 1, dim), [90, 13], [30, 13], block_size=block_size, device=device)
    check_close(run(case, tile=Tile(32, keys, 4, 2)), case.expected())


def test_a_tile_holds_all_query_heads_of_a_kv_head(device: torch.device) -> None:
    """Tiles in float32, which are small, hold them all too; so do tiles of heads whose rows the copy engine doesn't
    take."""
    for architecture, dim, dtype in product((80, 86, 89, 90, 100, 120), (16, 36, 100, 256), (torch.float32, BF16)):
        for group in (1, 7, 32):
            tile = choose_tile(dim, dtype, 64, architecture, group)
            assert tile.rows >= group
            assert not tile.tma or dim * dtype.itemsize % 16 == 0
    case = make_sequences((32, 1, 36), [40, 13], [20, 13], block_size=64, device=device)
    check_close(run(case, tile=choose_tile(36, torch.float32, 64, 90, 32)), case.expected())


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("window", [0, 24])
def test_kv_of_8_bits(device: torch.device, kv_dtype: torch.dtype, window: int) -> None:
    case = make_sequences((4, 2, 64), [75, 20], [40, 20], kv_dtype=kv_dtype, device=device)
    check_close(run(case, window), case.expected(window))


@pytest.mark.parametrize("window", [0, 40])
def test_pages_through_the_copy_engine(device: torch.device, window: int) -> None:
    case = make_sequences((4, 2, 80), [150, 33], [60, 33], block_size=32, device=device)
    check_close(run(case, window, Tile(32, 32, 4, 2, tma=True)), case.expected(window))


def check_no_key_is_lost(
    device: torch.device, dtype: torch.dtype, context: int, length: int, block_size: int, tile: Tile = SMALL
) -> None:
    case = coded_sequences((4, 2, 128), [context], [length], dtype=dtype, device=device, block_size=block_size)
    found = run(case, tile=tile)
    check_counts(found, case.expected())
    case.contexts[0] -= 1
    with pytest.raises(AssertionError):
        check_counts(found, case.expected())


@pytest.mark.parametrize(("block_size", "tma"), [(16, False), (64, True)])
def test_no_key_is_lost_or_read_twice(device: torch.device, block_size: int, tma: bool) -> None:
    check_no_key_is_lost(device, torch.float16, 700, 33, block_size, Tile(32, 32, 4, 2, tma=tma))


@pytest.mark.parametrize("window", [0, 50])
def test_where_a_prompt_is_cut_changes_no_bit(
    device: torch.device, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does other work in the same step: a row's keys are taken in the same blocks and in the same order."""
    # The interpreter's products are NumPy's, which in float32 depend on a row's place in a matrix; tensor cores' don't.
    multiply = np.matmul
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype=np.float32: multiply(a, b, dtype=np.float64).astype(dtype))
    whole = make_sequences((4, 2, 64), [120], [90], device=device)
    expected = run(whole, window)
    for start, end in ((30, 43), (43, 108), (108, 120)):
        part = Sequences(whole.query[start - 30 : end - 30], whole.kv, whole.block_tables, [end], [end - start])
        assert torch.equal(run(part, window), expected[start - 30 : end - 30])
    together = Sequences(
        torch.cat((whole.query[:33], whole.query)),
        whole.kv,
        torch.cat((whole.block_tables, whole.block_tables)),
        [33, 120],
        [33, 90],
    )
    assert torch.equal(run(together, window)[33:], expected)


def test_rows_that_are_not_planned_keep_what_they_hold(device: torch.device) -> None:
    case = make_sequences((2, 1, 32), [20, 30], [20, 30], device=device)
    tiles = torch.from_numpy(plan_tiles(np.array([0, 0]), np.array([20, 30]), 16, rows=[1])).to(device)
    out = torch.full_like(case.query, 7.0)
    flash_prefill(case.query, case.kv, case.block_tables, tiles, SMALL, 0, out)
    assert (out[:20] == 7.0).all()
    check_close(out[20:], case.expected()[20:])


ROWS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=6)


@given(rows=ROWS, tokens=st.integers(1, 128), window=st.integers(0, 200))
def test_tiles_cover_every_token_once_longest_first(rows: list[tuple[int, int]], tokens: int, window: int) -> None:
    starts, lengths = (np.array(column) for column in zip(*rows, strict=True))
    tiles = plan_tiles(starts, lengths, tokens, window)
    firsts = np.cumsum(lengths) - lengths
    covered = np.zeros(lengths.sum(), np.int64)
    keys = []
    for row, first, size, position in tiles.tolist():
        assert 1 <= size <= tokens
        assert firsts[row] <= first
        assert first + size <= firsts[row] + lengths[row]
        assert position - starts[row] == first - firsts[row]
        covered[first : first + size] += 1
        keys.append(position + size - (max(0, position - window + 1) if window else 0))
    assert (covered == 1).all()
    assert keys == sorted(keys, reverse=True)


@given(rows=ROWS, window=st.integers(0, 200))
def test_flops_count_the_pairs_that_are_seen(rows: list[tuple[int, int]], window: int) -> None:
    starts, lengths = zip(*rows, strict=True)
    pairs = sum(
        min(position + 1, window or position + 1) for start, length in rows for position in range(start, start + length)
    )
    assert flops(starts, lengths, 3, 16, window) == 4 * 16 * 3 * pairs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": -1}, "window is -1; allowed: 0"),
        ({"tile": Tile(1, 16, 4, 2)}, "tile.rows is 1; allowed: 2"),
        ({"tile": Tile(32, 32, 4, 2, tma=True)}, "tile.tma with pages of 16 slots"),
        ({"tiles": torch.zeros(1, 4)}, "tiles is torch.float32"),
        ({"tiles": torch.zeros(1, 3, dtype=torch.int32)}, r"tiles is \[1, 3\]; allowed: \[1, 4\]"),
        ({"block_tables": torch.zeros(1, 4)}, "block_tables is torch.float32"),
        (
            {"query": torch.zeros(4, 2, 16, dtype=torch.float16)},
            r"query is \[4, 2, 16\]; allowed: \[T, a multiple of 1, 32\]",
        ),
        ({"query": torch.zeros(4, 2, 32)}, "pool is torch.float16; allowed: torch.float32"),
        ({"query": torch.zeros(32, 2, 4, dtype=torch.float16).permute(2, 1, 0)}, "query has strides"),
        ({"out": torch.zeros(4, 2, 32)}, "out is torch.float32; allowed: torch.float16"),
        ({"kv": PagedKV(torch.zeros(2, 1, 2, 1, 16, 32), 1)}, "layer is 1; allowed: 0 to 0"),
        ({"kv": PagedKV(torch.zeros(2, 1, 2, 1, 16, 32, dtype=torch.int8), 0)}, "scales are missing"),
        ({"kv": PagedKV(torch.zeros(2, 1, 2, 16, 32), 0)}, r"pool is \[2, 1, 2, 16, 32\]"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {
        "query": torch.zeros(4, 2, 32, dtype=torch.float16),
        "kv": PagedKV(torch.zeros(2, 1, 2, 1, 16, 32, dtype=torch.float16), 0),
        "block_tables": torch.zeros(1, 4, dtype=torch.int32),
        "tiles": torch.zeros(1, 4, dtype=torch.int32),
        "tile": SMALL,
        "window": 0,
        "out": torch.zeros(4, 2, 32, dtype=torch.float16),
    }
    with pytest.raises(ValueError, match=message):
        flash_prefill(**(given | change))


@dataclass(frozen=True)
class Launch:
    """A kernel to compile, and the limits that its code must keep."""

    dim: int = 128
    group: int = 4
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    window: int = 0
    stages: int = 3
    """Buffers on sm_90 and later."""
    stack: int = 0
    """Bytes of each thread that may be spilled, at most."""
    architectures: tuple[int, ...] = ARCHITECTURES

    def tile(self, architecture: int) -> Tile:
        page = self.block_size if self.kv_dtype == self.dtype else 0
        return choose_tile(self.dim, self.dtype, page, architecture, self.group)


LAUNCHES = [
    Launch(block_size=64, window=4096),  # by TMA
    Launch(),
    Launch(dim=64, group=8, dtype=torch.float16, kv_dtype=torch.float16),
    Launch(dim=64, group=8, block_size=64),
    Launch(dim=80, group=7),
    Launch(dim=256, group=2, block_size=64),
    Launch(kv_dtype=torch.int8, window=4096, stages=2),
    Launch(kv_dtype=torch.float8_e4m3fn, stages=2, architectures=(89, 90, 100, 120)),
    Launch(dim=36, block_size=64, stack=48),
    Launch(dim=256, kv_dtype=torch.int8, stages=2, stack=64),
    Launch(dtype=torch.float32, kv_dtype=torch.float32, stages=1),
    Launch(group=32, dtype=torch.float32, kv_dtype=torch.float32, stages=1, stack=64),
]
COMPILED = [
    pytest.param(launch, architecture, marks=pytest.mark.slow if launch is not LAUNCHES[0] else ())
    for launch in LAUNCHES
    for architecture in launch.architectures
]


def launch_blank(launch: Launch, architecture: int) -> None:
    shape = (launch.group * 2, 2, launch.dim)
    query, kv, tables = blank(shape, 1, launch.block_size, launch.dtype, launch.kv_dtype)
    tile = launch.tile(architecture)
    flash_prefill(query, kv, tables, torch.zeros(1, 4, dtype=torch.int32), tile, launch.window, torch.zeros_like(query))


@pytest.mark.parametrize(("launch", "architecture"), COMPILED, ids=str)
def test_compiled(compiler: Compiler, launch: Launch, architecture: int) -> None:
    (kernel,) = compiler.compile(architecture, launch_blank, launch, architecture)
    kernel.check_fits(launch.stack)
    tile = launch.tile(architecture)
    assert kernel.warps == tile.warps
    if launch.dtype == torch.float32:
        assert kernel.tensor_cores == "mma"
    else:
        assert tile.rows >= 64
        assert kernel.tensor_cores == {90: "wgmma", 100: "tcgen05"}.get(architecture, "mma")
    # Asynchronous matrix instructions need one buffer more than plain ones.
    assert kernel.stages == (launch.stages if architecture in (90, 100) else min(launch.stages, 2))
    assert ("cp.async.bulk.tensor" in kernel.ptx) == tile.tma
    assert tile.tma == (architecture in (90, 100) and launch.block_size == 64 and launch.dim % 8 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 1000])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_on_a_gpu(gpu: torch.device, dtype: torch.dtype, block_size: int, window: int) -> None:
    query_dtype = dtype if dtype.itemsize == 2 else torch.bfloat16
    case = make_sequences(
        (8, 2, 128), [2500, 700], [900, 700], block_size=block_size, dtype=query_dtype, kv_dtype=dtype, device=gpu
    )
    page = block_size if dtype.itemsize == 2 else 0
    check_close(run(case, window, choose_tile(128, query_dtype, page)), case.expected(window))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_on_a_gpu_no_key_is_lost(gpu: torch.device, block_size: int) -> None:
    check_no_key_is_lost(gpu, torch.bfloat16, 4200, 900, block_size, choose_tile(128, torch.bfloat16, block_size))
