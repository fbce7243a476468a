"""A frozen process is told from one that is asleep and answers, and from one that is busy."""

import os
import signal
import subprocess
import sys
import time

from kvrelay.cluster.processes.processes import find
from kvrelay.cluster.processes.silence import HUNG_SECONDS, SILENT_SECONDS, Silence

MARGIN_SECONDS = 1.0
POLL_SECONDS = 0.1


def test_a_frozen_process_is_found_and_a_busy_one_is_not() -> None:
    code = {"answering": "input()", "busy": "while True: pass", "frozen": "while True: pass"}
    started = {
        name: subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE) for name, text in code.items()
    }
    try:
        silences = {name: Silence() for name in started}
        for name, process in started.items():
            silences[name].answered(find(process.pid))
        os.kill(started["frozen"].pid, signal.SIGSTOP)
        begun = time.monotonic()
        found: dict[str, float] = {}
        while (now := time.monotonic()) - begun < SILENT_SECONDS + MARGIN_SECONDS or "frozen" not in found:
            silences["answering"].answered(find(started["answering"].pid))
            for name, silence in silences.items():
                if silence.verdict():
                    found.setdefault(name, now - begun)
            assert now - begun < HUNG_SECONDS / 2
            time.sleep(POLL_SECONDS)
        assert found.keys() == {"frozen"}
        assert found["frozen"] >= SILENT_SECONDS
    finally:
        for process in started.values():
            process.kill()
            process.communicate()
