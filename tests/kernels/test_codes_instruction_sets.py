"""Products of integers and drawn tokens are the same on each instruction set that kernels are compiled for."""

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_codes import normal, random_codes

from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampling.native import NativeSampler
from kvrelay.engine.sampling.sampler import Draw
from kvrelay.kernels.codes import CodeType
from kvrelay.kernels.cpu.library import INSTRUCTION_SETS, InstructionSet, cpu_features, library, prebuild
from kvrelay.kernels.cpu.packed import Arena, PackedLinear
from kvrelay.kernels.cpu.program import Team

pytestmark = [pytest.mark.slow, pytest.mark.skipif(library() is None, reason="no native kernels here")]


@pytest.fixture(scope="module", params=INSTRUCTION_SETS, ids=lambda each: each.name)
def team(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Team:
    instructions: InstructionSet = request.param
    if not instructions.needed <= cpu_features():
        pytest.skip(f"this CPU doesn't have {instructions.name}")
    folder: Path = tmp_path_factory.mktemp(instructions.name)
    prebuild(folder, [instructions])
    kernels = ctypes.CDLL(str(next(folder.glob("*.so"))))
    kernels.kvrelay_use_tiles(1)
    return Team(kernels, 2)


@pytest.fixture(scope="module")
def own_team() -> Team:
    kernels = library()
    assert kernels is not None
    return Team(kernels, 1)


@pytest.mark.parametrize("round_inputs", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 13, 40])
@pytest.mark.parametrize("inputs", [7, 200, 1536])
def test_int8_to_the_last_bit(team: Team, own_team: Team, rows: int, inputs: int, round_inputs: bool) -> None:
    weight = replace(random_codes(CodeType.INT8, 70, inputs, inputs, zeros=False), round_inputs=round_inputs)
    x = normal(rows, inputs)
    found, expected = (PackedLinear.pack(each, Arena(), weight, None)(x) for each in (team, own_team))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", CodeType)
@pytest.mark.parametrize("rows", [1, 40])
def test_groups(team: Team, kind: CodeType, rows: int) -> None:
    weight = random_codes(kind, 70, 200, 64, zeros=kind is CodeType.INT4)
    x = normal(rows, 200)
    found = PackedLinear.pack(team, Arena(), weight, None)(x)
    expected = x @ weight.dequantize().T
    assert (found - expected).norm() <= 1e-2 * expected.norm()


def test_tokens(team: Team, own_team: Team) -> None:
    logits = 3 * normal(4000, 333)
    options = [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.5, "min_p": 0.01}, {"temperature": 0.0}]
    draws = [Draw(SamplingParams(seed=row, **options[row % 5]), row, 0) for row in range(len(logits))]
    assert NativeSampler(team)(logits.clone(), draws) == NativeSampler(own_team)(logits.clone(), draws)
