"""Runs members as plain processes of this machine, `python -m MODULE --config FOLDER/NAME.json`.

They outlive the supervisor. A restarted one finds each by its pid and start time in NAME.pid. If the supervisor was
killed between the start of a process and its record, the replacement fences that process, which then ends by itself.
"""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvrelay.cluster import processes
from kvrelay.cluster.processes import Process
from kvrelay.cluster.replacement import Ended
from kvrelay.engine.config import require
from kvrelay.rpc.security import SecurityConfig
from kvrelay.rpc.serve import EXIT_SECONDS, STOP_SECONDS, USAGE_CODE

logger = logging.getLogger(__name__)

BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class MemberProcess:
    """What one member's process is started with."""

    module: str
    """Python module to run: `kvrelay.prefill_worker`, `kvrelay.decode_worker`, `kvrelay.worker` or `kvrelay.router`."""

    options: dict[str, Any] = field(default_factory=dict)
    """Its options, but `name` and `supervisor`, which are set here. `security` is the supervisor's by default."""

    def __post_init__(self) -> None:
        require(self.module != "", "module", self.module, "a Python module")


class ProcessLauncher:
    """The supervisor's Launcher of plain processes."""

    def __init__(self, folder: Path, members: dict[str, MemberProcess], security: SecurityConfig) -> None:
        """`security`: of members that have none of their own."""
        self._security = asdict(security)
        self.names = tuple(members)
        self._folder = folder
        self._members = members
        self._running: dict[str, Process] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping: set[str] = set()

    async def adopt(self, name: str) -> bool:
        """Finds the process that NAME.pid names, if it still runs."""
        process = self._recorded(name)
        if process is None or not process.alive:
            return False
        self._running[name] = process
        return True

    async def run(self, name: str, supervisor: str) -> Ended:
        """Returns when the member's process has ended; starts one first, unless one was just adopted."""
        process = self._running.get(name)
        if process is None or not process.alive:
            process = self._running[name] = await asyncio.to_thread(self._start, name, supervisor)
            if name in self._stopping:
                _signal(process, signal.SIGKILL)  # asked to end before it was there
        await _end_of(process)
        return self._ended(name)

    async def stop(self, name: str, grace: float) -> None:
        """SIGTERM, then SIGKILL if it doesn't end in time."""
        self._stopping.add(name)
        process = self._running.get(name)
        if process is not None:
            _signal(process, signal.SIGTERM)
            for killed in await asyncio.to_thread(processes.end, [process], grace + STOP_SECONDS + EXIT_SECONDS):
                logger.error("did not end in time and was killed", extra={"member": name, "pid": killed.pid})
            self._reap(name)

    async def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self._running.get(name)
        if process is not None:
            _signal(process, signal.SIGKILL)

    def _start(self, name: str, supervisor: str) -> Process:
        member = self._members[name]
        options, log = self._folder / f"{name}.json", self._folder / f"{name}.log"
        given = {"security": self._security, **member.options, "name": name, "supervisor": supervisor}
        options.write_text(json.dumps(given, indent=2))
        with log.open("ab") as output:
            child = self._children[name] = subprocess.Popen(
                [sys.executable, "-m", member.module, "--config", str(options)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a signal to the supervisor's group is not theirs
            )
        process = processes.find(child.pid)
        if process is None:
            raise RuntimeError(f"pid {child.pid} was reaped by somebody else")
        fresh = self._folder / f"{name}.pid.new"
        fresh.write_text(json.dumps({"pid": process.pid, "started": process.started, "boot": _boot()}))
        fresh.replace(self._folder / f"{name}.pid")
        return process

    def _recorded(self, name: str) -> Process | None:
        """The process in NAME.pid; None if there is none, or if the machine has restarted since."""
        try:
            entry = json.loads((self._folder / f"{name}.pid").read_text())
            return Process(int(entry["pid"]), int(entry["started"])) if entry["boot"] == _boot() else None
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("not a record of a process", extra={"member": name, "reason": str(error)})
            return None

    def _ended(self, name: str) -> Ended:
        code = self._reap(name)
        if name in self._stopping:
            return Ended()
        if code is None:
            return Ended("its process has ended")  # an adopted one is somebody else's child
        if code < 0:
            return Ended(f"killed by {signal.Signals(-code).name}")
        return Ended(f"exit code {code}: {self._last_line(name)}", mistake=code == USAGE_CODE)

    def _reap(self, name: str) -> int | None:
        child = self._children.pop(name, None)
        return None if child is None else child.wait()

    def _last_line(self, name: str) -> str:
        """What the process said last."""
        with (self._folder / f"{name}.log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"


async def _end_of(process: Process) -> None:
    """Returns when the process has ended, whoever's child it is."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        if process.alive:  # the descriptor is its, not that of a later process with its pid
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _boot() -> str:
    """Identifies the start of this machine."""
    return BOOT.read_text().strip()


def _signal(process: Process, number: signal.Signals) -> None:
    """Sends a signal, unless the process has ended, or its pid is another's by now."""
    if process.alive:
        processes.send(number, [process])
