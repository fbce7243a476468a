"""The benchmark of guesses runs to its end, and compares equal streams."""

import json
import subprocess
import sys
from pathlib import Path

from support.checkpoints import make_checkpoint

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "speculation.py"


def test_a_quick_run_has_all_figures(tmp_path: Path) -> None:
    tiny, out = make_checkpoint(tmp_path / "tiny", "llama", dtype="bfloat16"), tmp_path / "out.json"
    command = [sys.executable, SCRIPT, "--quick", "--model", tiny, "--draft", tiny, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    methods = {"off", "again", "ngram", "suffix", "draft", "always"}
    assert {cell: set(rows) for cell, rows in result["cells"].items()} == dict.fromkeys(
        ("continue", "greedy", "long", "edit", "batch_8", "batch_32"), methods
    )
    # The draft model is the model itself here.
    assert result["cells"]["continue"]["draft"]["accepted"] > 0.5
    for rates in (result["acceptance"]["draft"][name] for name in ("1", "0.8")):
        assert {name: round(rate, 3) for name, rate in rates.items()} == dict.fromkeys(rates, 1.0)
