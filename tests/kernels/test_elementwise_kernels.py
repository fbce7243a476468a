"""Norm, gate, and the write of rotated KV: equal their definitions, and compile for GPUs that this machine lacks."""

import gc
import os
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_compile import Compiler, each_architecture

from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.kernels import reference
from kvrelay.kernels.kv_codes import SCALE, dequantize
from kvrelay.kernels.ops import Feeds
from kvrelay.kernels.triton.add_rmsnorm import Norms
from kvrelay.kernels.triton.embed import Embed
from kvrelay.kernels.triton.paged import PagedKV
from kvrelay.kernels.triton.rope_kv_write import rope_kv_write
from kvrelay.kernels.triton.silu_mul import SiluMul

more = pytest.mark.more
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# The interpreter truncates when it converts to bfloat16, so only the tests of compilation use that type.
DTYPES = (torch.float32, torch.float16)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    bound = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 130, pytest.param(4096, marks=more)])
@pytest.mark.some(2)
def test_norms(columns: int, dtype: torch.dtype) -> None:
    """The launches differ in rows, eps, and where rows begin; most repeat one before. Rows may lie apart."""
    norms = Norms()
    for rows, offset, apart, eps in (
        (0, 0, 0, 1e-5),
        (7, 0, 0, 1e-5),
        (7, 0, 0, 1e-5),
        (2, 0, 0, 1e-5),
        (2, 1, 0, 1e-5),
        (2, 0, 0, 2e-3),
        (5, 0, 3, 1e-5),
        (3, 0, 3, 1e-5),
    ):
        x = normal(rows * (columns + apart) + offset, dtype=dtype, seed=rows)[offset:]
        x = x.view(rows, columns + apart)[:, :columns]
        weight, residual = normal(columns, dtype=dtype, seed=1), normal(rows, columns, dtype=dtype, seed=2)
        close(norms.rms_norm(x, weight, eps), reference.rms_norm(x, weight, eps))
        expected, total = reference.add_rms_norm(x.clone(), residual.clone(), weight, eps)
        found, kept = norms.add_rms_norm(x, residual, weight, eps)
        close(found, expected)
        assert torch.equal(kept, total)
        close(norms.rms_norm(x, weight.float(), eps), reference.rms_norm(x, weight, eps))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [112, 1500, *(pytest.param(inner, marks=more) for inner in (1, 2048))])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.some(3)
def test_gate(inner: int, dtype: torch.dtype, gelu: bool) -> None:
    """Repeated launches are among these, and keep nothing alive."""
    gate, expected = SiluMul(gelu), reference.gelu_mul if gelu else reference.silu_mul
    for rows in (3, 3, 5, 0, 1):
        x = normal(rows, 2 * inner, dtype=dtype) * (2 if gelu else 4)
        out = gate(x)
        close(out, expected(x))
    gone = weakref.ref(x), weakref.ref(out)
    del x, out
    gc.collect()
    assert [each() for each in gone] == [None, None]


def embed_inputs(tokens: int, columns: int, half_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    angles = 10000.0 ** -(torch.arange(half_dim, device=DEVICE) / half_dim)
    return {
        "tokens": torch.arange(tokens, device=DEVICE) * 7 % 11,
        "positions": torch.arange(tokens, device=DEVICE) * 3777,
        "table": normal(11, columns, dtype=dtype),
        "rotary": torch.stack((angles, normal(half_dim))).expand(2, -1, -1) * torch.tensor([1.0, 0.5])[:, None, None],
        "scale": 3.0,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "half_dim"), [(64, 8), (2500, 40)])
@pytest.mark.some(2)
def test_embed(columns: int, half_dim: int, dtype: torch.dtype) -> None:
    """Tokens of the step, tokens that the step before has sampled, and one that it couldn't sample; repeated launches,
    too."""
    whole, embed = embed_inputs(5, columns, half_dim, dtype), Embed()
    rows, sampled = torch.tensor([-1, 2, 0, -1, 1], device=DEVICE), torch.tensor([4, -1, 9], device=DEVICE)
    for tokens in (5, 0, 1, 4):
        given = whole | {name: whole[name][:tokens] for name in ("tokens", "positions")}
        for fed in (None, Feeds(rows[:tokens], sampled)):
            for found, expected in zip(embed(feeds=fed, **given), reference.embed(feeds=fed, **given), strict=True):
                assert found.shape == expected.shape
                close(found, expected)
    with pytest.raises(ValueError, match=r"positions is \[2\]; allowed: \[4\]"):
        embed(feeds=None, **given | {"positions": given["positions"][:2]})


