"""Both backends of attention on CPU equal `kernels/reference.py` for any mixture of rows on scattered blocks."""

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvrelay.engine.attention.base import Attention, AttentionInputs, HeadNorm, Rotation, layers_of
from kvrelay.engine.attention.native import NativeAttention
from kvrelay.engine.attention.torch import TorchAttention
from kvrelay.engine.kv.layout import KVDtype, KVLayout
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import SamplingParams
from kvrelay.kernels import reference
from kvrelay.kernels.cpu.attention import ATTEND, WRITE, PagedAttention
from kvrelay.kernels.cpu.program import Program, Team
from kvrelay.kernels.kv_codes import dequantize, quantize

TOLERANCE = {torch.float32: 6e-6, torch.bfloat16: 3e-2, torch.int8: 3e-2}
LAYERS = 2
"""Layers of the pool: the first without a window, the second with one."""

Rows = list[tuple[int, int]]
"""Tokens that are in the pool already, and tokens of this step."""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    block: int = 8
    window: int = 0


class Step:
    """One step over rows whose blocks are scattered in a pool that is otherwise full of NaN."""

    def __init__(self, shape: Shape, rows: Rows, seed: int, dtype: KVDtype = "float32") -> None:
        self.shape = shape
        self.rows = rows
        layout = KVLayout(
            layers=LAYERS, kv_heads=shape.kv_heads, head_dim=shape.dim, block_size=shape.block, dtype=dtype
        )
        needed = [layout.blocks_for(start + length) for start, length in rows]
        self.pool = KVPool(layout, sum(needed) + 2)
        self.pool.tensor.fill_(127 if layout.scaled else torch.nan)
        if self.pool.scales is not None:
            self.pool.scales.fill_(torch.nan)
        self._random = torch.Generator().manual_seed(seed)
        order = np.random.default_rng(seed).permutation(self.pool.num_blocks)
        self.tables = np.zeros((len(rows), max(needed)), np.int32)
        for row, (start, _) in enumerate(rows):
            self.tables[row, : needed[row]] = order[sum(needed[:row]) : sum(needed[: row + 1])]
            if start:
                positions = np.arange(start)
                places = self.tables[row, positions // shape.block], positions % shape.block
                numbers = self._normal(start, LAYERS, 2, shape.kv_heads, shape.dim)
                if self.pool.scales is not None:
                    numbers, scales = quantize(numbers, self.pool.tensor.dtype)
                    self.pool.scales[places[0], :, :, places[1]] = scales
                self.pool.tensor[places[0], :, :, places[1]] = numbers.to(self.pool.tensor.dtype)
        self.tokens = sum(length for _, length in rows)
        self.qkv = self._normal(self.tokens, shape.heads + 2 * shape.kv_heads, shape.dim)
        angles = self._normal(self.tokens, 1, shape.dim // 2)
        self.rotation = Rotation(angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1))
        self.norm = HeadNorm(self._normal(shape.heads + shape.kv_heads, shape.dim), 1e-5)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random)

    @property
    def inputs(self) -> AttentionInputs:
        count = len(self.rows)
        plan = StepPlan(
            step=0,
            handles=tuple(range(count)),
            tokens=np.zeros(self.tokens, np.int32),
            starts=np.array([start for start, _ in self.rows], np.int32),
            lengths=np.array([length for _, length in self.rows], np.int32),
            block_tables=self.tables,
            sample=np.ones(count, bool),
            sampling=(SamplingParams(),) * count,
            generated=np.zeros(count, np.int32),
        )
        return AttentionInputs.from_plan(plan, self.shape.block)

    @property
    def held(self) -> Tensor:
        """The numbers in the pool."""
        pool = self.pool
        return pool.tensor if pool.scales is None else dequantize(pool.tensor, pool.scales)

    def run(self, attention: Attention, layer: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[T, H, D]."""
        norm = self.norm if layer else None
        out = attention.run(layer, self.qkv.to(dtype, copy=True), self.rotation, norm)
        return out.view(self.tokens, self.shape.heads, self.shape.dim)

    def check(self, attention: Attention, *, tiled: bool = False, scale: float = 1.0) -> None:
        """
        Args:
            tiled: whether the attention multiplies bfloat16 by tiles, which round queries and weights to it, like any
                prefill attention in that type.
            scale: of the scores, relative to those of normally distributed numbers; errors have the same scale.
        """
        shape = self.shape
        bound = TOLERANCE[self.pool.tensor.dtype]
        rotated = shape.heads + shape.kv_heads
        attention.plan(self.inputs)
        for layer in range(LAYERS):
            found = self.run(attention, layer)
            normed = self.qkv[:, :rotated]
            if layer:
                normed = reference.rms_norm(normed, *self.norm)
            turned = reference.rope(normed, *self.rotation)
            first = 0
            for row, (start, length) in enumerate(self.rows):
                here = slice(first, first + length)
                context = start + length
                blocks = self.tables[row, : -(-context // shape.block)].tolist()
                expected = reference.paged_attention(
                    turned[here, : shape.heads], self.held, layer, blocks, context, layer * shape.window
                )
                near = 2e-2 if tiled else 6e-6 * scale
                torch.testing.assert_close(found[here], expected, atol=near, rtol=near)
                positions = np.arange(start, context)
                written = self.held[self.tables[row, positions // shape.block], layer, :, positions % shape.block]
                keys = turned[here, shape.heads :]
                if self.pool.layout.scaled:
                    # Half of the distance of two codes; the scale is rounded up to a bfloat16.
                    half = keys.abs().amax(-1, keepdim=True) / 127 * 0.51 + 1e-5
                    assert bool(((written[:, 0].float() - keys).abs() <= half).all())
                else:
                    torch.testing.assert_close(written[:, 0].float(), keys, atol=bound, rtol=bound)
                values = self.qkv[here, rotated:]
                if self.pool.layout.scaled:
                    values = dequantize(*quantize(values, self.pool.tensor.dtype))
                assert torch.equal(written[:, 1], values.to(written.dtype))
                first += length


def windows(shape: Shape) -> tuple[int, ...]:
    return 0, shape.window


def native(step: Step, kernels: ctypes.CDLL, threads: int = 2) -> NativeAttention:
    return NativeAttention(layers_of([step.pool], windows(step.shape)), step.shape.heads, Team(kernels, threads))


def check_native(step: Step, kernels: ctypes.CDLL, threads: int = 2, scale: float = 1.0) -> None:
    tiled = step.pool.tensor.dtype != torch.float32 and bool(kernels.kvrelay_tiles_used())
    step.check(native(step, kernels, threads), tiled=tiled, scale=scale)


any_step = st.builds(
    Step,
    st.builds(
        lambda group, kv_heads, dim, block, window: Shape(group * kv_heads, kv_heads, dim, block, window),
        st.integers(1, 9),
        st.sampled_from([1, 2, 3, 5]),
        st.sampled_from([2, 10, 16, 24, 40, 64, 80, 96, 128, 192, 256]),
        st.sampled_from([1, 3, 8, 16, 32]),
        st.sampled_from([0, 1, 20, 140, 300]),
    ),
    st.lists(
        st.tuples(st.integers(0, 600), st.sampled_from([1, 1, 2, 3, 7, 17, 65, 130, 200])), min_size=1, max_size=6
    ),
    st.integers(0, 2**16),
    st.sampled_from(["float32", "bfloat16", "int8"]),
)


@settings(max_examples=15, deadline=None)
@given(any_step.filter(lambda step: step.pool.layout.dtype != "bfloat16"))
def test_any_step_in_torch(step: Step) -> None:
    step.check(TorchAttention(layers_of([step.pool], windows(step.shape))))


def check_any(kernels: ctypes.CDLL, step: Step, threads: int) -> None:
    check_native(step, kernels, threads)


any_shape = given(step=any_step, threads=st.integers(1, 4))
test_any_shape_and_mixture_of_rows = settings(max_examples=10, deadline=None)(any_shape(check_any))
test_many_shapes = pytest.mark.more(settings(max_examples=150, deadline=None)(any_shape(check_any)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("softcap", "sinks"), [(5.0, False), (0.0, True), (3.0, True)])
def test_soft_caps_and_sinks(kernels: ctypes.CDLL, dtype: KVDtype, softcap: float, sinks: bool) -> None:
    """Rows of decode, in one part and in several, and of prefill."""
    shape = Shape(6, 2, 40, 8, 150)
    step = Step(shape, [(0, 1), (300, 1), (9, 3), (200, 40)], 3, dtype)
    step.qkv[:, : shape.heads] *= 3
    scores = torch.linspace(-3, 4, shape.heads) if sinks else None
    attention = PagedAttention(kernels, step.pool.tensor, shape.heads, windows(shape), 2)
    attention.plan(*(np.array(column) for column in zip(*step.rows, strict=True)), step.tables)
    width, team = step.qkv[0].numel(), Team(kernels, 2)
    bound = 6e-2 if dtype != "float32" and kernels.kvrelay_tiles_used() else 2e-5
    for layer, window in enumerate(windows(shape)):
        qkv, out = step.qkv.clone(), torch.zeros(step.tokens, shape.heads, shape.dim)
        args = attention.args(
            layer, qkv.data_ptr(), width, out.data_ptr(), out[0].numel(), None, 0.0, softcap=softcap, sinks=scores
        )
        team.run(Program(kernels, (WRITE, args), (ATTEND, args)))
        first = 0
        for (start, length), table in zip(step.rows, step.tables.tolist(), strict=True):
            own, blocks = slice(first, first + length), table[: -(-(start + length) // shape.block)]
            query, first = step.qkv[own, : shape.heads], first + length
            expected = reference.paged_attention(
                query, step.held, layer, blocks, start + length, window, softcap=softcap, sinks=scores
            )
            torch.testing.assert_close(out[own], expected, atol=bound, rtol=bound)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(each, marks=pytest.mark.more) for each in ("float32", "int8"))]
)
def test_a_long_context(kernels: ctypes.CDLL, dtype: KVDtype) -> None:
    step = Step(Shape(9, 3, 64, 16, 3000), [(9000, 1), (7777, 70), (5, 1)], 7, dtype)
    check_native(step, kernels, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("length", [1, 3, 100])
@pytest.mark.some(6)
def test_a_row_does_not_depend_on_its_company_or_on_threads(kernels: ctypes.CDLL, length: int, dtype: KVDtype) -> None:
    """Bit by bit, so that a sequence's tokens don't depend on the other requests."""
    shape = Shape(9, 3, 64, 16, 200)
    rows = [(700, length), (31, 1), (0, 50), (1500, 1), (129, 200)]
    alone = Step(shape, rows[:1], 5, dtype)
    together = Step(shape, rows, 5, dtype)
    blocks = -(-(700 + length) // shape.block)
    together.pool.bytes[together.tables[0, :blocks]] = alone.pool.bytes[alone.tables[0, :blocks]]
    together.qkv[:length] = alone.qkv
    for mine, others in zip(together.rotation, alone.rotation, strict=True):
        mine[:length] = others
    together.norm = alone.norm
    results = []
    for step, threads in ((alone, 1), (alone, 4), (together, 1), (together, 3)):
        attention = native(step, kernels, threads)
        attention.plan(step.inputs)
        results.append([step.run(attention, layer)[:length] for layer in range(LAYERS)])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def decode(step: Step, attention: NativeAttention, layer: int, first: int, count: int) -> Tensor:
    """[count, H * D] of tokens of the step's only row, each a row of its own behind those before it."""
    start = step.rows[0][0]
    starts = np.arange(start + first, start + first + count)
    attention.plan_rows(starts, np.ones(count, np.int64), step.tables.repeat(count, 0))
    rotation = Rotation(*(angles[first : first + count] for angles in step.rotation))
    norm = step.norm if layer else None
    return attention.run(layer, step.qkv[first : first + count].clone(), rotation, norm)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([(4, 2), (3, 3), (6, 1), (9, 3), (10, 2), (7, 1)]),
    st.sampled_from([8, 16, 24, 40, 64, 120, 128]),
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.sampled_from([0, 3, 100, 118, 120, 127, 250, 700]),
    st.integers(2, 17),
    st.sampled_from([0, 1, 20, 140]),
    st.integers(1, 3),
)
def test_guesses_are_computed_as_if_one_by_one(
    kernels: ctypes.CDLL,
    heads: tuple[int, int],
    dim: int,
    dtype: KVDtype,
    start: int,
    count: int,
    window: int,
    threads: int,
) -> None:
    """Bit by bit, and whatever the guesses behind a token are."""
    shape = Shape(*heads, dim, 16, window)
    for layer in range(LAYERS):
        step = Step(shape, [(start, count)], 5, dtype)
        attention = native(step, kernels, threads)
        alone = torch.cat([decode(step, attention, layer, index, 1) for index in range(count)])
        assert torch.equal(decode(step, attention, layer, 0, count), alone)
        step.qkv[-1] = torch.nan
        assert torch.equal(decode(step, attention, layer, 0, count)[:-1], alone[:-1])


