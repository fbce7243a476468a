"""Each benchmark runs to its end at a tiny size, and its figures are sound."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))

from ratio_simulator import A100_OPT_66B, Phase, Simulation, attained, goodput  # noqa: E402  # after the path

from kvrelay.cluster.scaling.config import ScalingConfig  # noqa: E402
from support.checkpoints import make_checkpoint  # noqa: E402


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=560, check=False, env=dict(os.environ))


def printed(script: str, *arguments: object) -> list[dict[str, Any]]:
    """The objects that a benchmark prints, one a line."""
    done = run(script, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


# GPUs, dry.

KERNELS = {
    *("add_rmsnorm", "silu_mul", "rope_kv_write", "w8_gemv", "w4_gemv", "sample", "paged_decode"),
    *("kv_checksum", "kv_frame_read", "kv_frame_write", "kv_frame_sum"),
}


@pytest.mark.more
@pytest.mark.timeout(600)  # half a minute of the interpreter on a core of its own
def test_a_dry_run_checks_every_kernel_the_engine_and_a_link(tmp_path: Path) -> None:
    done = run("gpu.py", "--dry-run", "--out", tmp_path / "gpu.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all results are sound" in done.stdout
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert (results["dry_run"], results["gpu"]) == (True, None)
    assert {row["case"] for row in results["kernels"]} == KERNELS
    assert [row["case"] for row in results["attention"]] == ["triton", "triton"]
    engine = [row for row in results["engine"] if "transformers" not in row]
    assert [row["weights"] for row in engine] == [16] * 4 + [8] * 4 + [4] * 4
    assert [row.get("prompt", row.get("batch")) for row in engine] == 3 * [16, 40, 1, 2]
    assert all(row["sound"] for name in ("kernels", "attention", "links") for row in results[name])
    # Nothing is timed, so nothing is claimed.
    figures = ("share", "median_s", "ttft_s", "tpot_s", "gb_per_s")
    assert not any(
        name in row for name in ("kernels", "attention", "engine", "links") for row in results[name] for name in figures
    )


@pytest.mark.more
def test_an_unknown_section_is_refused_and_an_environment_without_a_gpu_is_wrong() -> None:
    done = run("gpu.py", "--only", "kernels,engines")
    assert done.returncode == 2
    assert "--only has engines; allowed: environment, kernels, attention, engine, links" in done.stderr
    done = run("gpu.py", "--only", "environment")
    assert ("SOMETHING IS WRONG" in done.stdout) == (done.returncode == 1)
    assert done.returncode == 1 or '"gpus": 0' not in done.stdout


# The engine alone.


@pytest.mark.more
def test_each_cell_has_its_figures(tmp_path: Path) -> None:
    tiny = make_checkpoint(tmp_path / "tiny", "llama", dtype="bfloat16")
    options = ["--quantization", "int8", "--threads", "1", "--cpu", "--cells", "prefill_512,decode_1"]
    load, prefill, decode = printed("offline.py", tiny, *options)
    assert load["load_s"] >= 0
    assert (prefill["cell"], decode["cell"]) == ("prefill_512", "decode_1")
    assert prefill["tokens_per_s"] > 0
    assert decode["tokens_per_s"] > 0
    assert 0 < decode["outside_forward"] < 1


@pytest.mark.more
def test_ranks_are_compared_with_one_process(tmp_path: Path) -> None:
    tiny = make_checkpoint(tmp_path / "tiny", "llama", dtype="bfloat16")
    options = ["--ranks", "2", "--threads", "2", "--cells", "prefill_64,decode_2", "--rounds", "2"]
    *loads, prefill, decode = printed("offline.py", tiny, *options)
    assert len(loads) == 2
    for found, cell in ((prefill, "prefill_64"), (decode, "decode_2")):
        assert found.items() >= {"cell": cell, "degree": 2}.items()
        for rates in (found["one_process"], found["ranks"], found["ratio"]):
            low, middle, high = rates
            assert 0 < low <= middle <= high


def test_an_instruction_set_that_llama_cpp_is_not_compiled_for_is_refused(tmp_path: Path) -> None:
    options = ["--peers", tmp_path, "--engines", "kvrelay,llama_cpp", "--instruction-set", "avx2"]
    done = run("compare.py", tmp_path / "model.gguf", *options)
    assert done.returncode == 2
    assert f"--instruction-set avx2: {tmp_path}/llama_cpp-avx2/llama_cpp/lib is missing" in done.stderr


@pytest.mark.more
def test_a_quick_run_of_guesses_has_all_figures(tmp_path: Path) -> None:
    tiny, out = make_checkpoint(tmp_path / "tiny", "llama", dtype="bfloat16"), tmp_path / "out.json"
    done = run("speculation.py", "--quick", "--model", tiny, "--draft", tiny, "--out", out)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    methods = {"off", "again", "ngram", "suffix", "draft", "always"}
    assert {cell: set(rows) for cell, rows in result["cells"].items()} == dict.fromkeys(
        ("continue", "greedy", "long", "edit", "batch_8", "batch_32"), methods
    )
    # The draft model is the model itself here.
    assert result["cells"]["continue"]["draft"]["accepted"] > 0.5


# The policy of scaling in the simulated cluster: it follows the traffic, and leaves it alone.

CONFIG = ScalingConfig(enabled=True, ttft_target_seconds=2.0, tpot_target_seconds=0.1)
LONG_PROMPTS, LONG_COMPLETIONS = (14.0, 640, 32), (12.0, 32, 128)


@pytest.mark.slow
def test_the_split_follows_traffic_that_flips() -> None:
    parts = [Phase(15.0, *LONG_PROMPTS), Phase(35.0, *LONG_COMPLETIONS), Phase(30.0, *LONG_PROMPTS)]
    run = Simulation(parts, 3, A100_OPT_66B, (4, 4), CONFIG)
    assert attained(run.requests, 0, 15) > 0.95
    assert attained(run.requests, 30, 50) > 0.9, "within 15 s of the flip to long completions"
    assert attained(run.requests, 65, 80) > 0.9, "within 15 s of the flip back"
    assert all(outcome.complete for outcome in run.outcomes), "every request ends"
    decode_heavy = next(split for time, split in run.splits if time >= 45)
    prefill_heavy = next(split for time, split in run.splits if time >= 75)
    assert decode_heavy.decode > 4 >= prefill_heavy.decode
    assert len(run.decisions) <= 5
    static = Simulation(parts, 3, A100_OPT_66B, (4, 4), replace(CONFIG, enabled=False))
    assert not static.decisions
    assert goodput(run.requests, 80) > goodput(static.requests, 80)
