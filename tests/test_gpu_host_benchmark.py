"""`benchmarks/gpu_host.py`: a step that was launched before goes past Triton's Python, whatever its kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_host.py"


@pytest.mark.timeout(240)  # kernels are compiled where they aren't in Triton's cache
def test_no_launch_of_a_known_step_goes_through_triton() -> None:
    command = [sys.executable, str(SCRIPT), "--repeats", "4", "--only", "mixed,pieces,decode"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [next(iter(row)) for row in rows] == ["mixed", "pieces", "decode", "decode", "decode"]
    mixed, pieces = rows[0]["mixed"], rows[1]["pieces"]
    assert mixed["by_triton"] == pieces["by_triton"] == 0
    # Five times as fast, and more, on a quiet machine.
    assert pieces["us_a_step"]["18"][1] < mixed["us_a_step"]["18"][1]
    assert all(row["us_a_step"][0] > 0 for row in rows[2:])
