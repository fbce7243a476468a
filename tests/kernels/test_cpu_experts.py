"""Native layers of experts equal their definitions: routers, gates, types of weights, odd sizes, several threads."""

import ctypes
import math
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_cpu_linear import ROUNDED, normal, random_codes
from torch import Tensor

from kvrelay.kernels import codes, reference
from kvrelay.kernels.codes import CodedWeight, CodeType
from kvrelay.kernels.cpu.experts import (
    ExpertsCall,
    ExpertsCalls,
    Gate,
    PackedExperts,
    Pairs,
    laid_out,
    route_floats,
    route_step,
)
from kvrelay.kernels.cpu.library import instruction_set
from kvrelay.kernels.cpu.packed import Arena, Epilogue, PackedLinear
from kvrelay.kernels.cpu.program import Program, Team
from kvrelay.kernels.routing import Routing, Scoring

LIMIT, ALPHA = 1.5, 1.702
GATES: dict[Epilogue, Callable[[Tensor], Tensor]] = {
    Epilogue.SILU_MUL: reference.silu_mul,
    Epilogue.GELU_MUL: reference.gelu_mul,
    Epilogue.CLAMPED_GATE: lambda y: reference.clamped_gate(y, LIMIT, ALPHA),
    Epilogue.GELU: reference.gelu,
    Epilogue.RELU_SQUARED: lambda y: y.relu().square(),
}
SCORINGS: dict[Scoring, Literal["softmax", "sigmoid", "softmax of the chosen"]] = {
    Scoring.SOFTMAX: "softmax",
    Scoring.SIGMOID: "sigmoid",
    Scoring.SOFTMAX_CHOSEN: "softmax of the chosen",
}


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 30),
    experts=st.sampled_from([4, 8, 60, 128]),
    top=st.integers(1, 4),
    scoring=st.sampled_from(list(Scoring)),
    biased=st.booleans(),
    normalized=st.booleans(),
    grouping=st.sampled_from([(1, 1, 2), (2, 1, 2), (4, 3, 1)]),
    seed=st.integers(0, 2**16),
)
def test_a_router(
    team_of: Callable[[int], Team],
    rows: int,
    experts: int,
    top: int,
    scoring: Scoring,
    biased: bool,
    normalized: bool,
    grouping: tuple[int, int, int],
    seed: int,
) -> None:
    team, count = team_of(2), ctypes.c_int64(rows)
    groups, top_groups, best = grouping
    best, top = min(best, experts // groups), min(top, experts // groups * top_groups)
    routing = Routing(experts, top, scoring, normalized, 1e-20, 1.5, groups, top_groups, best)
    logits = torch.full((rows, experts + 3), torch.nan)
    logits[:, :experts] = 3 * normal(rows, experts, seed=seed)
    bias = normal(experts, seed=seed + 1) if biased else None
    pairs = Pairs(rows * top, experts, 1, 1, 4 * route_floats(routing, team.threads))
    step = route_step(routing, ctypes.addressof(count), logits, bias, pairs)
    team.run(Program(team.library, step))
    chosen, shares = reference.route(
        logits[:, :experts],
        top,
        scoring=SCORINGS[scoring],
        bias=bias,
        normalized=normalized,
        least=1e-20,
        scale=1.5,
        groups=groups,
        top_groups=top_groups,
        group_best=best,
    )
    assert torch.equal(pairs.chosen.view(rows, top).long(), chosen)
    torch.testing.assert_close(pairs.shares.view(rows, top), shares, rtol=2e-5, atol=1e-6)


Weight = Tensor | CodedWeight
KINDS: dict[str, Callable[[Tensor], Weight]] = {
    "float32": lambda weight: weight,
    "bfloat16": lambda weight: weight.bfloat16(),
    "int8": codes.int8,
    "w8a8": codes.w8a8,
    "int4": lambda weight: codes.int4(weight, 32),
    "fp8": codes.fp8,
    "fp4": lambda weight: random_codes(CodeType.FP4, *weight.shape, 32, zeros=False),
}
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-5, "int8": 1e-3, "w8a8": 3e-2, "int4": 3e-2, "fp8": 1e-5, "fp4": 3e-2}
"""Largest norm of an error relative to that of the result; inputs of int8 products are rounded to 16 bits, of int4, fp4
and w8a8 products to 8 bits, which single numbers of a small result may feel more."""


