"""The siege runs, and sees what misses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "siege"
sys.path.insert(0, str(SCRIPT.parent))

from siege.up import EXIT_SECONDS, SERVING_SECONDS, Fate  # noqa: E402  # after the path
from siege.witness import Witness, at_most, none_of, quantile  # noqa: E402  # after the path

from nemesis.load import draw  # noqa: E402
from support.faults import oracle  # noqa: E402


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["fuzz", "--only", "uvloop", "--count", "150"], marks=pytest.mark.more),
        pytest.param(["deadlines", "--only", "asyncio", "--count", "150"], marks=pytest.mark.more),
        pytest.param(["keys"], marks=pytest.mark.slow),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_row_holds(tmp_path: Path, arguments: list[str]) -> None:
    """The rows that a busy machine doesn't make slower than they may be."""
    results = tmp_path / "results.json"
    command = [sys.executable, str(SCRIPT), *arguments, "--seconds", "5", "--json", str(results)]
    done = subprocess.run([*command, "--folder", str(tmp_path / "f")], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    assert found["versions"]["kvrelay"]["uvloop"]
    row = found["rows"][arguments[0]]
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


@pytest.mark.parametrize(
    ("outage", "exited", "code", "left", "holds"),
    [
        (SERVING_SECONDS, None, None, 0, True),
        (SERVING_SECONDS + 1, None, None, 0, False),
        (float("inf"), None, None, 0, False),
        (float("inf"), EXIT_SECONDS, 1, 0, True),
        (float("inf"), EXIT_SECONDS, 0, 0, False),
        (float("inf"), EXIT_SECONDS, 1, 1, False),
        (float("inf"), EXIT_SECONDS + 1, 1, 0, False),
    ],
)
def test_a_cluster_serves_again_or_ends_with_an_error(
    outage: float, exited: float | None, code: int | None, left: int, holds: bool
) -> None:
    assert Fate(outage, exited, code, left).holds() == holds
