"""The benchmark of the engine alone runs to its end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoints import make_checkpoint

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "offline.py"


def test_a_share_of_the_read_bandwidth_is_a_share(tmp_path: Path) -> None:
    """The weights are large enough not to stay in the caches of a core, and the threads are more than one."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "tie_word_embeddings": False}
    model = make_checkpoint(tmp_path / "model", "llama", dtype="bfloat16", **shape)
    command = [sys.executable, SCRIPT, model, "--threads", "2", "--cells", "decode_1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    share = json.loads(done.stdout.splitlines()[-1]).get("bandwidth")
    if share is None:
        pytest.skip("the caches of this CPU may hold half of 120 MB of weights")
    assert 0 < share <= 1


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
