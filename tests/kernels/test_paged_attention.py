"""Attention over paged KV, of decode rows and of chunks of prompts: equals its definition, and compiles for GPUs that
this machine doesn't have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged_kv import (
    SMALL,
    Sequences,
    blank,
    check_close,
    check_counts,
    coded_sequences,
    decode,
    make_sequences,
    make_work,
    prefill,
)
from torch import Tensor
from triton_compile import ARCHITECTURES, SHARED_LIMITS, Compiler

from kvrelay.kernels.triton.decode_work import DecodeParts
from kvrelay.kernels.triton.flash_prefill import Tile, choose_tile, flash_prefill, flops, plan_tiles
from kvrelay.kernels.triton.paged import PagedKV
from kvrelay.kernels.triton.paged_decode import bytes_moved, paged_decode

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Attend = Callable[[Sequences, int], Tensor]
"""Computes the attention of sequences within a window, 0 for none."""
more = pytest.mark.more


ROWS = [1, 64, 65, 700], [1, 1, 1, 1]
"""Contexts of decode rows, and their new tokens."""
CHUNKS = [33, 70], [33, 9]
"""Contexts of a prompt and of a chunk after an earlier context, and their new tokens."""
ODD_GROUP = [41], [20]
"""For a group of heads that doesn't divide the tile."""


def definitions() -> list[object]:
    """Each kernel once with numbers of 32 and of 16 bits, with a window and without; all combinations are marked."""
    few = [(prefill, (4, 2, 64), CHUNKS, 0, F16), (prefill, (3, 1, 80), ODD_GROUP, 20, F32)]
    few += [(partial(decode, programs=5), (4, 1, 64), ROWS, 0, F16), (decode, (6, 2, 80), ROWS, 100, F32)]
    shapes = [((4, 2, 64), CHUNKS), ((3, 1, 80), ODD_GROUP), ((2, 2, 96), ([65, 1, 17], [31, 1, 17]))]
    many = [(prefill, *shape, window, dtype) for shape, window, dtype in product(shapes, (0, 1, 20, 50), (F32, F16))]
    many += [
        (partial(decode, programs=programs), shape, ROWS, window, dtype)
        for programs, shape, window, dtype in product(
            (1, 2, 5), ((4, 1, 64), (6, 2, 80), (2, 2, 96)), (0, 1, 100), (F32, F16)
        )
    ]
    return [*few, *(pytest.param(*case, marks=more) for case in many)]


def named(value: object) -> str:
    """A test's name is the same in each process, which a function's address isn't."""
    if isinstance(value, partial):
        return f"{value.func.__name__} {value.keywords}"
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("attend", "shape", "tokens", "window", "dtype"), definitions(), ids=named)
def test_equals_its_definition(
    device: torch.device,
    attend: Attend,
    shape: tuple[int, int, int],
    tokens: tuple[list[int], list[int]],
    window: int,
    dtype: torch.dtype,
) -> None:
    case = make_sequences(shape, *tokens, dtype=dtype, device=device)
    check_close(attend(case, window), case.expected(window))


@pytest.mark.parametrize(
    ("heads", "dim", "block_size", "keys"),
    [
        (8, 256, 128, 16),
        (1, 16, 8, 32),
        *(
            pytest.param((4, 20)[number % 2], dim, *page, marks=more)
            for number, (dim, page) in enumerate(product((16, 128, 256), ((8, 32), (16, 16), (64, 32))))
        ),
    ],
)
def test_pages_and_heads_of_every_size(device: torch.device, heads: int, dim: int, block_size: int, keys: int) -> None:
    options = {"block_size": block_size, "device": device}
    case = make_sequences((heads, 1, dim), [130, 17], [1, 1], **options)
    check_close(decode(case), case.expected())
    case = make_sequences((heads, 1, dim), [90, 13], [30, 13], **options)
    check_close(prefill(case, tile=Tile(32, keys, 4, 2)), case.expected())


@pytest.mark.parametrize("kv_dtype", [F16, pytest.param(torch.int8, marks=more)], ids=str)
@pytest.mark.parametrize("window", [70, pytest.param(0, marks=more)])
def test_soft_caps_and_sinks(device: torch.device, kv_dtype: torch.dtype, window: int) -> None:
    for attend, tokens in ((decode, ([300, 33], [1, 1])), (prefill, ([75, 20], [40, 20]))):
        case = make_sequences((6, 2, 64), *tokens, kv_dtype=kv_dtype, device=device)
        case.query *= 4
        case.softcap, case.sinks = 5.0, torch.linspace(-3, 4, 6, device=device)
        check_close(attend(case, window), case.expected(window))


