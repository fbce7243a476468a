"""Every kernel test runs on a GPU where there is one, else in Triton's interpreter: the same code and assertions."""

import os
from collections.abc import Iterator

import pytest
import torch

from support.triton_compile import Compiler

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tests put what they hand to kernels."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """A GPU that runs compiled kernels; skips where there is none."""
    if INTERPRETED:
        pytest.skip("needs an NVIDIA GPU: kernels are interpreted here")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    with Compiler() as compiler:
        yield compiler
