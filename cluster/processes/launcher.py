"""Runs members as plain processes of this machine, `python -m MODULE --config FOLDER/NAME.json`.

They outlive the supervisor. A restarted one finds each by its pid in NAME.pid and its command line. If the supervisor
was killed between the start of a process and its record, the replacement fences that process, which then ends by
itself.
"""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from psutil import Process
from pydantic import TypeAdapter, ValidationError

from kvrelay.cluster.fleet.replacement import Plan, ProcessEnd
from kvrelay.cluster.fleet.room import ROUTER_BYTES, lacks_memory, worker_bytes
from kvrelay.cluster.processes import processes
from kvrelay.machine.options import Mistake, require
from kvrelay.rpc.identity import ROLES, MemberRole
from kvrelay.rpc.security import SecurityConfig
from kvrelay.rpc.serve import EXIT_SECONDS, STOP_SECONDS, USAGE_CODE
from kvrelay.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

MODULE_ROLES: dict[str, MemberRole] = {
    "kvrelay.prefill_worker": "prefill",
    "kvrelay.decode_worker": "decode",
    "kvrelay.worker": "colocated",
    "kvrelay.router": "router",
}
RECORD_BYTES = 200
"""Bytes for a file NAME.pid, more than it takes."""


@dataclass(frozen=True, slots=True)
class MemberProcess:
    """The start of one member's process: its module and its options."""

    module: str
    """Python module to run: `kvrelay.cluster.processes.worker`, a worker that can change its role; or one with one
    role, `kvrelay.prefill_worker`, `kvrelay.decode_worker`, `kvrelay.worker`; or `kvrelay.router`."""

    options: dict[str, Any] = field(default_factory=dict)
    """Options of the process, without `name` and `supervisor`, which are set here. `security` is the supervisor's by
    default."""

    def __post_init__(self) -> None:
        require(self.module != "", "module", self.module, "a Python module")


@dataclass(frozen=True, slots=True)
class Processes:
    """A configuration: the processes of a cluster on one machine."""

    __pydantic_config__: ClassVar[dict[str, bool | str]] = {"extra": "forbid"}

    members: dict[str, MemberProcess] = field(default_factory=dict)
    """Processes that the cluster begins with, by member's name."""

    templates: dict[str, MemberProcess] = field(default_factory=dict)
    """Processes for further members, by role; default: the first of `members` with the role."""

    def __post_init__(self) -> None:
        for name, member in self.members.items():
            self.role(name)
            hosts = member.options.get("engine", {}).get("hosts", 1)
            require(hosts == 1, f"members.{name}.options.engine.hosts", hosts, "1 without Ray, on one machine")
        for role in self.templates:
            require(role in ROLES, "templates", role, ", ".join(ROLES))

    def role(self, name: str) -> MemberRole:
        """The role of one of `members`: that of its options, of its module, or the first part of its name.

        Raises:
            ValueError: none of them is a role.
        """
        member = self.members[name]
        named = member.options.get("role") or MODULE_ROLES.get(member.module) or name.partition("-")[0]
        role = next((role for role in ROLES if role == named), None)
        if role is None:
            raise ValueError(f"members.{name}.options.role is {named}; allowed: {', '.join(ROLES)}")
        return role

    def template(self, role: MemberRole) -> MemberProcess | None:
        """The process for a member of this role that isn't one of `members`; None if there is no template."""
        of_role = (member for name, member in self.members.items() if self.role(name) == role)
        return self.templates.get(role) or next(of_role, None)

    def process(self, name: str, role: MemberRole) -> MemberProcess:
        """The process for a member.

        Raises:
            ValueError: it is not one of `members`, and there is no template of its role.
        """
        own = self.members.get(name)
        if own is not None and role == "router":
            return own
        found = own if own is not None and self.role(name) == role else self.template(role) or own
        if found is None:
            raise ValueError(f"templates.{role} is missing, which {name} would be started as")
        return replace(found, options=found.options if role == "router" else {**found.options, "role": role})


PROCESSES = TypeAdapter(Processes)
WORKER = TypeAdapter(WorkerConfig)


