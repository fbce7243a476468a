"""Kernel tests run on a GPU where there is one, else in Triton's interpreter, with the same code and assertions.

`make test` has each property once, and compiles one launch of each kernel of attention for one architecture. The marker
`more` is for other shapes, kernels and architectures. Tests of the native CPU kernels that use `kernels` or
`team_of` run on the best instruction set that the CPU has, with `more` on each.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from triton_compile import Compiler

from kvrelay.kernels.cpu.library import (
    BUILD_SECONDS,
    INSTRUCTION_SETS,
    InstructionSet,
    build,
    cpu_features,
    instruction_set,
    library,
    load,
)
from kvrelay.kernels.cpu.program import Team

HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that holds the arguments of kernels."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """A GPU that runs compiled kernels; skips where there is none."""
    if INTERPRETED:
        pytest.skip("needs an NVIDIA GPU: kernels are interpreted here")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    """A compiler for all tests, so that each launch is compiled once."""
    with Compiler() as compiler:
        yield compiler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives tests of the native kernels the time that a build may take: on a busy machine that is minutes."""
    for item in items:
        if item.path.parent == HERE and "kernels" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(BUILD_SECONDS + 60))


def instruction_sets() -> list[object]:
    """All sets, marked but for the best one that this CPU has."""
    best = next((each for each in INSTRUCTION_SETS if each.needed <= cpu_features()), None)
    marks = [() if each is best else pytest.mark.more for each in INSTRUCTION_SETS]
    return [pytest.param(each, id=each.name, marks=mark) for each, mark in zip(INSTRUCTION_SETS, marks, strict=True)]


@pytest.fixture(scope="module", params=instruction_sets())
def kernels(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The native CPU kernels for each instruction set that this CPU has; those for the others are only compiled."""
    instructions: InstructionSet = request.param
    own = library()
    if own is None:
        pytest.skip("no native kernels here: no compiler, or the CPU lacks AVX2")
    if instruction_set(own) == instructions.name:
        return own
    if missing := instructions.needed - cpu_features():
        build(instructions=instructions)
        pytest.skip(f"compiled, not run: this CPU has no {', '.join(sorted(missing))}")
    if instructions.name == "avx2":
        # As on a CPU that has no more: GCC fuses fewer products and sums when it tunes for one of these.
        instructions = replace(instructions, flags=(*instructions.flags, "-mtune=znver2"))
    return load(instructions)


@pytest.fixture(scope="module")
def team_of(kernels: ctypes.CDLL) -> Callable[[int], Team]:
    """Makes a team of so many threads that run `kernels`, once for each number."""
    return cache(partial(Team, kernels))
