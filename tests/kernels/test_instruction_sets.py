"""Products of integers and drawn tokens are the same on each instruction set that kernels are compiled for as on the
best one that the CPU has."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_cpu_linear import normal, random_codes

from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampling.native import NativeSampler
from kvrelay.engine.sampling.sampler import Draw
from kvrelay.kernels.codes import CodeType
from kvrelay.kernels.cpu.library import INSTRUCTION_SETS, cpu_features, library
from kvrelay.kernels.cpu.packed import Arena, PackedLinear
from kvrelay.kernels.cpu.program import Team

BEST = next((each for each in INSTRUCTION_SETS if each.needed <= cpu_features()), None)
OTHERS = [
    # The oldest one differs most from the best.
    pytest.param(each, id=each.name, marks=() if each is INSTRUCTION_SETS[-1] else pytest.mark.more)
    for each in INSTRUCTION_SETS
    if each is not BEST
]
pytestmark = pytest.mark.parametrize("kernels", OTHERS, indirect=True)


@pytest.fixture(scope="module")
def own_team() -> Team:
    kernels = library()
    if kernels is None:
        pytest.skip("no native kernels here")
    return Team(kernels, 1)


@pytest.mark.parametrize(
    ("kind", "round_inputs", "minima"),
    [
        (CodeType.INT8, False, False),
        (CodeType.INT8, True, False),
        (CodeType.INT4, False, False),
        (CodeType.INT4, False, True),
        (CodeType.FP4, False, False),
    ],
)
@pytest.mark.parametrize("rows", [1, 4, 13, 40])
@pytest.mark.parametrize("inputs", [7, 200, 1536])
def test_products(
    team_of: Callable[[int], Team],
    own_team: Team,
    rows: int,
    inputs: int,
    kind: CodeType,
    round_inputs: bool,
    minima: bool,
) -> None:
    """Products of int8 are scaled in floating point at their ends, with rounding of their own."""
    teams, few_bits = (team_of(2), own_team), kind.bits == 4
    if few_bits and rows > 6 and any(team.library.kvrelay_tiles_used() for team in teams):
        pytest.skip("AMX multiplies many rows with weights of 4 bits as bfloat16")
    group, zeros = min(64, inputs) if few_bits else inputs, kind is CodeType.INT4 and not minima
    weight = random_codes(kind, 70, inputs, group, zeros=zeros, minima=minima)
    weight, x = replace(weight, round_inputs=round_inputs), normal(rows, inputs)
    found, expected = (PackedLinear.pack(team, Arena(), weight, None)(x) for team in teams)
    bound = 0.0 if few_bits else 1e-6
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def test_tokens(team_of: Callable[[int], Team], own_team: Team) -> None:
    logits = 3 * normal(4000, 333)
    options = [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.5, "min_p": 0.01}, {"temperature": 0.0}]
    draws = [Draw(SamplingParams(seed=row, **options[row % 5]), row, 0) for row in range(len(logits))]
    assert NativeSampler(team_of(2))(logits.clone(), draws) == NativeSampler(own_team)(logits.clone(), draws)