@pytest.mark.parametrize("kv_dtype", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=more)], ids=str)
@pytest.mark.parametrize("window", [pytest.param(0, marks=more), 70])
def test_kv_of_8_bits(device: torch.device, kv_dtype: torch.dtype, window: int) -> None:
    for attend, tokens in ((decode, ([130, 33], [1, 1])), (prefill, ([75, 20], [40, 20]))):
        case = make_sequences((4, 2, 64), *tokens, kv_dtype=kv_dtype, device=device)
        check_close(attend(case, window), case.expected(window))


@pytest.mark.parametrize("window", [pytest.param(0, marks=more), 40])
def test_pages_through_the_copy_engine(device: torch.device, window: int) -> None:
    case = make_sequences((4, 2, 80), [150, 33], [60, 33], block_size=32, device=device)
    check_close(prefill(case, window, Tile(32, 32, 4, 2, tma=True)), case.expected(window))


def test_a_tile_holds_all_query_heads_of_a_kv_head(device: torch.device) -> None:
    """Tiles in float32, which are small, hold them all too; so do tiles of heads whose rows the copy engine doesn't
    take."""
    for architecture, dim, dtype in product((80, 86, 89, 90, 100, 120), (16, 36, 100, 256), (F32, BF16)):
        for group in (1, 7, 32):
            tile = choose_tile(dim, dtype, 64, architecture, group)
            assert tile.rows >= group
            assert not tile.tma or dim * dtype.itemsize % 16 == 0
    case = make_sequences((32, 1, 36), [40, 13], [20, 13], block_size=64, device=device)
    check_close(prefill(case, tile=choose_tile(36, F32, 64, 90, 32)), case.expected())


@pytest.mark.parametrize("programs", [1, 4])
def test_an_unused_row_is_zero_and_changes_no_other(device: torch.device, programs: int) -> None:
    case = make_sequences((2, 1, 32), [900, 600], [1, 1], device=device)
    expected = case.expected()
    case.contexts[0] = 0
    found = decode(case, programs=programs)
    assert not found[0].any()
    check_close(found[1], expected[1])


def test_rows_that_are_not_planned_keep_what_they_hold(device: torch.device) -> None:
    case = make_sequences((2, 1, 32), [20, 30], [20, 30], device=device)
    tiles = torch.from_numpy(plan_tiles(np.array([0, 0]), np.array([20, 30]), 16, rows=[1])).to(device)
    out = torch.full_like(case.query, 7.0)
    flash_prefill(case.query, case.kv, case.block_tables, tiles, SMALL, 0, out)
    assert (out[:20] == 7.0).all()
    check_close(out[20:], case.expected()[20:])


def check_no_key_is_lost(
    attend: Attend, contexts: list[int], lengths: list[int], dtype: torch.dtype, block_size: int, device: torch.device
) -> None:
    case = coded_sequences((4, 2, 128), contexts, lengths, dtype=dtype, device=device, block_size=block_size)
    found = attend(case, 0)
    check_counts(found, case.expected())
    case.contexts[0] -= 1
    with pytest.raises(AssertionError):
        check_counts(found, case.expected())


@more
@pytest.mark.parametrize(
    ("attend", "contexts", "lengths", "block_size"),
    [
        (partial(decode, programs=8), [1500, 77, 640], [1, 1, 1], 16),
        (prefill, [700], [33], 16),
        (partial(prefill, tile=Tile(32, 32, 4, 2, tma=True)), [700], [33], 64),
    ],
    ids=["decode", "prefill", "prefill by the copy engine"],
)
def test_no_key_is_lost_or_read_twice(
    device: torch.device, attend: Attend, contexts: list[int], lengths: list[int], block_size: int
) -> None:
    check_no_key_is_lost(attend, contexts, lengths, F16, block_size, device)


@more
@pytest.mark.parametrize("window", [pytest.param(0, marks=more), 50])
def test_where_a_prompt_is_cut_changes_no_bit(
    device: torch.device, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does other work in the same step: a row's keys are taken in the same blocks and in the same order."""
    # The interpreter's products are NumPy's, which in float32 depend on a row's place in a matrix; tensor cores' don't.
    multiply = np.matmul
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype=np.float32: multiply(a, b, dtype=np.float64).astype(dtype))
    whole = make_sequences((4, 2, 64), [120], [90], device=device)
    expected = prefill(whole, window)
    for start, end in ((30, 43), (43, 108), (108, 120)):
        part = Sequences(whole.query[start - 30 : end - 30], whole.kv, whole.block_tables, [end], [end - start])
        assert torch.equal(prefill(part, window), expected[start - 30 : end - 30])
    query = torch.cat((whole.query[:33], whole.query))
    tables = torch.cat((whole.block_tables, whole.block_tables))
    together = Sequences(query, whole.kv, tables, [33, 120], [33, 90])
    assert torch.equal(prefill(together, window)[33:], expected)


