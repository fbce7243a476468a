"""A cluster of plain processes on loopback: supervisor, workers, router, each `python -m kvrelay.<part>`; no Ray.

Used by the end-to-end tests: what is tested is the same servers that the Ray actors run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DEAD,
    MEMBER_STATE_READY,
    GetStatusRequest,
    GetStatusResponse,
    MemberStatus,
)
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceStub

START_SECONDS = 60.0
STOP_SECONDS = 15.0


def wait_until(
    condition: Callable[[], Any], what: str | Callable[[], str], seconds: float = 10.0, every: float = 0.01
) -> Any:
    """Polls until `condition()` is true and returns what it returned; fails naming `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what if isinstance(what, str) else what()}")
        time.sleep(every)
    return value


class Process:
    """One `python -m` server; its stderr goes to `log`."""

    def __init__(
        self, module: str, arguments: list[str], log: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        paths = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent.parent)]
        path = os.pathsep.join(filter(None, paths))
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path} | dict(variables or {})
        with log.open("wb") as stderr:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def address(self) -> str:
        """Waits for the line that says where the server listens."""
        if self.popen.stdout is None:
            raise RuntimeError("stdout is not piped")
        line = self.popen.stdout.readline()
        if not line:
            raise AssertionError(f"exit {self.popen.wait(STOP_SECONDS)}: {self.log.read_text()[-4000:]}")
        return str(json.loads(line)["address"])

    def stop(self) -> int:
        """SIGTERM, then SIGKILL; the exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.terminate()
        try:
            return self.popen.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(STOP_SECONDS)
            raise AssertionError(f"did not stop on SIGTERM: {self.log.read_text()[-4000:]}") from None
        finally:
            if self.popen.stdout is not None:
                self.popen.stdout.close()


@dataclass
class ProcessCluster:
    """A running cluster."""

    folder: Path
    supervisor: str = ""
    router: str = ""
    processes: dict[str, Process] = field(default_factory=dict)
    started: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """What each process was started with."""

    def start(
        self, name: str, module: str, config: dict[str, Any], variables: Mapping[str, str] | None = None
    ) -> Process:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(config))
        process = Process(module, ["--config", str(path)], self.folder / f"{name}.log", variables or {})
        self.processes[name] = process
        self.started[name] = module, config, variables
        return process

    def replace(self, name: str) -> None:
        """Starts a new incarnation of a worker that has ended; waits until it is ready and the router reaches it."""
        old = self.processes[name]
        old.popen.communicate(timeout=STOP_SECONDS)
        self.start(name, *self.started[name]).address()
        wait_until(
            lambda: (
                self.member(name).member.state == MEMBER_STATE_READY
                and self.member(name).member.pid == self.processes[name].pid
            ),
            f"{name} ready again",
            START_SECONDS,
        )
        wait_until(self.serving, "the router can place requests", START_SECONDS)

    def serving(self) -> bool:
        """Whether the router says that it can place a request."""
        with grpc.insecure_channel(self.router) as channel:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=5)
        return bool(answer.status == HealthCheckResponse.SERVING)

    def status(self) -> GetStatusResponse:
        with grpc.insecure_channel(self.supervisor) as channel:
            return SupervisorServiceStub(channel).GetStatus(GetStatusRequest(), timeout=5)

    def member(self, name: str) -> MemberStatus:
        return next(status for status in self.status().members if status.member.name == name)

    def wait_idle(self, seconds: float = 5.0, but: Collection[str] = ()) -> None:
        """Waits until no live worker, `but` those, holds a block or a request."""

        def idle() -> bool:
            members = [status for status in self.status().members if status.member.name not in but]
            live = [status for status in members if status.member.state != MEMBER_STATE_DEAD]
            loads = [status.load for status in live if status.load.blocks.total]
            return bool(loads) and all(
                load.blocks.held == 0
                and load.requests.running == 0
                and load.requests.waiting == 0
                and load.blocks.free + load.blocks.cached == load.blocks.total
                for load in loads
            )

        wait_until(idle, lambda: f"no block held on any worker: {self.status()}", seconds)

    def stop(self) -> None:
        failures = []
        for name, process in self.processes.items():
            if name != "supervisor" and process.popen.poll() is None:
                process.popen.send_signal(signal.SIGCONT)
                process.popen.terminate()
        for process in reversed(self.processes.values()):
            try:
                process.stop()
            except AssertionError as failure:
                failures.append(str(failure))
        if failures:
            raise AssertionError("\n".join(failures))


MODULES = {"prefill": "kvrelay.prefill_worker", "decode": "kvrelay.decode_worker", "colocated": "kvrelay.worker"}


@contextmanager
def process_cluster(
    folder: Path,
    model: Path | str,
    *,
    prefill: int = 1,
    decode: int = 1,
    colocated: int = 0,
    worker: dict[str, Any] | None = None,
    roles: Mapping[str, dict[str, Any]] | None = None,
    router: dict[str, Any] | None = None,
    modules: Mapping[str, str] = MODULES,
    variables: Mapping[str, str] | None = None,
) -> Iterator[ProcessCluster]:
    """A ready cluster on free ports, stopped in the end.

    `worker` and `router` are further options, `roles` those of one role's workers only; `variables` the workers'
    further environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cluster = ProcessCluster(folder)
    try:
        cluster.supervisor = cluster.start("supervisor", "kvrelay.cluster.supervisor", {}).address()
        counts = {"prefill": prefill, "decode": decode, "colocated": colocated}
        for role, count in counts.items():
            for index in range(count):
                name = f"{role}-{index}"
                options = {"name": name, "role": role, "model": str(model), "supervisor": cluster.supervisor}
                options |= {"dtype": "float32", **(worker or {}), **(roles or {}).get(role, {})}
                cluster.start(name, modules[role], options, variables)
        options = {"name": "router-0", "model": str(model), "grpc_port": 0, "supervisor": cluster.supervisor}
        cluster.start("router-0", "kvrelay.router", {**options, **(router or {})})
        cluster.router = cluster.processes["router-0"].address()
        for name in list(cluster.processes)[1:-1]:
            cluster.processes[name].address()
        wait_until(lambda: cluster.status().ready, "cluster ready", START_SECONDS)
        yield cluster
    finally:
        cluster.stop()