def test_activations_of_another_type_are_converted(kernels: ctypes.CDLL) -> None:
    step = Step(Shape(4, 2, 32), [(30, 1), (0, 40)], 3, "bfloat16")
    attention = native(step, kernels)
    attention.plan(step.inputs)
    exact = step.run(attention, 0)
    rounded = step.run(attention, 0, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, atol=4e-2, rtol=4e-2)


def test_scores_that_are_far_apart_or_not_numbers(kernels: ctypes.CDLL) -> None:
    """Weights down to zero are accurate, and a NaN query changes only its own result."""
    step = Step(Shape(3, 1, 64), [(300, 1), (0, 200)], 11)
    step.qkv[:, :3] *= 100
    check_native(step, kernels, scale=100)
    step.qkv[1 + 150, 0] = torch.nan  # a query
    attention = native(step, kernels)
    attention.plan(step.inputs)
    found = step.run(attention, 0)
    nonfinite = found.isnan().flatten(1).any(1).nonzero().flatten().tolist()
    assert nonfinite == [151]
    assert found[151, 0].isnan().all()
    assert found[151, 1:].isfinite().all()


def test_a_step_may_be_planned_again_and_again(kernels: ctypes.CDLL) -> None:
    """The counters of split rows are reset after each step."""
    step = Step(Shape(6, 2, 64, 16, 100), [(1000, 1), (300, 60), (257, 3)], 2)
    attention = native(step, kernels, 3)
    for _ in range(3):
        step.check(attention)


def test_what_the_kernels_cannot_read_is_refused(kernels: ctypes.CDLL) -> None:
    team = Team(kernels, 1)
    for layout in (
        KVLayout(layers=1, kv_heads=1, head_dim=8, block_size=4, dtype="float16"),
        KVLayout(layers=1, kv_heads=1, head_dim=8, block_size=4, dtype="float32", order="HND"),
    ):
        with pytest.raises(ValueError, match=r"allowed|takes"):
            NativeAttention(layers_of([KVPool(layout, 2)], (0,)), 1, team)