STEPS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=6)
"""Earlier tokens and new ones of each row."""


@given(rows=STEPS, tokens=st.integers(1, 128), window=st.integers(0, 200))
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


@given(rows=STEPS, window=st.integers(0, 200))
def test_flops_count_the_pairs_that_are_seen(rows: list[tuple[int, int]], window: int) -> None:
    starts, lengths = zip(*rows, strict=True)
    pairs = sum(
        min(position + 1, window or position + 1) for start, length in rows for position in range(start, start + length)
    )
    assert flops(starts, lengths, 3, 16, window) == 4 * 16 * 3 * pairs


def test_bytes_are_those_of_the_keys_that_are_seen() -> None:
    kv = 2 * 8 * 128
    assert bytes_moved([100, 7], 32, 8, 128, 2, 2) == 107 * kv * 2 + 2 * 2 * 32 * 128 * 2
    assert bytes_moved([100, 7], 32, 8, 128, 2, 1, window=10) == 17 * (kv + 2 * 8 * 2) + 2 * 2 * 32 * 128 * 2


def zeros(*shape: int, dtype: torch.dtype = F16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.int32)


WORK = make_work(2, 4)
GIVEN = {
    flash_prefill: {
        "query": zeros(4, 2, 32),
        "kv": PagedKV(zeros(2, 1, 2, 1, 16, 32), 0),
        "block_tables": ints(1, 4),
        "tiles": ints(1, 4),
        "tile": SMALL,
        "window": 0,
        "out": zeros(4, 2, 32),
    },
    paged_decode: {
        "query": zeros(2, 2, 32),
        "kv": PagedKV(zeros(2, 1, 2, 1, 16, 32), 0),
        "block_tables": ints(2, 4),
        "work": WORK,
        "parts": DecodeParts.empty(4, 2, 1, 32, torch.device("cpu")),
        "out": zeros(2, 2, 32),
    },
}
"""Arguments that fit."""


