"""Twenty seconds of the nemesis, or two minutes; `make soak` runs an hour. `KVRELAY_SEED` of a failure replays it."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nemesis.run import run
from support.processes import START_SECONDS, STOP_SECONDS, wait_until

COMPLETE = 0.95
"""Share of requests that must complete. A minute has too few of them for the share that an hour has to reach."""
SEED = int(os.environ.get("KVRELAY_SEED", random.randrange(2**31)))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "seconds", [pytest.param(20, marks=pytest.mark.more), pytest.param(120, marks=pytest.mark.slow)]
)
def test_faults_break_no_promise(tmp_path: Path, seconds: int) -> None:
    report = run(tmp_path, seconds, SEED)
    assert report.requests["complete"] > seconds // 2, report.requests
    assert report.summary["faults"] >= seconds // 15
    print(report.summary)
    assert report.broken() == [], f"seed {SEED}"
    assert report.late == [], f"seed {SEED}"
    assert report.summary["complete_share"] >= COMPLETE, f"seed {SEED}: {dict(report.requests)}"


@pytest.mark.more
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_the_cluster_too(tmp_path: Path, number: signal.Signals) -> None:
    """Also where a shell has started the run in the background, with SIGINT ignored."""

    def started() -> list[int]:
        """Process ids of all six members; none before they are there."""
        files = list(tmp_path.glob("*.pid"))
        texts = [text for path in files if (text := path.read_text())]
        return [json.loads(text)["pid"] for text in texts] if len(texts) == 6 else []

    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "nemesis.run", "--seconds", "60", "--folder", str(tmp_path)]
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGINT, ignored)
    pids: list[int] = []
    try:
        pids = wait_until(started, "all members have been started", START_SECONDS)
        process.send_signal(number)
        assert process.wait(STOP_SECONDS) == 128 + number
    finally:
        process.kill()
        process.wait()
        # The members were killed last, and take a moment to end.
        members = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        left = psutil.wait_procs(members, timeout=STOP_SECONDS)[1]
        for member in left:
            member.kill()
    assert left == []
