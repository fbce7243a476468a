"""Attention over paged latents by Triton: equals its definition, and compiles for GPUs that this machine lacks."""

from dataclasses import dataclass

import pytest
import torch
from paged_kv import check_close, make_work, planned
from torch import Tensor
from triton_compile import ARCHITECTURES, Compiler

from kvrelay.kernels.kv_codes import LARGEST, SCALE, dequantize, quantize
from kvrelay.kernels.reference import latent_attention
from kvrelay.kernels.triton.decode_work import DecodeParts
from kvrelay.kernels.triton.latent_decode import PagedLatents, bytes_moved, flops, group_of, latent_decode

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
more = pytest.mark.more


def make_pool(blocks: int, size: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Random numbers [block, slot, width], and their scales."""
    numbers = torch.randn(blocks, size, width)
    return quantize(numbers, dtype) if dtype in LARGEST else (numbers.to(dtype), None)


@pytest.mark.parametrize(
    ("heads", "latent", "rotated", "dtype", "kv_dtype", "programs"),
    [
        (16, 128, 32, F16, F16, 4),
        (6, 80, 8, F32, F32, 3),
        (40, 64, 16, F16, torch.int8, 4),
        pytest.param(128, 512, 64, F16, F16, 2, marks=more),
        pytest.param(9, 96, 16, F16, E4M3, 1, marks=more),
        pytest.param(4, 16, 8, F32, torch.int8, 5, marks=more),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [16, pytest.param(64, marks=more)])
def test_equals_its_definition(
    device: torch.device,
    heads: int,
    latent: int,
    rotated: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    programs: int,
    size: int,
) -> None:
    torch.manual_seed(0)
    contexts = [300, 0, 1, 33, 65]
    counts = [-(-context // size) for context in contexts]
    blocks, width = sum(counts) + 1, max(counts) + 1
    tables = torch.zeros(len(contexts), width, dtype=torch.int32)
    order = (torch.randperm(blocks - 1) + 1).to(torch.int32)
    pools = [make_pool(blocks, size, numbers, kv_dtype) for numbers in (latent, rotated)]
    held = [pool.float() if scales is None else dequantize(pool, scales) for pool, scales in pools]
    query = torch.randn(len(contexts), heads, latent + rotated).to(dtype)
    scale = (latent + rotated) ** -0.5
    expected = torch.zeros(len(contexts), heads, latent, dtype=torch.float64)
    for row, (context, own) in enumerate(zip(contexts, order.split(counts), strict=True)):
        tables[row, : len(own)] = own
        if context:
            keys = [numbers[own.long()].flatten(0, 1)[:context].double() for numbers in held]
            expected[row] = latent_attention(query[row : row + 1].double(), keys[0], keys[1], scale)[0]
            for pool, scales in pools:
                filled = pool[int(own[-1])]
                filled[context - (len(own) - 1) * size :] = 127 if scales is not None else torch.nan
    (latents, latent_scales), (turned, turned_scales) = pools
    given = (latents, turned, latent_scales, turned_scales)
    kv = PagedLatents(*(None if tensor is None else tensor.to(device) for tensor in given))
    work, parts = planned(contexts, programs, (heads, heads // group_of(heads), latent), device)
    out = torch.full((len(contexts), heads, latent), torch.nan, dtype=dtype, device=device)
    latent_decode(query.to(device), kv, tables.to(device), work, parts, scale, out)
    assert not parts.arrivals.any(), "the next launch counts from 0"
    check_close(out.cpu(), expected)


def test_heads_of_a_program_divide_all() -> None:
    assert [group_of(heads) for heads in (1, 9, 16, 20, 40, 64, 128)] == [1, 9, 16, 20, 20, 32, 32]


def test_limits() -> None:
    assert bytes_moved([100, 7], 16, 512, 64, 2, 2) == 107 * 1152 + 2 * 16 * 1088 * 2
    assert bytes_moved([10], 1, 512, 64, 2, 1) == 10 * 580 + 1088 * 2
    assert flops([100], 16, 512, 64) == 2 * 1088 * 16 * 100


def test_wrong_arguments_are_named() -> None:
    zeros = torch.zeros
    work, parts = make_work(2, 4), DecodeParts.empty(4, 2, 1, 32, torch.device("cpu"))
    kv = PagedLatents(zeros(3, 16, 32, dtype=F16), zeros(3, 16, 8, dtype=F16))
    good = (
        zeros(2, 2, 40, dtype=F16),
        kv,
        zeros(2, 4, dtype=torch.int32),
        work,
        parts,
        1.0,
        zeros(2, 2, 32, dtype=F16),
    )
    latent_decode(*good)
    for place, value, message in (
        (0, zeros(2, 2, 32, dtype=F16), r"query is \[2, 2, 32\]; allowed: \[2, 2, 40\]"),
        (1, kv._replace(latents=zeros(3, 16, 1024, dtype=F16)), "latents have 1024 numbers; allowed: 16 to 512"),
        (1, kv._replace(latent_scales=zeros(3, 16, dtype=SCALE)), "scales of latents are given"),
        (1, kv._replace(latents=zeros(3, 16, 32, dtype=torch.int8)), "scales of latents are missing"),
        (2, zeros(1, 4, dtype=torch.int32), r"block_tables is \[1, 4\]"),
        (3, make_work(2, 5), r"parts.sums is \[6, 2, 32\]; allowed: \[8, 2, 32\]"),
        (6, zeros(2, 2, 40, dtype=F16), r"out is \[2, 2, 40\]; allowed: \[2, 2, 32\]"),
    ):
        given = [*good]
        given[place] = value
        with pytest.raises(ValueError, match=message):
            latent_decode(*given)


@dataclass(frozen=True)
class Shape:
    """A launch to compile."""

    heads: int = 16
    latent: int = 512
    rotated: int = 64
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    block_size: int = 16
    programs: int = 33
    stack: int = 0
    """Bytes of each thread that may be spilled, at most."""


def launch_shape(shape: Shape) -> None:
    kv = PagedLatents(
        *(torch.zeros(2, shape.block_size, width, dtype=shape.kv_dtype) for width in (shape.latent, shape.rotated)),
        *((torch.zeros(2, shape.block_size, dtype=SCALE),) * 2 if shape.kv_dtype in LARGEST else ()),
    )
    query = torch.zeros(3, shape.heads, shape.latent + shape.rotated, dtype=shape.dtype)
    groups = shape.heads // group_of(shape.heads)
    parts = DecodeParts.empty(shape.programs, shape.heads, groups, shape.latent, query.device)
    work, tables = make_work(3, shape.programs), torch.zeros(3, 17, dtype=torch.int32)
    latent_decode(query, kv, tables, work, parts, 0.1, torch.zeros_like(query[..., : shape.latent]).contiguous())


SHAPES = [
    Shape(),
    Shape(heads=128, block_size=64),
    Shape(kv_dtype=torch.int8),
    Shape(heads=128, kv_dtype=E4M3),
    Shape(heads=20, latent=256, rotated=32, dtype=F16, kv_dtype=F16, programs=1, stack=8),
]


@pytest.mark.parametrize(
    ("shape", "architecture"),
    [
        pytest.param(shape, architecture, marks=more)
        for shape in SHAPES
        for architecture in ARCHITECTURES
        if shape.kv_dtype != E4M3 or architecture >= 89
    ],
    ids=str,
)
def test_compiled(compiler: Compiler, shape: Shape, architecture: int) -> None:
    (kernel,) = compiler.compile(architecture, launch_shape, shape)
    kernel.check_fits(shape.stack)
    kernel.check_overlaps()
    assert kernel.tensor_cores in ("mma", "wgmma", "tcgen05")
