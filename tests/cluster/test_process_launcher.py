"""A member's process whose record can't be written doesn't run: nobody would find it."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from kvrelay.cluster.fleet.replacement import Plan
from kvrelay.cluster.processes.launcher import MemberProcess, Processes, ProcessLauncher
from kvrelay.cluster.processes.processes import alive, descendants, title
from kvrelay.rpc.security import SecurityConfig


@pytest.mark.parametrize("fault", ["No space left on device", "Is a directory"])
def test_a_process_without_a_record_is_not_left_running(fault: str, tmp_path: Path) -> None:
    if fault == "No space left on device":
        (tmp_path / "prefill-0.pid.new").symlink_to("/dev/full")
    else:  # found when the process runs
        (tmp_path / "prefill-0.pid" / "taken").mkdir(parents=True)
    members = {"prefill-0": MemberProcess("kvrelay.prefill_worker", {"model": "pico"})}
    launcher = ProcessLauncher(tmp_path, Processes(members), SecurityConfig())
    with pytest.raises(OSError, match=fault):
        asyncio.run(launcher.run("prefill-0", Plan("prefill", launcher.config), "127.0.0.1:1"))
    assert [process for process in descendants() if str(tmp_path) in title(process) and alive(process)] == []


def test_the_record_of_a_process_is_found_again(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)\n")

    async def run() -> None:
        launcher = ProcessLauncher(
            tmp_path, Processes({"prefill-0": MemberProcess("endless", {"role": "prefill"})}), SecurityConfig()
        )
        running = asyncio.create_task(launcher.run("prefill-0", Plan("prefill", launcher.config), "127.0.0.1:1"))
        record = tmp_path / "prefill-0.pid"
        async with asyncio.timeout(30.0):
            while not record.exists():  # noqa: ASYNC110  # a thread writes it
                await asyncio.sleep(0.01)
        other = ProcessLauncher(tmp_path, Processes(), SecurityConfig())
        assert await other.adopt("prefill-0")
        assert json.loads(record.read_text())["pid"] > 0
        (tmp_path / "prefill-1.pid").write_text(record.read_text())
        assert not await other.adopt("prefill-1"), "the pid is another member's by now"
        await launcher.kill("prefill-0")
        assert (await running).reason == "killed by SIGKILL"

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
        asyncio.run(run())
