"""The siege runs, and sees what misses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "siege"
sys.path.insert(0, str(SCRIPT.parent))

from siege.witness import Witness, at_most, none_of, quantile  # noqa: E402  # after the path

from nemesis.load import draw  # noqa: E402
from support.faults import oracle  # noqa: E402


@pytest.mark.more
def test_a_row_holds(tmp_path: Path) -> None:
    """The row that a busy machine doesn't make slower than it may be."""
    results = tmp_path / "results.json"
    command = [sys.executable, str(SCRIPT), "deadlines", "--only", "asyncio", "--count", "150", "--seconds", "5"]
    command += ["--json", str(results), "--folder", str(tmp_path / "f")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    assert found["versions"]["kvrelay"]["uvloop"]
    row = found["rows"]["deadlines"]
    assert row["holds"]
    assert len(row["measures"]) > 3


def stream(name: str, **more: Any) -> dict[str, Any]:
    asked = draw(name, Witness({}).sizes)
    tokens = oracle(asked.prompt, asked.count, asked.seed)
    return {"name": name, "tokens": tokens, "error": "", "left": False, **more}


def test_a_wrong_lost_or_doubled_token_is_seen() -> None:
    witness, right = Witness({}), stream("a")
    tokens = right["tokens"]
    assert witness.wrong([right, stream("b", tokens=[], error="refused"), stream("c", left=True)]) == []
    for changed in ([tokens[0] ^ 1, *tokens[1:]], tokens[:-1], [*tokens, tokens[-1]], tokens[1:]):
        assert len(witness.wrong([stream("a", tokens=changed)])) >= 1
        assert changed == tokens[:-1] or len(witness.wrong([stream("a", tokens=changed, error="lost")])) == 1


def test_what_was_not_measured_misses() -> None:
    assert not at_most("gap", quantile([], 0.99), 1.0, "s").ok
    assert not none_of("failed", ["a"]).ok
    assert not Witness({}).measures([])[0].ok
