"""Processes of one machine: each is found again or doesn't run, descendants are ended, a frozen one is found."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster.fleet.replacement import Plan, ProcessEnd
from kvrelay.cluster.processes import launcher as launcher_module
from kvrelay.cluster.processes.launcher import MemberProcess, Processes, ProcessLauncher
from kvrelay.cluster.processes.processes import alive, descendants, end, find, send, title
from kvrelay.machine.silence import HUNG_SECONDS, SILENT_SECONDS, Silence
from kvrelay.rpc.security import SecurityConfig
from support.router_fakes import until

SECONDS = 10.0
MARGIN_SECONDS = 1.0
POLL_SECONDS = 0.1


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ProcessLauncher]:
    """Makes the launcher of members of these names that run a program."""

    def made(code: str, *names: str) -> ProcessLauncher:
        (tmp_path / "program.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
        members = {name: MemberProcess("program", {"role": "prefill"}) for name in names or ("prefill-0",)}
        return ProcessLauncher(tmp_path, Processes(members), SecurityConfig())

    return made


def run(launcher: ProcessLauncher, name: str = "prefill-0") -> Coroutine[Any, Any, ProcessEnd]:
    return launcher.run(name, Plan("prefill", launcher.config), "127.0.0.1:1")


@pytest.mark.parametrize("fault", ["No space left on device", "Is a directory"])
def test_a_process_without_a_record_is_not_left_running(fault: str, tmp_path: Path) -> None:
    if fault == "No space left on device":
        (tmp_path / "prefill-0.pid.new").symlink_to("/dev/full")
    else:  # found when the process runs
        (tmp_path / "prefill-0.pid" / "taken").mkdir(parents=True)
    members = {"prefill-0": MemberProcess("kvrelay.prefill_worker", {"model": "pico"})}
    launcher = ProcessLauncher(tmp_path, Processes(members), SecurityConfig())
    with pytest.raises(OSError, match=fault):
        asyncio.run(run(launcher))
    assert [process for process in descendants() if str(tmp_path) in title(process) and alive(process)] == []


async def test_the_record_of_a_process_is_found_again(tmp_path: Path, launch: Callable[..., ProcessLauncher]) -> None:
    launcher = launch("import time\ntime.sleep(600)\n")
    running = asyncio.create_task(run(launcher))
    record = tmp_path / "prefill-0.pid"
    await until(record.exists, "its record", 30.0)
    other = ProcessLauncher(tmp_path, Processes(), SecurityConfig())
    assert await other.adopt("prefill-0")
    assert json.loads(record.read_text())["pid"] > 0
    (tmp_path / "prefill-1.pid").write_text(record.read_text())
    assert not await other.adopt("prefill-1"), "the pid is another member's by now"
    await launcher.kill("prefill-0")
    assert (await running).reason == "killed by SIGKILL"


async def test_a_mistake_is_told_though_the_log_was_removed(launch: Callable[..., ProcessLauncher]) -> None:
    code = "import pathlib, sys\npathlib.Path(sys.argv[2]).with_suffix('.log').unlink()\nsys.exit(2)\n"
    ended = await run(launch(code))
    assert ended.mistake
    assert ended.reason.startswith("exit code 2: its log can't be read: ")


async def test_members_that_take_long_to_end_hold_up_no_start(
    tmp_path: Path, launch: Callable[..., ProcessLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\ntime.sleep(60)\n"
    )
    monkeypatch.setattr(launcher_module, "STOP_SECONDS", 0.0)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    launcher = launch(code, "prefill-0", "prefill-1")
    first = asyncio.create_task(run(launcher))
    await until((tmp_path / "prefill-0.pid").exists, "the first one runs", 30.0)
    await until(lambda: "deaf" in (tmp_path / "prefill-0.log").read_text(), "it is deaf", 30.0)
    stopping = asyncio.create_task(launcher.stop("prefill-0", 2.0))
    second = asyncio.create_task(run(launcher, "prefill-1"))
    await until((tmp_path / "prefill-1.pid").exists, "the second one runs", 30.0)
    assert not stopping.done()
    assert (await first).reason == "killed by SIGKILL"
    await stopping
    await launcher.kill("prefill-1")
    await second


TREE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import sys; print('child', flush=True); sys.stdin.read()"])
child.wait()
"""


def test_descendants_are_found_and_can_be_ended() -> None:
    before = set(descendants())
    parent = subprocess.Popen([sys.executable, "-c", TREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "child\n"
        below = [process for process in descendants() if process not in before]
        assert len(below) == 2
        assert below[0] == find(parent.pid)
        assert all(alive(process) for process in below)
        assert end(below, 0.05) == below, "none ends by itself"
        assert end(below, SECONDS) == []
        assert not any(alive(process) for process in below)
    finally:
        parent.kill()
        parent.communicate()


def test_another_process_with_the_pid_is_not_the_same() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = find(child.pid)
    assert process is not None
    assert alive(process)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not alive(process), "nobody has waited for it yet"
    child.communicate()
    assert not alive(process)
    assert find(child.pid) != process
    assert title(process) == ""
    send(signal.SIGKILL, [process])


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