class ProcessLauncher:
    """The supervisor's Launcher of plain processes."""

    def __init__(self, folder: Path, processes: Processes, security: SecurityConfig) -> None:
        """`security`: options for members that have none of their own."""
        self.config = PROCESSES.dump_json(processes).decode()
        self._security = asdict(security)
        self._folder = folder.resolve()
        self._running: dict[str, Process] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def members(self, config: str) -> dict[str, MemberRole]:
        """The roles of `Processes.members`, by name."""
        of = _parse(config)
        return {name: of.role(name) for name in of.members}

    async def upgrade(self, present: str, config: str) -> str:
        """The configuration in its checked form. Every option can change."""
        return PROCESSES.dump_json(_parse(config)).decode()

    def startable(self, config: str, role: MemberRole, others: int) -> str:
        """The reason why no further member of this role can be started. All routers must share one port."""
        template = _parse(config).template(role)
        if template is None:
            return f"templates.{role} is missing, which further {role} members would be started as"
        if role == "router" and not _shared(template):
            return "router.share_port is False; allowed: True for another router on this machine"
        return ""

    def lacks_room(self, config: str, present: Mapping[MemberRole, int], wanted: Mapping[MemberRole, int]) -> str:
        """The reason why this machine has too little memory for the wanted members; empty if it has enough."""
        needs: dict[MemberRole, int] = {"router": ROUTER_BYTES}
        for role in wanted:
            template = _parse(config).template(role)
            if role != "router" and template is not None:
                options = {**template.options, "role": role, "name": role}
                needs[role] = worker_bytes(WORKER.validate_python(options))
        return lacks_memory(present, wanted, needs)

    def cycled(self, config: str) -> frozenset[MemberRole]:
        """The routers, unless they share their port."""
        template = _parse(config).template("router")
        return frozenset() if template is None or _shared(template) else frozenset({"router"})

    def unchanged(self, present: str, config: str) -> frozenset[MemberRole]:
        """No role: each member has its own options."""
        return frozenset()

    async def adopt(self, name: str) -> bool:
        """Finds the process that NAME.pid names, if it still runs."""
        process = self._recorded(name)
        if process is None:
            return False
        self._running[name] = process
        return True

    async def run(self, name: str, plan: Plan, supervisor: str) -> ProcessEnd:
        """Returns when the member's process has ended; starts one first, unless one was just adopted."""
        process = self._running.get(name)
        if process is None or not processes.alive(process):
            process = await asyncio.to_thread(self._start, name, plan, supervisor)
        await _end_of(process)
        return self._ended(name)

    def waits_for(self, name: str) -> str:
        """An empty text: a process starts at once."""
        return ""

    async def stop(self, name: str, grace: float) -> None:
        """SIGTERM, then SIGKILL if it doesn't end in time."""
        process = self._running.get(name)
        if process is None:
            return
        processes.send(signal.SIGTERM, [process])
        try:
            # In no thread, of which there are few: others are started meanwhile.
            async with asyncio.timeout(grace + STOP_SECONDS + EXIT_SECONDS):
                await _end_of(process)
        except TimeoutError:
            processes.send(signal.SIGKILL, [process])
            logger.error("did not end in time and was killed", extra={"member": name, "pid": process.pid})

    async def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self._running.get(name)
        if process is not None:
            processes.send(signal.SIGKILL, [process])

    def _start(self, name: str, plan: Plan, supervisor: str) -> Process:
        member = _parse(plan.config).process(name, plan.role)
        options, log = self._options(name), self._folder / f"{name}.log"
        given = {"security": self._security, **member.options, "name": name, "supervisor": supervisor}
        options.write_text(json.dumps(given, indent=2))
        # The record's room on the disk is reserved before the process starts: nobody would find a process without a
        # record.
        fresh = self._folder / f"{name}.pid.new"
        fresh.write_text(" " * RECORD_BYTES)
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
        self._running[name] = process  # before its record: a member that has one can be stopped
        record = json.dumps({"pid": process.pid})
        try:
            with fresh.open("r+") as file:
                file.write(record.ljust(RECORD_BYTES))
            fresh.replace(self._folder / f"{name}.pid")
        except OSError:
            child.kill()
            child.wait()
            raise
        return process

    def _recorded(self, name: str) -> Process | None:
        """The process in NAME.pid, if it runs; None if there is none, or if the pid is another process's by now."""
        try:
            process = processes.find(int(json.loads((self._folder / f"{name}.pid").read_text())["pid"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("not a record of a process", extra={"member": name, "reason": str(error)})
            return None
        own = process is not None and processes.title(process).endswith(f"\0{self._options(name)}\0")
        return process if own else None

    def _options(self, name: str) -> Path:
        """The file that a member's process is started with. Its command line has this path, which no other's has."""
        return self._folder / f"{name}.json"

    def _ended(self, name: str) -> ProcessEnd:
        child = self._children.pop(name, None)
        code = None if child is None else child.wait()
        if code is None:
            return ProcessEnd("its process has ended")  # an adopted one is somebody else's child
        if code < 0:
            return ProcessEnd(f"killed by {signal.Signals(-code).name}")
        return ProcessEnd(f"exit code {code}: {self._last_line(name)}", mistake=code == USAGE_CODE)

    def _last_line(self, name: str) -> str:
        """The last line of the process's log, or the reason why it can't be read, such as a log that was removed."""
        try:
            with (self._folder / f"{name}.log").open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError as error:
            return f"its log can't be read: {error}"
        return lines[-1] if lines else "no output"


def _parse(config: str) -> Processes:
    """A configuration.

    Raises:
        ValueError: it isn't one.
    """
    try:
        return PROCESSES.validate_json(config)
    except ValidationError as error:
        raise ValueError(f"{Mistake.of(error.errors()[0])}") from None


def _shared(router: MemberProcess) -> bool:
    return bool(router.options.get("share_port"))


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
        if processes.alive(process):  # the descriptor is its, not that of a later process with its pid
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