@pytest.mark.parametrize(
    ("kernel", "change", "message"),
    [
        (flash_prefill, {"window": -1}, "window is -1; allowed: 0"),
        (flash_prefill, {"softcap": -1.0}, "softcap is -1.0; allowed: 0"),
        (paged_decode, {"sinks": zeros(2)}, "sinks is torch.float16; allowed: torch.float32"),
        (flash_prefill, {"tile": Tile(1, 16, 4, 2)}, "tile.rows is 1; allowed: 2"),
        (flash_prefill, {"tile": Tile(32, 32, 4, 2, tma=True)}, "tile.tma with pages of 16 slots"),
        (flash_prefill, {"tiles": zeros(1, 4)}, "tiles is torch.float16"),
        (flash_prefill, {"tiles": ints(1, 3)}, r"tiles is \[1, 3\]; allowed: \[1, 4\]"),
        (flash_prefill, {"block_tables": zeros(1, 4)}, "block_tables is torch.float16"),
        (flash_prefill, {"query": zeros(4, 2, 16)}, r"query is \[4, 2, 16\]; allowed: \[T, a multiple of 1, 32\]"),
        (flash_prefill, {"query": zeros(4, 2, 32, dtype=F32)}, "pool is torch.float16; allowed: torch.float32"),
        (flash_prefill, {"query": zeros(32, 2, 4).permute(2, 1, 0)}, "query has strides"),
        (flash_prefill, {"out": zeros(4, 2, 32, dtype=F32)}, "out is torch.float32; allowed: torch.float16"),
        (flash_prefill, {"kv": PagedKV(zeros(2, 1, 2, 16, 32), 0)}, r"pool is \[2, 1, 2, 16, 32\]"),
        (paged_decode, {"work": make_work(1, 4)}, r"work.entries is \[4, 6\]; allowed: \[5, 6\]"),
        (paged_decode, {"work": WORK._replace(starts=zeros(5))}, "work.starts is torch.float16; allowed: torch.int32"),
        (paged_decode, {"work": WORK._replace(starts=zeros(1))}, r"work.starts is \[1\]; allowed: \[2\] and longer"),
        (paged_decode, {"work": make_work(2, 5)}, r"parts.sums is \[6, 2, 32\]; allowed: \[8, 2, 32\]"),
        (paged_decode, {"block_tables": ints(1, 4)}, r"block_tables is \[1, 4\]; allowed: \[2, W\]"),
        (paged_decode, {"out": zeros(2, 2, 16)}, r"out is \[2, 2, 16\]; allowed: \[2, 2, 32\]"),
    ],
)
def test_wrong_arguments_are_named(kernel: Callable[..., object], change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernel(**(GIVEN[kernel] | change))


@dataclass(frozen=True)
class Launch:
    """A kernel to compile, and the limits that its code must keep."""

    dim: int = 128
    group: int = 4
    block_size: int = 16
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    window: int = 0
    """Window of prefill attention."""
    programs: int = 33
    """Programs of decode attention."""
    stages: int = 3
    """Buffers: of prefill on sm_90 and sm_100, of decode where a multiprocessor has 163 KiB of shared memory."""
    stack: int = 0
    """Bytes of each thread that may be spilled, at most."""
    softcap: float = 0.0
    sinks: bool = False
    chosen: int = 0
    """The architecture that `make test-all` compiles it for; 0 for none."""
    architectures: tuple[int, ...] = ARCHITECTURES

    def tile(self, architecture: int) -> Tile:
        page = self.block_size if self.kv_dtype == self.dtype else 0
        return choose_tile(self.dim, self.dtype, page, architecture, self.group)

    def scores(self) -> tuple[float, Tensor | None]:
        return self.softcap, torch.zeros(2 * self.group) if self.sinks else None

    def blank(self, rows: int) -> tuple[Tensor, PagedKV, Tensor]:
        shape = (self.group * 2, 2, self.dim)
        return blank(shape, rows, self.block_size, self.dtype, self.kv_dtype)


E4M3 = torch.float8_e4m3fn
WITH_E4M3 = (89, 90, 100, 120)
# The chosen architectures cover each property of the code once. Prefill attention has pages by copy engine and by
# address, each for `wgmma` (90) and `tcgen05` (100), and `mma` with much shared memory (80) and with little (89, 120);
# windows, soft caps and sinks; numbers of 32, 16 and 8 bits; heads that are no power of 2 or no whole 16 bytes; groups
# that don't divide a tile or fill one. Decode attention has the same matrix instruction everywhere: architectures
# differ in memory, registers and the wait for the kernel before (90 and 100). A launch without a chosen one differs
# from another one only in a type or a score that is covered elsewhere.
PREFILLS = [
    Launch(block_size=64, window=4096, chosen=90),  # by TMA
    Launch(chosen=80),
    Launch(dim=64, group=8, dtype=F16, kv_dtype=F16, chosen=90),
    Launch(dim=64, group=8, block_size=64, chosen=100),
    Launch(dim=80, group=7, chosen=100),
    Launch(dim=256, group=2, block_size=64, chosen=90),
    Launch(kv_dtype=torch.int8, window=4096, stages=2, chosen=90),
    Launch(kv_dtype=E4M3, stages=2, chosen=100, architectures=WITH_E4M3),
    Launch(dim=64, group=8, block_size=64, window=128, sinks=True, chosen=90),
    Launch(dim=256, group=2, window=4096, softcap=50.0, stack=16, chosen=90),
    Launch(dim=36, block_size=64, stack=48, chosen=89),
    Launch(dim=256, kv_dtype=torch.int8, stages=2, stack=64, chosen=120),
    Launch(dtype=F32, kv_dtype=F32, stages=1, chosen=100),
    Launch(group=32, dtype=F32, kv_dtype=F32, stages=1, stack=64, chosen=86),
]
DECODES = [
    Launch(chosen=90),
    Launch(block_size=64, programs=1, chosen=100),
    Launch(dim=64, group=8, dtype=F16, kv_dtype=F16, stages=4),
    Launch(dim=80, group=7, chosen=120),
    Launch(dim=256, group=2, stages=2, stack=8),
    Launch(kv_dtype=torch.int8, stages=4, chosen=86),
    Launch(kv_dtype=E4M3, stages=4, chosen=89, architectures=WITH_E4M3),
    Launch(dim=36, stages=4, chosen=120),
    Launch(dim=64, group=8, stages=4, sinks=True, chosen=100),
    Launch(dim=256, group=2, stages=2, stack=8, softcap=50.0, chosen=90),
    Launch(dim=256, kv_dtype=torch.int8, stack=96, chosen=100),
    Launch(dtype=F32, kv_dtype=F32, chosen=90),
    Launch(group=32, dtype=F32, kv_dtype=F32, stack=96, chosen=80),
]


def compiled(launches: list[Launch]) -> pytest.MarkDecorator:
    """Marks a test that compiles these launches: the first one for an H100 in `make test`, each for the architecture
    chosen for it in `make test-all`. All others are `slow`."""
    cases = []
    for number, launch in enumerate(launches):
        for architecture in launch.architectures:
            tier = more if architecture == launch.chosen else pytest.mark.slow
            marks = () if (number, architecture) == (0, 90) else tier
            cases.append(pytest.param(launch, architecture, marks=marks))
    return pytest.mark.parametrize(("launch", "architecture"), cases, ids=str)


def launch_prefill(launch: Launch, architecture: int) -> None:
    query, kv, tables = launch.blank(rows=1)
    tiles, tile = ints(1, 4), launch.tile(architecture)
    flash_prefill(query, kv, tables, tiles, tile, launch.window, torch.zeros_like(query), *launch.scores())


@compiled(PREFILLS)
def test_prefill_compiled(compiler: Compiler, launch: Launch, architecture: int) -> None:
    (kernel,) = compiler.compile(architecture, launch_prefill, launch, architecture)
    kernel.check_fits(launch.stack)
    tile = launch.tile(architecture)
    assert kernel.warps == tile.warps
    if launch.dtype == F32:
        assert kernel.tensor_cores == "mma"
    else:
        assert tile.rows >= 64
        assert kernel.tensor_cores == {90: "wgmma", 100: "tcgen05"}.get(architecture, "mma")
    # Asynchronous matrix instructions need one buffer more than plain ones.
    assert kernel.stages == (launch.stages if architecture in (90, 100) else min(launch.stages, 2))
    assert ("cp.async.bulk.tensor" in kernel.ptx) == tile.tma
    assert tile.tma == (architecture in (90, 100) and launch.block_size == 64 and launch.dim % 8 == 0)


def launch_decode(launch: Launch) -> None:
    query, kv, tables = launch.blank(rows=3)
    parts = DecodeParts.empty(launch.programs, query.shape[1], 2, launch.dim, query.device)
    paged_decode(query, kv, tables, make_work(3, launch.programs), parts, torch.zeros_like(query), *launch.scores())


@compiled(DECODES)
def test_decode_compiled(compiler: Compiler, launch: Launch, architecture: int) -> None:
    (kernel,) = compiler.compile(architecture, launch_decode, launch)
    kernel.check_fits(launch.stack)
    kernel.check_overlaps()
    assert kernel.tensor_cores == "mma"
    if SHARED_LIMITS[architecture] > 2**17:
        assert kernel.stages == launch.stages
    assert kernel.stages >= 2
    # Two programs, which hide each other's waits, fit on a multiprocessor with heads of up to 128 16-bit numbers.
    if architecture in (90, 100) and launch.dim <= 128 and launch.dtype.itemsize == 2:
        assert 2 * kernel.shared <= SHARED_LIMITS[architecture]
    assert 2 * kernel.registers * 32 * kernel.warps <= 65536


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 1000])
@pytest.mark.parametrize("dtype", [BF16, F16, torch.int8, E4M3], ids=str)
def test_on_a_gpu(gpu: torch.device, dtype: torch.dtype, window: int) -> None:
    query_dtype = dtype if dtype.itemsize == 2 else BF16
    options = {"dtype": query_dtype, "kv_dtype": dtype, "device": gpu}
    case = make_sequences((32, 8, 128), [1, 700, 5000, 64], [1] * 4, **options)
    check_close(decode(case, window, 16), case.expected(window))
    for block_size in (16, 64):
        case = make_sequences((8, 2, 128), [2500, 700], [900, 700], block_size=block_size, **options)
        tile = choose_tile(128, query_dtype, block_size if dtype.itemsize == 2 else 0)
        check_close(prefill(case, window, tile), case.expected(window))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_on_a_gpu_no_key_is_lost(gpu: torch.device, block_size: int) -> None:
    tile = choose_tile(128, BF16, block_size)
    check_no_key_is_lost(partial(decode, programs=8), [4200, 64, 3], [1, 1, 1], BF16, block_size, gpu)
    check_no_key_is_lost(partial(prefill, tile=tile), [4200], [900], BF16, block_size, gpu)
