"""Coverage-guided fuzzing of each reader of foreign bytes; the targets say what must hold."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
SECONDS = 4
MEMORY_MIB = 2048

pytest.importorskip("atheris", reason="atheris has no wheel for this platform or Python")


@pytest.mark.parametrize(
    "target",
    [
        *(pytest.param(name, marks=pytest.mark.more) for name in ("control", "outline")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("public", "submit", "heartbeat")),
    ],
)
def test_no_bytes_break_a_reader(target: str, tmp_path: Path) -> None:
    limits = [f"-max_total_time={SECONDS}", f"-rss_limit_mb={MEMORY_MIB}", "-max_len=2048"]
    options = [*limits, f"-artifact_prefix={tmp_path}/"]
    # The fuzzer takes the peak of its process for its memory, and a process inherits that of the one that starts it: a
    # shell in between is a small one.
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "guided.targets", target, *options]
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.search(r"cov: [1-9]\d", done.stderr), "nothing is instrumented"
