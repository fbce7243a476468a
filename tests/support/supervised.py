"""A cluster of plain processes that its supervisor starts, finds again after its own death, and replaces."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvrelay.cluster.asking.control import Control
from kvrelay.cluster.processes.processes import Process as Running
from kvrelay.cluster.processes.processes import alive as is_alive
from kvrelay.cluster.processes.processes import find
from kvrelay.cluster.state import ClusterState
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_READY,
    GetStatusRequest,
    GetStatusResponse,
    MemberStatus,
    Role,
)
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceStub
from support.forks import MEMBERS, left_of
from support.hash_worker import MODULE
from support.processes import PATIENCE, START_SECONDS, STATUS_SECONDS, Process, patiently, wait_until
from support.secrets import METADATA


@dataclass
class Supervised:
    """The supervisor's process and what it is told."""

    folder: Path
    config: dict[str, Any]
    forked: bool
    """Whether its members are forked; otherwise, each is an interpreter of its own, which takes seconds to start."""
    process: Process | None = None
    address: str = ""
    lives: int = 0
    seen: set[Running] = field(default_factory=set)
    """Every process of a member that this harness has come across."""

    def start(self) -> None:
        """Starts the supervisor, or another one after its end."""
        path = self.folder / "supervisor.json"
        path.write_text(json.dumps(self.config))
        self.lives += 1
        self.process = Process(
            "kvrelay.cluster.supervisor",
            ["--config", str(path)],
            self.folder / f"supervisor-{self.lives}.log",
            {MEMBERS: "1"} if self.forked else {},
            forked=True,
        )
        self.address = self.process.address()

    def kill(self) -> None:
        """SIGKILL to the supervisor alone."""
        if self.process is not None and self.process.popen.poll() is None:
            self.process.popen.kill()
            self.process.popen.communicate()

    def status(self) -> GetStatusResponse:
        def ask() -> GetStatusResponse:
            with grpc.insecure_channel(self.address) as channel:
                stub = SupervisorServiceStub(channel)
                return stub.GetStatus(GetStatusRequest(), timeout=STATUS_SECONDS, metadata=METADATA)

        return patiently(ask)

    def member(self, name: str) -> MemberStatus:
        return next((status for status in self.status().members if status.member.name == name), MemberStatus())

    def ready(self) -> bool:
        """Whether all desired members are ready."""
        status = self.status()
        states = {entry.member.name: entry.member.state for entry in status.members}
        return all(states.get(member.name) == MEMBER_STATE_READY for member in status.desired.members)

    def pid(self, name: str) -> int:
        """Process id of the process that was started last under this name."""
        pid = int(json.loads((self.folder / f"{name}.pid").read_text())["pid"])
        if (running := find(pid)) is not None:
            self.seen.add(running)
        return pid

    def pids(self) -> dict[str, int]:
        return {path.stem: self.pid(path.stem) for path in self.folder.glob("*.pid")}

    def alive(self) -> list[int]:
        """The processes of members that run, with their other ranks, and with those of earlier lives."""
        with suppress(FileNotFoundError):
            self.pids()
        ranks = {rank for running in self.seen for rank in left_of(running.pid)}
        return sorted(ranks | {running.pid for running in self.seen if is_alive(running)})

    @property
    def control(self) -> Control:
        """Gives commands, as the command line does."""
        return Control(ClusterState(pid=None, namespace="", supervisor=self.address))

    def settle(self, revision: int, seconds: float = START_SECONDS) -> None:
        """Waits until the cluster is as desired."""
        self.control.wait(revision, seconds, lambda members: None)

    def desired(self) -> dict[str, str]:
        """The role of each desired member, by name."""
        return {
            member.name: Role.Name(member.role).removeprefix("ROLE_").lower()
            for member in self.status().desired.members
        }

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))


@contextmanager
def supervised(
    folder: Path, members: dict[str, dict[str, Any]], forked: bool = False, **options: Any
) -> Iterator[Supervised]:
    """A supervisor of these members (`MemberProcess` each), on a free port; nothing of it is left at the end. It has
    PATIENCE unless `options` have others."""
    # Members inherit it: the modules of the tests.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys(
            filter(None, [*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(Path(__file__).parents[1])])
        )
    )
    config = {"state_path": str(folder / "record.json"), "members": members, **PATIENCE, **options}
    cluster = Supervised(folder, config, forked)
    try:
        cluster.start()
        yield cluster
    finally:
        with suppress(FileNotFoundError):
            cluster.pids()
        cluster.kill()
        for running in cluster.seen:
            if is_alive(running):
                os.kill(running.pid, 9)  # the kernel ends its other ranks with it


def hash_members(prefill: int = 1, decode: int = 1, **worker: Any) -> dict[str, dict[str, Any]]:
    """A whole cluster on the hash model, for `supervised`."""
    members: dict[str, dict[str, Any]] = {
        f"{role}-{index}": {"module": MODULE, "options": {"role": role, "model": "pico", "dtype": "float32", **worker}}
        for role, count in (("prefill", prefill), ("decode", decode))
        for index in range(count)
    }
    members["router-0"] = {"module": "kvrelay.router", "options": {"model": "pico", "grpc_port": 0, "http_port": None}}
    return members


def all_ready(cluster: Supervised) -> None:
    wait_until(cluster.ready, lambda: f"all ready: {cluster.log()[-4000:]}", START_SECONDS)
