"""Tiny checkpoints and heads that the tests of the engine share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrelay.kernels.cpu.library import library
from kvrelay.kernels.cpu.program import Team
from support.checkpoints import COMMON, VOCAB_SIZE, make_checkpoint
from support.heads import eagle_config, eagle_tensors, medusa_tensors, write_eagle, write_medusa


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a checkpoint as `make_checkpoint` does, once for equal arguments. Nobody may change its files."""
    made: dict[str, Path] = {}

    def model_of(architecture: str, **options: Any) -> Path:
        key = f"{architecture} {sorted(options.items())}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp("model") / architecture, architecture, **options)
        return made[key]

    return model_of


@pytest.fixture(scope="session")
def heads_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes heads for models with the width and the vocabulary of those of `model_of`; options go to their config."""

    def heads_of(method: str, **options: Any) -> Path:
        folder, sizes = tmp_path_factory.mktemp("heads") / method, (COMMON["hidden_size"], VOCAB_SIZE)
        if method == "medusa":
            return write_medusa(folder, medusa_tensors(3, 1, *sizes), **options)
        tensors = eagle_tensors(*sizes, 200)
        return write_eagle(folder, tensors, eagle_config(tensors, VOCAB_SIZE) | options)

    return heads_of


@pytest.fixture(scope="session")
def team() -> Team:
    """Two threads that run the native kernels."""
    kernels = library()
    if kernels is None:
        pytest.skip("no native kernels here")
    return Team(kernels, 2)


@pytest.fixture(scope="session")
def llama(model_of: Callable[..., Path]) -> Path:
    return model_of("llama")


@pytest.fixture(scope="session")
def one_layer(model_of: Callable[..., Path]) -> Path:
    """A llama of a single layer, for what interprets kernels."""
    return model_of("llama", num_hidden_layers=1)
