"""Tiny checkpoints that the tests of the engine share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import make_checkpoint


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