BLOCK = 8


class Rope:
    """Inputs of `rope_kv_write`, and what must come of them."""

    def __init__(self, tokens: int, heads: tuple[int, int], dim: int, norm: bool, dtype: torch.dtype) -> None:
        self.heads, self.kv_heads = heads
        self.qkv = normal(tokens, self.heads + 2 * self.kv_heads, dim, dtype=dtype)
        angles = normal(tokens, 1, dim // 2) * 3
        self.rotation = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
        self.norm = (normal(self.heads + self.kv_heads, dim, dtype=dtype), 1e-6) if norm else None
        self.blocks = tokens // BLOCK + 2
        slots = torch.randperm(self.blocks * BLOCK, generator=torch.Generator().manual_seed(tokens))[:tokens]
        slots[1::5] = -1
        self.slots = slots.to(DEVICE)
        turned = self.qkv[:, : self.heads + self.kv_heads]
        if self.norm is not None:
            turned = reference.rms_norm(turned, *self.norm)
        turned = reference.rope(turned, *self.rotation)
        self.query = turned[:, : self.heads]
        self.kv = torch.stack((turned[:, self.heads :], self.qkv[:, self.heads + self.kv_heads :]), 1)

    def pool(self, dtype: torch.dtype) -> Tensor:
        return torch.ones(self.blocks, 3, 2, self.kv_heads, BLOCK, self.qkv.shape[2], device=DEVICE).to(dtype)

    def written(self, pool: Tensor, layer: int) -> Tensor:
        """[T, k|v, Hkv, ...] at the slots that are kept."""
        slots = self.slots[self.slots >= 0]
        return pool[slots // BLOCK, layer][torch.arange(len(slots), device=DEVICE), :, :, slots % BLOCK]

    @property
    def kept(self) -> Tensor:
        return self.kv[self.slots >= 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "dim", "heads", "norm"),
    [
        (7, 24, (4, 2), True),
        (1, 16, (6, 1), False),
        *(pytest.param(7, 24, heads, norm, marks=more) for heads in ((3, 3), (32, 8)) for norm in (False, True)),
        pytest.param(3, 128, (4, 2), True, marks=more),
    ],
)
def test_rope_and_kv_write(tokens: int, dim: int, heads: tuple[int, int], norm: bool, dtype: torch.dtype) -> None:
    case = Rope(tokens, heads, dim, norm, dtype)
    pool = case.pool(dtype)
    close(rope_kv_write(case.qkv, case.rotation, case.slots, PagedKV(pool, 1), case.norm), case.query)
    close(case.written(pool, 1), case.kept)
    # Nothing else was touched: the other layers, and every slot that no token was given.
    touched = torch.zeros_like(pool, dtype=torch.bool)
    slots = case.slots[case.slots >= 0]
    touched[slots // BLOCK, 1, :, :, slots % BLOCK] = True
    assert (pool[~touched] == 1).all()


@pytest.mark.parametrize(("kind", "share"), [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 1 / 16)], ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_kv_of_8_bits(kind: torch.dtype, share: float, norm: bool) -> None:
    """Each head's numbers come back within half a step of its type."""
    if kind is torch.float8_e4m3fn and DEVICE == "cpu":
        pytest.skip("needs a GPU: the interpreter converts 127.5 to a float8 of 64")
    case = Rope(9, (4, 2), 24, norm, torch.float32)
    case.qkv[2, -1] = 0.0
    case.kv[2, 1, -1] = 0.0
    layout = KVLayout(3, case.kv_heads, 24, BLOCK, "int8" if kind == torch.int8 else "fp8", "HND")
    held = KVPool(layout, case.blocks, DEVICE)
    pool, scales = held.tensor, held.scales
    scales.fill_(torch.nan)
    close(rope_kv_write(case.qkv, case.rotation, case.slots, PagedKV(pool, 2, scales), case.norm), case.query)
    found = dequantize(case.written(pool, 2), case.written(scales, 2))
    bound = case.kept.abs().amax(-1, keepdim=True) * share * 1.01
    assert ((found - case.kept).abs() <= bound).all()
    assert scales[:, :2].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: {"kv": PagedKV(case.pool(torch.float16), 0)}, "pool is torch.float16; allowed: torch.float32"),
        (lambda case: {"kv": PagedKV(case.pool(torch.float32), 3)}, "layer is 3; allowed: 0 to 2"),
        (lambda case: {"kv": PagedKV(case.pool(torch.int8), 0)}, "scales are missing for a pool of torch.int8"),
        (lambda case: {"slots": case.slots.int()}, "slots is torch.int32; allowed: torch.int64"),
        (lambda case: {"slots": case.slots[:-1]}, r"slots is \[4\]; allowed: \[5\]"),
        (lambda case: {"rotation": (case.rotation[0].half(), case.rotation[1])}, "cos is torch.float16"),
        (lambda case: {"qkv": case.qkv[:, :4]}, "qkv is .*; allowed: "),
        (lambda case: {"norm": (normal(3, 16), 1e-5)}, r"norm weight is \[3, 16\]; allowed: \[6, 16\]"),
    ],
)
def test_what_does_not_fit_is_refused(change: object, message: str) -> None:
    case = Rope(5, (4, 2), 16, False, torch.float32)
    given = {"qkv": case.qkv, "rotation": case.rotation, "slots": case.slots, "norm": None}
    given |= {"kv": PagedKV(case.pool(torch.float32), 0)} | change(case)
    with pytest.raises(ValueError, match=message):
        rope_kv_write(**given)


