"""Every process ends in time after SIGTERM, or when its server has failed, whatever its threads do."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from kvrelay.rpc.serve import EXIT_SECONDS
from support.processes import Process, wait_until

FOR_EVER = 600.0
GRACE = 0.5
STOP = 1.0
SLACK = 20.0
"""Seconds that a busy machine may take longer: far less than FOR_EVER."""
LOADING = 2.0 + SLACK
"""Longest time in seconds from the signal to the end of a server that has not started yet."""


def start(folder: Path, **config: Any) -> Process:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    process = Process("support.stubborn_server", ["--config", str(path)], folder / "log")
    wait_until(lambda: "starting" in process.log.read_text(), "it starts", 30)
    return process


def ended(process: Process, number: signal.Signals | None = signal.SIGTERM) -> tuple[int, float]:
    """Exit status, and seconds since the signal."""
    started = time.monotonic()
    try:
        if number is not None:
            process.popen.send_signal(number)
        return process.popen.wait(60), time.monotonic() - started
    finally:
        process.popen.kill()
        process.popen.communicate()


QUICK, ENDED = (0.0, EXIT_SECONDS + SLACK), (GRACE + STOP, GRACE + STOP + SLACK)
"""Least and most seconds from the signal to the end: of a server that stops by itself, and of one that is ended."""


@pytest.mark.parametrize(
    ("config", "code", "bounds", "said"),
    [
        pytest.param({"drain_seconds": 7.5}, 0, QUICK, "stop with 7.5 s", id="its requests get the configured time"),
        pytest.param({"thread_seconds": FOR_EVER}, 0, QUICK, "stop with 0.5 s", id="a thread never ends"),
        pytest.param({"stop_seconds": FOR_EVER}, 1, ENDED, "did not stop within 1.5 s", id="its stop never ends"),
        pytest.param({"blocked_seconds": FOR_EVER}, 1, ENDED, "did not stop within 1.5 s", id="its stop blocks"),
    ],
)
def test_a_process_ends_in_time(
    tmp_path: Path, config: dict[str, float], code: int, bounds: tuple[float, float], said: str
) -> None:
    process = start(tmp_path, **{"drain_seconds": GRACE, **config})
    process.address()
    found, seconds = ended(process)
    assert found == code
    assert bounds[0] <= seconds < bounds[1]
    assert said in process.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.some(1)
def test_a_process_ends_in_time_while_its_model_loads(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, load_seconds=FOR_EVER)
    code, seconds = ended(process, number)
    assert code == 0
    assert seconds < LOADING
    assert "stop with 0 s" in process.log.read_text()


def test_a_failed_server_ends_in_time_and_says_why(tmp_path: Path) -> None:
    process = start(tmp_path, fails=True, drain_seconds=FOR_EVER, stop_seconds=FOR_EVER, thread_seconds=FOR_EVER)
    code, seconds = ended(process, None)
    assert code == 1
    assert seconds < 0.5 + STOP + EXIT_SECONDS + SLACK
    text = process.log.read_text()
    assert "the engine failed" in text
    assert "stop with 0.5 s" in text


@pytest.mark.more
def test_a_real_worker_ends_in_time_while_its_model_loads(tmp_path: Path) -> None:
    """The server that is run in production; its native kernels and its weights load in threads."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"name": "prefill-0", "role": "prefill", "model": "pico"}))
    slow = {"HASH_LOAD_SECONDS": str(FOR_EVER)}
    process = Process("support.hash_worker", ["--config", str(path)], tmp_path / "log", slow)
    wait_until(lambda: "loading" in process.log.read_text(), "it loads", 60)
    code, seconds = ended(process)
    assert code == 0
    assert seconds < LOADING
