"""`benchmarks/gpu.py` runs where there is no GPU: every kernel's case at a tiny size, and the engine."""

import itertools
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
    "flash_prefill",
    "kv_gather",
    "kv_scatter",
    "kv_checksum",
    "kv_frame_read",
    "kv_frame_sum",
}
FRAMES = {"frame, in one pass", "frame, copied, then summed", "frame, summed where it lies"}
"""What is predicted of a frame's whole way, beside its kernels."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=560, check=False, env=dict(os.environ))


@pytest.mark.timeout(600)  # a minute of the interpreter on a core of its own
def test_a_dry_run_checks_every_kernel_and_the_engine(tmp_path: Path) -> None:
    done = run("--dry-run", "--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all results are sound" in done.stdout
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["dry_run"]
    assert results["machine"]["gpu"] is None
    sections = results["sections"]
    rows = [row for section in sections.values() for row in section["rows"]]
    assert {row["case"] for row in rows if "case" in row} == KERNELS
    assert all(row["sound"] for row in rows if "sound" in row)
    links = sections["links"]["rows"]
    assert {(row["kind"], row["both_ways"], row["prefill_beside"]) for row in links} == set(
        itertools.product(("bare", "scattered", "neighbours"), (False, True), (False, True))
    )
    assert all(row["sound"] and row["bytes"] > 0 for row in links)
    assert sum("batch" in row for row in sections["engine"]["rows"]) == 4
    assert [name for name, section in sections.items() if not section["complete"]] == ["profile"]
    # Nothing is timed, so nothing is claimed.
    assert not any("share" in row for row in rows if "case" in row)


def test_an_unknown_section_is_refused() -> None:
    done = run("--only", "decode,engines")
    assert done.returncode == 2
    assert "--only has engines; allowed: elementwise, gemv, sample" in done.stderr


def test_predictions_need_no_gpu_and_follow_from_the_data_sheet(tmp_path: Path) -> None:
    done = run("--predict", "h200", "--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    rows = [row for section in sections.values() for row in section["rows"]]
    assert {row["case"] for row in rows} == KERNELS | FRAMES
    assert all(row["predicted_s"] > 0 and (row["bytes"] or row["flops"]) for row in rows)
    decode = next(row for row in rows if row["case"] == "paged_decode" and row["shape"]["context"] == 32768)
    kv = 32768 * 8 * 128 * 2 * 2
    assert kv < decode["bytes"] < 1.01 * kv
    assert decode["predicted_s"] == pytest.approx(3e-6 + decode["bytes"] / 4.32e12)
    # The launch is the engine's: 33 programs for each of 8 KV heads, each with a part of the one row.
    assert decode["shape"]["parts"] == 33
    prefill = next(row for row in rows if row["case"] == "flash_prefill")
    assert prefill["limit"] == "arithmetic"
    assert "paged_decode" in done.stdout
    assert "us (memory)" in done.stdout
    refused = run("--predict", "v100")
    assert refused.returncode == 2
    assert "invalid choice: 'v100'" in refused.stderr
