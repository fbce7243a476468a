"""Attention over latents on the native CPU kernels equals `kernels/reference.py` on scattered blocks."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrelay.engine.kv.layout import KVDtype, KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.kernels import reference
from kvrelay.kernels.cpu.latent import (
    ATTEND,
    PRODUCTS,
    WRITE,
    AttendArgs,
    LatentAttention,
    ProductsArgs,
    Shape,
    WriteArgs,
)
from kvrelay.kernels.cpu.program import Program, Team
from kvrelay.kernels.kv_codes import dequantize

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 2e-2}
LAYERS, LAYER = 2, 1


class Case:
    """Rows of (tokens before, tokens of this step) on blocks in random order; the pools are otherwise full of NaN."""

    def __init__(
        self, heads: int, sizes: tuple[int, int], rows: list[tuple[int, int]], seed: int, dtype: KVDtype, block: int = 8
    ) -> None:
        self.heads, (self.latent, self.rotated), self.rows = heads, sizes, rows
        random = np.random.default_rng(seed)
        self._random = torch.Generator().manual_seed(seed)
        needed = [-(-(start + length) // block) for start, length in rows]
        self.pools = [KVPool(KVLayout(LAYERS, 1, size, block, dtype, planes=1), sum(needed) + 2) for size in sizes]
        for pool in self.pools:
            pool.tensor.fill_(127 if pool.scales is not None else torch.nan)
            if pool.scales is not None:
                pool.scales.fill_(torch.nan)
        order = random.permutation(sum(needed) + 2)
        self.tables = np.zeros((len(rows), max(needed)), np.int64)
        for row, count in enumerate(needed):
            self.tables[row, :count] = order[sum(needed[:row]) : sum(needed[: row + 1])]
        self.starts, self.lengths = (np.array(column) for column in zip(*rows, strict=True))
        self.block, self.scale = block, 0.7 * (self.latent + self.rotated) ** -0.5

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random)

    def given(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Random latents and rotated keys."""
        return self.normal(tokens, self.latent), self.normal(tokens, self.rotated)

    def step(self, team: Team, rows: int) -> tuple[Tensor, Tensor]:
        """Writes what came before, then a step of so many of the rows; its query and results."""
        kernels = LatentAttention(team.library, *(pool.tensor for pool in self.pools), self.heads, team.threads)
        kernels.plan(np.zeros_like(self.starts), self.starts, self.tables)
        if self.starts.any():
            before = self.given(int(self.starts.sum()))
            team.run(Program(team.library, (WRITE, kernels.write(LAYER, LAYER, *before))))
        kernels.plan(self.starts[:rows], self.lengths[:rows], self.tables[:rows])
        tokens = int(self.lengths.sum())
        given, query = self.given(tokens), self.normal(tokens, self.heads, self.latent + self.rotated)
        out = torch.full((tokens, self.heads, self.latent), torch.nan)
        attend = kernels.attend(LAYER, LAYER, query, out, self.scale)
        program = Program(team.library, (WRITE, kernels.write(LAYER, LAYER, *given)), (ATTEND, attend))
        for _ in range(2):
            team.run(program)
        return query, out

    def check(self, team: Team) -> None:
        """Compares the results of a step of all rows."""
        query, out = self.step(team, len(self.rows))
        first = 0
        for row, (start, length) in enumerate(self.rows):
            own = slice(first, first + length)
            first += length
            held = [self._held(pool, row, start + length) for pool in self.pools]
            expected = reference.latent_attention(query[own].double(), *(x.double() for x in held), self.scale)
            bound = TOLERANCE["float32" if self.pools[0].tensor.dtype != torch.bfloat16 else "bfloat16"]
            if team.library.kvrelay_tiles_used():
                bound = 2e-2
            torch.testing.assert_close(out[own].double(), expected, rtol=bound, atol=bound)

    def _held(self, pool: KVPool, row: int, context: int) -> Tensor:
        positions = np.arange(context)
        at = self.tables[row, positions // self.block], LAYER, 0, positions % self.block, 0
        return pool.tensor[at].float() if pool.scales is None else dequantize(pool.tensor[at], pool.scales[at])


ROWS = st.lists(st.tuples(st.integers(0, 600), st.integers(1, 9)), min_size=1, max_size=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@settings(max_examples=12, deadline=None)
@given(
    heads=st.sampled_from([1, 4, 9, 16, 20, 128]),
    sizes=st.sampled_from([(512, 64), (16, 8), (40, 10), (64, 32)]),
    rows=ROWS,
    seed=st.integers(0, 9),
)
@pytest.mark.some(3)
def test_attention(
    team_of: Callable[[int], Team],
    dtype: KVDtype,
    heads: int,
    sizes: tuple[int, int],
    rows: list[tuple[int, int]],
    seed: int,
) -> None:
    Case(heads, sizes, rows, seed, dtype).check(team_of(2))


def test_rows_get_the_same_whatever_else_the_step_has(team_of: Callable[[int], Team]) -> None:
    found = []
    for threads, rows in ((1, 1), (2, 3)):
        _, out = Case(16, (64, 32), [(700, 3), (30, 1), (5, 2)], 0, "bfloat16").step(team_of(threads), rows)
        found.append(out[:3])
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs", "heads", "tokens"), [(128, 512, 16, 5), (16, 24, 3, 1), (33, 100, 2, 9)])
def test_products_of_heads(
    team_of: Callable[[int], Team], dtype: torch.dtype, inputs: int, outputs: int, heads: int, tokens: int
) -> None:
    team = team_of(2)
    case = Case(heads, (16, 8), [(0, 1)] * tokens, 0, "float32")
    kernels = LatentAttention(team.library, *(pool.tensor for pool in case.pools), heads, 2)
    kernels.plan(case.starts, case.lengths, case.tables)
    numbers = case.normal(tokens, heads, inputs + 3)[..., :inputs]
    weight = case.normal(heads, inputs, outputs).to(dtype)
    out = torch.zeros(tokens, heads, outputs + 5)[..., :outputs]
    team.run(Program(team.library, (PRODUCTS, kernels.products(numbers, weight, out))))
    torch.testing.assert_close(out, reference.head_products(numbers, weight), rtol=1e-5, atol=1e-4)


def test_arguments_are_laid_out_as_the_kernels_read_them(kernels: ctypes.CDLL) -> None:
    kernels.kvrelay_latent_args_bytes.restype = ctypes.c_int64
    for index, struct in enumerate((Shape, WriteArgs, ProductsArgs, AttendArgs)):
        assert kernels.kvrelay_latent_args_bytes(index) == ctypes.sizeof(struct), struct
