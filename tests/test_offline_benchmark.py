"""The benchmark of the engine alone runs to its end."""

import json
import subprocess
import sys
from pathlib import Path

from support.checkpoints import make_checkpoint

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "offline.py"


def test_each_cell_has_its_figures(tmp_path: Path) -> None:
    tiny = make_checkpoint(tmp_path / "tiny", "llama", dtype="bfloat16")
    options = ["--quantization", "int8", "--threads", "1", "--cpu", "--cells", "prefill_512,decode_1"]
    done = subprocess.run([sys.executable, SCRIPT, tiny, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    load, prefill, decode = map(json.loads, done.stdout.splitlines())
    assert load["load_s"] >= 0
    assert (prefill["cell"], decode["cell"]) == ("prefill_512", "decode_1")
    assert prefill["tokens_per_s"] > 0
    assert decode["tokens_per_s"] > 0
    assert 0 < decode["outside_forward"] < 1