def test_norm_gate_and_embedding_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"weight is \[5\]; allowed: \[4\]"):
        Norms().rms_norm(normal(2, 4), normal(5), 1e-5)
    with pytest.raises(ValueError, match=r"residual is torch\.float16; allowed: torch\.float32"):
        Norms().add_rms_norm(normal(2, 4), normal(2, 4).half(), normal(4), 1e-5)
    with pytest.raises(ValueError, match=r"x is .*unit stride"):
        Norms().rms_norm(normal(4, 2).T, normal(4), 1e-5)
    with pytest.raises(ValueError, match=r"gate_up is"):
        SiluMul()(normal(2, 3))
    given = embed_inputs(2, 8, 4, torch.float32)
    with pytest.raises(ValueError, match=r"feeds.rows is torch.int32; allowed: torch.int64"):
        Embed()(feeds=Feeds(given["tokens"].int(), given["tokens"]), **given)
    with pytest.raises(ValueError, match=r"tokens, table and rotary are "):
        Embed()(feeds=None, **given | {"table": given["table"][0]})


def launch_norms(columns: int) -> None:
    x = torch.zeros(4, columns, dtype=torch.bfloat16)
    Norms().rms_norm(x, x[0], 1e-5)
    Norms().add_rms_norm(x, x.clone(), x[0], 1e-5)


def launch_embed() -> None:
    longs, table = torch.zeros(4, dtype=torch.int64), torch.zeros(16, 4096, dtype=torch.bfloat16)
    Embed()(longs, Feeds(longs, longs), longs, table, torch.zeros(1, 2, 64))


def launch_gate(gelu: bool) -> None:
    SiluMul(gelu)(torch.zeros(4, 2 * 14336, dtype=torch.bfloat16))


def launch_rope(dim: int, norm: bool, kv: torch.dtype) -> None:
    pool = torch.zeros(2, 1, 2, 8, 16, dim).to(kv)
    scales = torch.zeros(2, 1, 2, 8, 16, dtype=SCALE) if kv.itemsize == 1 else None
    weights = (torch.zeros(40, dim, dtype=torch.bfloat16), 1e-5) if norm else None
    angles = torch.zeros(4, 1, dim)
    qkv = torch.zeros(4, 48, dim, dtype=torch.bfloat16)
    rope_kv_write(qkv, (angles, angles), torch.zeros(4, dtype=torch.int64), PagedKV(pool, 0, scales), weights)


LAUNCHES = [
    (launch_norms, 4096),
    (launch_norms, 16384),
    (launch_embed,),
    (launch_gate, False),
    (launch_gate, True),
    (launch_rope, 64, True, torch.bfloat16),
    (launch_rope, 128, False, torch.bfloat16),
    (launch_rope, 128, True, torch.int8),
]


@each_architecture
def test_compiled(compiler: Compiler, architecture: int) -> None:
    """The kernels spill nothing, and their programs are so small that a multiprocessor runs as many as it can."""
    launches = [*LAUNCHES]
    if architecture >= 90:
        launches.append((launch_rope, 128, False, torch.float8_e4m3fn))
    for launched in [compiler.start(architecture, *launch) for launch in launches]:
        for kernel in launched.result():
            kernel.check_fits()
            # Copies of a step's inputs come before the embedding.
            if kernel.name != "embed_kernel":
                kernel.check_overlaps()
            assert kernel.registers <= 64
            assert kernel.shared <= 1024
            # 16-byte accesses to 16-bit tensors, wherever a thread has as much in a row.
            assert "ld.global.v4.b32" in kernel.ptx or "rope" in kernel.name
