"""`benchmarks/gpu.py` runs where there is no GPU: every kernel's case at a tiny size, the engine and a link."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
KERNELS = {
    "add_rmsnorm",
    "silu_mul",
    "rope_kv_write",
    "w8_gemv",
    "w4_gemv",
    "sample",
    "paged_decode",
    "kv_gather",
    "kv_scatter",
    "kv_checksum",
    "kv_frame_read",
    "kv_frame_sum",
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=560, check=False, env=dict(os.environ))


@pytest.mark.more
@pytest.mark.timeout(600)  # half a minute of the interpreter on a core of its own
def test_a_dry_run_checks_every_kernel_the_engine_and_a_link(tmp_path: Path) -> None:
    done = run("--dry-run", "--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all results are sound" in done.stdout
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert (results["dry_run"], results["gpu"]) == (True, None)
    assert {row["case"] for row in results["kernels"]} == KERNELS
    assert [row["case"] for row in results["attention"]] == ["triton", "triton"]
    assert [row.get("prompt", row.get("batch")) for row in results["engine"]] == [16, 40, 1, 2]
    assert all(row["sound"] for name in ("kernels", "attention", "links") for row in results[name])
    # Nothing is timed, so nothing is claimed.
    figures = ("share", "median_s", "ttft_s", "tpot_s", "gb_per_s")
    assert not any(
        name in row for name in ("kernels", "attention", "engine", "links") for row in results[name] for name in figures
    )


@pytest.mark.more
def test_without_a_gpu_the_environment_is_wrong() -> None:
    done = run("--only", "environment")
    assert ("SOMETHING IS WRONG" in done.stdout) == (done.returncode == 1)
    assert done.returncode == 1 or '"gpus": 0' not in done.stdout


def test_an_unknown_section_is_refused() -> None:
    done = run("--only", "kernels,engines")
    assert done.returncode == 2
    assert "--only has engines; allowed: environment, kernels, attention, engine, links" in done.stderr
