"""Kernel tests run on a GPU where there is one, else in Triton's interpreter, with the same code and assertions.

The default run has each property once, and compiles one representative launch of each kernel for every architecture.
The marker `slow` is for more shapes and for all other launches.
"""

import os
from collections.abc import Iterator

import pytest
import torch
from triton_compile import Compiler

from kvrelay.kernels.cpu.library import library

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tests put the arguments of kernels."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """A GPU that runs compiled kernels; skips where there is none."""
    if INTERPRETED:
        pytest.skip("needs an NVIDIA GPU: kernels are interpreted here")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    """One for all tests, so that each launch is compiled once."""
    with Compiler() as compiler:
        yield compiler


@pytest.fixture(scope="module", params=["vectors", "tiles"])
def products(request: pytest.FixtureRequest) -> Iterator[None]:
    """How the native CPU kernels multiply bfloat16: both ways where the CPU has both."""
    kernels = library()
    wanted = request.param == "tiles"
    used = kernels is not None and bool(kernels.kvrelay_use_tiles(int(wanted)))
    try:
        if used != wanted:
            pytest.skip("this CPU, or its kernel, has no AMX")
        yield
    finally:
        if kernels is not None:
            kernels.kvrelay_use_tiles(1)
