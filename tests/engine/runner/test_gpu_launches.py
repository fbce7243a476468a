"""A step that is launched again runs none of Triton's Python code, whichever kernels it has."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
LAYERS = 6


@pytest.mark.more
@pytest.mark.timeout(240)  # kernels are compiled where they aren't in Triton's cache
def test_no_launch_of_a_known_step_goes_through_triton(model_of: Callable[..., Path]) -> None:
    folder = model_of("llama", num_hidden_layers=LAYERS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "support.host_launches", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout)
    assert [counts[name]["by_triton"] for name in ("mixed", "pieces", "decode")] == [0, 0, 0]
    # Without graphs, a layer launches three kernels for attention and others; in pieces, its attention only.
    assert counts["mixed"]["launched"] > 5 * LAYERS
    assert 0 < counts["pieces"]["launched"] < 4 * LAYERS
    assert counts["decode"]["launched"] == 0, "the whole step is a graph"