def layer_of(
    team: Team, kind: str, sizes: tuple[int, int, int], gate: Gate, biased: bool, seed: int
) -> tuple[PackedExperts, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """A layer of random experts, and its definition with the same, dequantized weights."""
    experts, hidden, inner = sizes
    gated = gate.epilogue.is_gated
    outputs = 2 * inner if gated else inner
    found: list[PackedLinear] = []
    products: list[list[Callable[[Tensor], Tensor]]] = []
    for rows, columns, halves in ((outputs, hidden, 2 if gated else 1), (hidden, inner, 1)):
        plain = (normal(experts, rows, columns, seed=seed) / math.sqrt(columns)).flatten(0, 1)
        bias = normal(experts * rows, seed=seed + 1) if biased else None
        coded = KINDS[kind](plain)
        whole = coded.dequantize() if isinstance(coded, CodedWeight) else coded.float()
        offsets = None if bias is None else laid_out(bias, experts, halves=halves)
        found.append(PackedLinear.pack(team, Arena(), laid_out(coded, experts, halves=halves), offsets))
        products.append([
            reference.linear(own, None if bias is None else bias.view(experts, -1)[expert])
            for expert, own in enumerate(whole.unflatten(0, (experts, -1)))
        ])  # fmt: skip
    layer = PackedExperts(team, found[0], found[1], experts, gate)
    function = GATES[gate.epilogue]
    return layer, lambda x, chosen, shares: reference.experts(x, chosen, shares, products[0], function, products[1])


@settings(max_examples=25, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 9), st.sampled_from([40, 150])),
    sizes=st.sampled_from([(4, 64, 32), (8, 72, 48), (5, 100, 20), (3, 33, 7), (16, 576, 96)]),
    top=st.integers(1, 3),
    threads=st.integers(1, 4),
    gate=st.sampled_from(list(GATES)),
    biased=st.booleans(),
    kind=st.sampled_from(list(KINDS)),
    seed=st.integers(0, 2**10),
)
def test_a_layer(
    team_of: Callable[[int], Team],
    rows: int,
    sizes: tuple[int, int, int],
    top: int,
    threads: int,
    gate: Epilogue,
    biased: bool,
    kind: str,
    seed: int,
) -> None:
    """Some pairs name no expert, as those of another rank do. What inputs of 8 bits lose says something of results of
    many numbers only."""
    assume(TOLERANCES[kind] < 1e-2 or sizes[2] > 30)
    team, experts = team_of(threads), sizes[0]
    layer, definition = layer_of(team, kind, sizes, Gate(gate, LIMIT, ALPHA), biased, seed)
    call = ExpertsCall(ExpertsCalls(team), layer)
    generator = torch.Generator().manual_seed(seed)
    for count in (rows, 2 * rows, 1):
        x = normal(count, sizes[1], seed=seed + count)
        chosen = torch.stack([torch.randperm(experts + 1, generator=generator)[:top] for _ in range(count)])
        shares = torch.rand(count, top, generator=generator)
        found, expected = call(x, chosen, shares), definition(x, chosen, shares)
        rounds = kind not in ("float32", "int8") and instruction_set(team.library) in ("amx", "avx512bf16")
        bound = max(TOLERANCES[kind], ROUNDED if rounds else 0.0) * max(1.0, float(expected.norm()))
        assert (found - expected).norm() <= bound


def test_operations_of_torch_in_between(team_of: Callable[[int], Team]) -> None:
    """The operation doesn't get the zeros behind an expert's outputs."""
    team, experts, hidden, inner = team_of(2), 4, 48, 20
    up, down = normal(experts, 2 * inner, hidden) / hidden**0.5, normal(experts, hidden, inner) / inner**0.5
    first, second = (
        PackedLinear.pack(team, Arena(), laid_out(weight.flatten(0, 1), experts), None) for weight in (up, down)
    )
    layer = PackedExperts(team, first, second, experts, Gate(Epilogue.STORE))
    call = ExpertsCall(ExpertsCalls(team), layer, reference.silu_mul, norm=lambda y: 2 * y, outputs=2 * inner)
    x, chosen = normal(7, hidden), torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [0, 1], [1, 3], [3, 0]])
    shares = torch.rand(7, 2)
    products = [[reference.linear(weight, None) for weight in each] for each in (up, down)]
    expected = 2 * reference.experts(x, chosen, shares, products[0], reference.silu_mul, products[1])
    torch.testing.assert_close(call(x, chosen, shares), expected, rtol=1e-5, atol=1e-5)


def test_gates_and_ups_in_turns() -> None:
    weight = torch.arange(12.0)
    found = laid_out(weight, 2, halves=2, interleaved=True).view(2, 2, 16)
    assert found[:, :, :3].tolist() == [[[0, 2, 4], [1, 3, 5]], [[6, 8, 10], [7, 9, 11]]]
    assert not found[:, :, 3:].any()


def test_weights_of_another_number_of_experts_are_refused(team_of: Callable[[int], Team]) -> None:
    team = team_of(1)
    up, down = (PackedLinear.pack(team, Arena(), normal(96, 32), None) for _ in range(2))
    with pytest.raises(ValueError, match="96 and 96 outputs aren't those of 4 experts"):
        PackedExperts(team, up, down, 4, Gate(Epilogue.SILU_MUL))
