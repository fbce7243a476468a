"""Decode attention: equals its definition however its keys are shared out, and compiles for GPUs that aren't here."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from paged_kv import Sequences, blank, check_close, check_counts, coded_sequences, make_sequences
from torch import Tensor
from triton_compile import ARCHITECTURES, SHARED_LIMITS, Compiler

from kvrelay.kernels.triton.decode_work import DecodeParts, DecodeWork, plan_decode
from kvrelay.kernels.triton.paged import PagedKV
from kvrelay.kernels.triton.paged_decode import bytes_moved, paged_decode


def make_work(rows: int, programs: int) -> DecodeWork:
    return DecodeWork.view(torch.zeros(sum(DecodeWork.sizes(rows, programs)), dtype=torch.int32), rows, programs)


def run(case: Sequences, window: int = 0, programs: int = 4, spare: int = 3) -> Tensor:
    heads, dim = case.query.shape[1:]
    device = case.query.device
    work = make_work(len(case.contexts) + spare, programs)
    plan_decode(np.array(case.contexts), window, work)
    parts = DecodeParts.empty(programs, heads, case.kv.pool.shape[3], dim, device)
    for unwritten in parts[:2]:
        unwritten.fill_(torch.nan)
    out = torch.full_like(case.query, torch.nan)
    work = DecodeWork(*(tensor.to(device) for tensor in work))
    paged_decode(case.query, case.kv, case.block_tables, work, parts, out)
    # The next launch counts from 0.
    assert not parts.arrivals.any()
    return out


def make(shape: tuple[int, int, int], contexts: list[int], device: torch.device, **options: object) -> Sequences:
    return make_sequences(shape, contexts, [1] * len(contexts), device=device, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("window", [0, pytest.param(1, marks=pytest.mark.slow), 100])
@pytest.mark.parametrize("programs", [1, pytest.param(2, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("shape", [(4, 1, 64), (6, 2, 80), pytest.param((2, 2, 96), marks=pytest.mark.slow)], ids=str)
def test_equals_its_definition(
    device: torch.device, shape: tuple[int, int, int], programs: int, window: int, dtype: torch.dtype
) -> None:
    case = make(shape, [1, 64, 65, 700], device, dtype=dtype)
    check_close(run(case, window, programs), case.expected(window))


@pytest.mark.parametrize("block_size", [8, pytest.param(16, marks=pytest.mark.slow), 128])
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), pytest.param(20, 128, marks=pytest.mark.slow), (8, 256)])
def test_pages_and_heads_of_every_size(device: torch.device, block_size: int, heads: int, dim: int) -> None:
    case = make((heads, 1, dim), [130, 17], device, block_size=block_size)
    check_close(run(case), case.expected())


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("window", [0, 70])
def test_kv_of_8_bits(device: torch.device, kv_dtype: torch.dtype, window: int) -> None:
    case = make((4, 2, 64), [130, 33], device, kv_dtype=kv_dtype)
    check_close(run(case, window), case.expected(window))


@pytest.mark.parametrize("programs", [1, 4])
def test_an_unused_row_is_zero_and_changes_no_other(device: torch.device, programs: int) -> None:
    case = make((2, 1, 32), [900, 600], device)
    expected = case.expected()
    case.contexts[0] = 0
    found = run(case, programs=programs)
    assert not found[0].any()
    check_close(found[1], expected[1])


def check_no_key_is_lost(device: torch.device, dtype: torch.dtype, contexts: list[int], block_size: int = 16) -> None:
    case = coded_sequences(
        (4, 2, 128), contexts, [1] * len(contexts), dtype=dtype, device=device, block_size=block_size
    )
    found = run(case, programs=8)
    check_counts(found, case.expected())
    case.contexts[0] -= 1
    with pytest.raises(AssertionError):
        check_counts(found, case.expected())


def test_no_key_is_lost_or_read_twice(device: torch.device) -> None:
    check_no_key_is_lost(device, torch.float16, [1500, 77, 640])


def test_bytes_are_those_of_the_keys_that_are_seen() -> None:
    kv = 2 * 8 * 128
    assert bytes_moved([100, 7], 32, 8, 128, 2, 2) == 107 * kv * 2 + 2 * 2 * 32 * 128 * 2
    assert bytes_moved([100, 7], 32, 8, 128, 2, 1, window=10) == 17 * (kv + 2 * 8 * 2) + 2 * 2 * 32 * 128 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"work": make_work(1, 4)}, r"work.entries is \[4, 6\]; allowed: \[5, 6\]"),
        (
            {"work": make_work(2, 4)._replace(starts=torch.zeros(5))},
            "work.starts is torch.float32; allowed: torch.int32",
        ),
        ({"work": make_work(2, 4)._replace(starts=torch.zeros(1))}, r"work.starts is \[1\]; allowed: \[2\] and longer"),
        ({"work": make_work(2, 5)}, r"parts.sums is \[6, 2, 32\]; allowed: \[8, 2, 32\]"),
        ({"block_tables": torch.zeros(1, 4, dtype=torch.int32)}, r"block_tables is \[1, 4\]; allowed: \[2, W\]"),
        ({"out": torch.zeros(2, 2, 16, dtype=torch.float16)}, r"out is \[2, 2, 16\]; allowed: \[2, 2, 32\]"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {
        "query": torch.zeros(2, 2, 32, dtype=torch.float16),
        "kv": PagedKV(torch.zeros(2, 1, 2, 1, 16, 32, dtype=torch.float16), 0),
        "block_tables": torch.zeros(2, 4, dtype=torch.int32),
        "work": make_work(2, 4),
        "parts": DecodeParts.empty(4, 2, 1, 32, torch.device("cpu")),
        "out": torch.zeros(2, 2, 32, dtype=torch.float16),
    }
    with pytest.raises(ValueError, match=message):
        paged_decode(**(given | change))


@dataclass(frozen=True)
class Launch:
    """A kernel to compile, and the limits that its code must keep."""

    dim: int = 128
    group: int = 4
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    programs: int = 33
    buffers: int = 3
    """Buffers where a multiprocessor has 163 KiB of shared memory or more."""
    stack: int = 0
    """Bytes of each thread that may be spilled, at most."""
    architectures: tuple[int, ...] = ARCHITECTURES


LAUNCHES = [
    Launch(),
    Launch(block_size=64, programs=1),
    Launch(dim=64, group=8, dtype=torch.float16, kv_dtype=torch.float16, buffers=4),
    Launch(dim=80, group=7),
    Launch(dim=256, group=2, buffers=2, stack=8),
    Launch(kv_dtype=torch.int8, buffers=4),
    Launch(kv_dtype=torch.float8_e4m3fn, buffers=4, architectures=(89, 90, 100, 120)),
    Launch(dim=36, buffers=4),
    Launch(dim=256, kv_dtype=torch.int8, stack=96),
    Launch(dtype=torch.float32, kv_dtype=torch.float32),
    Launch(group=32, dtype=torch.float32, kv_dtype=torch.float32, stack=96),
]
COMPILED = [
    pytest.param(launch, architecture, marks=pytest.mark.slow if launch is not LAUNCHES[0] else ())
    for launch in LAUNCHES
    for architecture in launch.architectures
]


def launch_blank(launch: Launch) -> None:
    shape = (launch.group * 2, 2, launch.dim)
    query, kv, tables = blank(shape, 3, launch.block_size, launch.dtype, launch.kv_dtype)
    parts = DecodeParts.empty(launch.programs, shape[0], 2, launch.dim, query.device)
    paged_decode(query, kv, tables, make_work(3, launch.programs), parts, torch.zeros_like(query))


@pytest.mark.parametrize(("launch", "architecture"), COMPILED, ids=str)
def test_compiled(compiler: Compiler, launch: Launch, architecture: int) -> None:
    (decode,) = compiler.compile(architecture, launch_blank, launch)
    decode.check_fits(launch.stack)
    decode.check_overlaps()
    assert decode.tensor_cores == "mma"
    if SHARED_LIMITS[architecture] > 2**17:
        assert decode.stages == launch.buffers
    assert decode.stages >= 2
    # Two programs, which hide each other's waits, fit on a multiprocessor with heads of up to 128 16-bit numbers.
    if architecture in (90, 100) and launch.dim <= 128 and launch.dtype.itemsize == 2:
        assert 2 * decode.shared <= SHARED_LIMITS[architecture]
    assert 2 * decode.registers * 32 * decode.warps <= 65536


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_on_a_gpu(gpu: torch.device, dtype: torch.dtype, window: int) -> None:
    query_dtype = dtype if dtype.itemsize == 2 else torch.bfloat16
    case = make((32, 8, 128), [1, 700, 5000, 64], gpu, dtype=query_dtype, kv_dtype=dtype)
    check_close(run(case, window, 16), case.expected(window))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 128])
def test_on_a_gpu_no_key_is_lost(gpu: torch.device, block_size: int) -> None:
    check_no_key_is_lost(gpu, torch.bfloat16, [4200, 64, 3], block_size)
