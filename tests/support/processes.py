"""A cluster of plain processes on loopback: supervisor, workers, router, each `python -m kvrelay.<part>`; no Ray.

These are the same servers that the Ray actors run.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import grpc

from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DEAD,
    MEMBER_STATE_READY,
    GetStatusRequest,
    GetStatusResponse,
    MemberStatus,
)
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceStub
from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.options import PING_VARIABLE
from support.forks import Forked
from support.secrets import Secrets, credentials

T = TypeVar("T")
START_SECONDS = 90.0
STOP_SECONDS = 30.0
PATIENCE = {"suspect_seconds": 3.0, "dead_seconds": 6.0}
"""Limits of silence of the tests' supervisors, twice the default ones: a worker that gets no CPU on a busy machine is
not frozen. A test that measures silence gives its own."""
PINGS = {PING_VARIABLE: "3"}
"""Environment of all processes beside PATIENCE: with the default of 1 s, some healthy streams end on a busy machine."""
ON_ITS_WAY_SECONDS = 0.2
"""Longest time in seconds from when a member reads its load until the supervisor has it."""
STATUS_SECONDS, STATUS_TRIES = 10.0, 4
MODULES = {"prefill": "kvrelay.prefill_worker", "decode": "kvrelay.decode_worker", "colocated": "kvrelay.worker"}


def wait_until(condition: Callable[[], Any], what: str | Callable[[], str], seconds: float = 30.0) -> Any:
    """Polls until `condition()` is true and returns its value; fails naming `what` after `seconds`.

    A poll takes time that what is waited for needs: the first ones come 5 ms after each other, later ones after a
    twentieth of the time waited, at most 50 ms.
    """
    started = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - started
        if waited > seconds:
            raise AssertionError(f"not within {seconds} s: {what if isinstance(what, str) else what()}")
        time.sleep(min(max(waited / 20, 0.005), 0.05))
    return value


def free_port() -> int:
    """A port of loopback that nobody listens on now, outside of the range from which ports are chosen for others."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise RuntimeError("no free port")


def patiently(ask: Callable[[], T]) -> T:
    """The answer of a supervisor. It ends connections whose client doesn't answer a ping within a second, as a test
    process on a busy machine may, so a lost connection is made again."""
    for _ in range(STATUS_TRIES - 1):
        try:
            return ask()
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
    return ask()


class Process:
    """One `python -m` server; its stderr goes to `log`."""

    def __init__(
        self,
        module: str,
        arguments: list[str],
        log: Path,
        variables: Mapping[str, str] | None = None,
        *,
        forked: bool = False,
    ) -> None:
        """
        Args:
            forked: whether to start it as `support.forks` does, without an interpreter of its own.
        """
        self.log = log
        paths = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent.parent)]
        path = os.pathsep.join(filter(None, paths))
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path} | dict(variables or {})
        self.popen: subprocess.Popen[bytes] | Forked
        with log.open("wb") as stderr:
            if forked:
                self.popen = Forked(module, arguments, environment, stderr.fileno())
                return
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

    def terminate(self) -> None:
        """Asks it to stop, frozen or not."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.terminate()

    def stop(self) -> int:
        """SIGTERM, then SIGKILL; returns the exit status."""
        self.terminate()
        try:
            return self.popen.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(STOP_SECONDS)
            raise AssertionError(f"did not stop on SIGTERM: {self.log.read_text()[-4000:]}") from None
        finally:
            if self.popen.stdout is not None:
                self.popen.stdout.close()


class ProcessCluster:
    """A running cluster; use `process_cluster`."""

    def __init__(self, folder: Path, access: Credentials) -> None:
        self._access = access
        self.processes: dict[str, Process] = {}
        self.supervisor = self.router = ""
        """Addresses of the supervisor and the router; of several routers, with commas between."""
        self._folder = folder
        self.addresses: dict[str, str] = {}
        """Addresses of routers, by name."""
        self.agents: dict[str, list[Process]] = {}
        """Agents of the other machines of workers that have several, by the worker's name."""
        self.started: dict[str, tuple[Any, ...]] = {}
        """Arguments that each process was first started with, by its name."""
        self.environment: Mapping[str, str] = {}
        """Further environment of all processes."""

    @property
    def workers(self) -> dict[str, Process]:
        return {name: process for name, process in self.processes.items() if name.partition("-")[0] in MODULES}

    def start(
        self, name: str, module: str, config: dict[str, Any], variables: Mapping[str, str] | None = None
    ) -> Process:
        """Starts a process without waiting for it."""
        path = self._folder / f"{name}.json"
        hosts, given = config.get("engine", {}).get("hosts", 1), config
        if hosts > 1:
            given = config | {"ranks_port": free_port()}
        path.write_text(json.dumps(given))
        arguments, log = ["--config", str(path)], self._folder / f"{name}.log"
        self.started.setdefault(name, (module, config, variables))
        variables = {**self.environment, **(variables or {})}
        self.processes[name] = Process(module, arguments, log, variables, forked=True)
        for agent in self.agents.pop(name, ()):
            agent.popen.kill()
            agent.popen.communicate(timeout=STOP_SECONDS)
        for number in range(1, hosts):
            join = ["--join", f"127.0.0.1:{given['ranks_port']}", "--host", str(number)]
            agent_log = self._folder / f"{name}-host-{number}.log"
            agent = Process("kvrelay.worker.ranks", join, agent_log, variables, forked=True)
            self.agents.setdefault(name, []).append(agent)
        return self.processes[name]

    def replace(self, *names: str, **options: Any) -> None:
        """As `start_again`; waits until the routers reach the members, too."""
        self.start_again(*names, **options)
        wait_until(self.reached, "the routers have reached them", START_SECONDS)

    def start_again(self, *names: str, **options: Any) -> None:
        """Starts new incarnations of members that have ended or end now; waits until they are ready.

        Args:
            options: in the place of those that the members were first started with.
        """
        for name in names:
            self.processes[name].popen.communicate(timeout=STOP_SECONDS)
            module, config, variables = self.started[name]
            self.start(name, module, config | options, variables)
        for name in names:
            self.processes[name].address()
            wait_until(lambda name=name: self.is_ready(name), f"{name} ready again", START_SECONDS)  # type: ignore[misc]  # bound at once

    def is_ready(self, name: str) -> bool:
        """Whether the supervisor takes the member for ready, in its latest incarnation."""
        member = self.member(name).member
        return member.state == MEMBER_STATE_READY and member.pid == self.processes[name].pid

    def restart_supervisor(self, **options: Any) -> None:
        """Kills the supervisor unless it has ended, and starts another one at its port."""
        self.processes["supervisor"].popen.kill()
        self.processes["supervisor"].popen.communicate()
        module, config, variables = self.started["supervisor"]
        port = int(self.supervisor.rpartition(":")[2])
        address = self.start("supervisor", module, {**config, "port": port, **options}, variables).address()
        assert address == self.supervisor

    @contextmanager
    def more(self, kind: str, count: int = 1, **options: Any) -> Iterator[list[str]]:
        """Further routers or workers of a role, for the block; yields their names. They are ready, and routers have
        reached workers.

        Args:
            options: of them, in the place of those of the first one of their kind.
        """
        module, config, variables = self.started[f"{kind}-0"]
        first = sum(name.startswith(kind) for name in self.processes)
        names = [f"{kind}-{first + number}" for number in range(count)]
        own = {"grpc_port": 0} if kind == "router" else {}
        try:
            for name in names:
                self.start(name, module, {**config, **own, **options, "name": name}, variables)
            for name in names:
                self.addresses[name] = self.processes[name].address()
                wait_until(lambda name=name: self.is_ready(name), f"{name} ready", START_SECONDS)  # type: ignore[misc]  # bound at once
            wait_until(self.reached, "the routers have reached every worker", START_SECONDS)
            yield names
        finally:
            for name in names:
                self.processes.pop(name).stop()
                del self.started[name]

    def reached(self) -> bool:
        """Whether every live router has a stream to every ready worker; before, it places requests elsewhere."""
        ready = {
            status.member.incarnation
            for status in self.status().members
            if status.member.name in self.workers and status.member.state == MEMBER_STATE_READY
        }
        routers = [self.processes[name] for name in self.processes if name.startswith("router")]
        return all(ready <= _reached(router.log) for router in routers if router.popen.poll() is None)

    @cached_property
    def _supervisor_channel(self) -> grpc.Channel:
        return self._access.blocking_channel(self.supervisor, "supervisor")

    def status(self) -> GetStatusResponse:
        """The supervisor's status."""
        ask = SupervisorServiceStub(self._supervisor_channel).GetStatus
        options = {"timeout": STATUS_SECONDS, "wait_for_ready": True, "metadata": self._access.metadata}
        return patiently(lambda: ask(GetStatusRequest(), **options))

    def member(self, name: str) -> MemberStatus:
        """The supervisor's status of a member; empty if it doesn't know it."""
        return next((status for status in self.status().members if status.member.name == name), MemberStatus())

    def wait_idle(self, seconds: float = 5.0, but: Collection[str] = ()) -> None:
        """Waits until no live worker, except `but`, has a request or holds or misses a block."""

        def idle(status: MemberStatus) -> bool:
            blocks, requests = status.load.blocks, status.load.requests
            return not (blocks.held or requests.running or requests.waiting) and (
                blocks.free + blocks.cached == blocks.total > 0
            )

        def all_idle() -> bool:
            live = [status for status in self.status().members if status.member.state != MEMBER_STATE_DEAD]
            names = self.workers.keys() - set(but)
            workers = [status for status in live if status.member.name in names]
            return bool(workers) and all(map(idle, workers))

        wait_until(all_idle, lambda: f"no block held on any worker: {self.status()}", seconds)

    def load_now(self, name: str) -> Load:
        """A member's load, by a heartbeat that came so late after this call that it wasn't on its way before."""
        began, found = time.monotonic(), list[MemberStatus]()

        def heard() -> bool:
            found[:] = [self.member(name)]
            return found[0].heartbeat_age_seconds < time.monotonic() - began - ON_ITS_WAY_SECONDS

        wait_until(heard, f"a heartbeat of {name}")
        return found[0].load

    def stop(self) -> None:
        self._supervisor_channel.close()
        for name, process in self.processes.items():
            if name != "supervisor":
                process.terminate()
        failures = []
        for process in reversed(self.processes.values()):
            try:
                process.stop()
            except AssertionError as failure:
                failures.append(str(failure))
        if failures:
            raise AssertionError("\n".join(failures))


def _reached(log: Path) -> set[str]:
    """Incarnations of the workers that a router has a stream to, or had."""
    lines = log.read_bytes().splitlines()
    return {json.loads(line)["incarnation"] for line in lines if b'"worker reached"' in line}


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
    routers: int = 1,
    modules: Mapping[str, str] = MODULES,
    variables: Mapping[str, str] | None = None,
    secrets: Secrets | None = None,
    supervisor: Mapping[str, Any] | None = None,
) -> Iterator[ProcessCluster]:
    """A ready cluster on free ports, stopped in the end.

    Args:
        worker: further options of every worker.
        roles: further options of one role's workers.
        router: further options of each router.
        routers: how many of them.
        variables: further environment of the workers.
        secrets: what all processes prove themselves with; by default the tests' join token.
        supervisor: further options of the supervisor, which has PATIENCE. All processes have PINGS, unless there are
            limits of silence among these options.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cluster = ProcessCluster(folder, credentials() if secrets is None else secrets.credentials("operator"))
    security = {} if secrets is None else {"security": secrets.options}
    if "suspect_seconds" not in (supervisor or {}):
        cluster.environment = PINGS
    try:
        cluster.supervisor = cluster.start(
            "supervisor", "kvrelay.cluster.supervisor", security | PATIENCE | dict(supervisor or {})
        ).address()
        common = {"model": str(model), "supervisor": cluster.supervisor, **security}
        for role, count in {"prefill": prefill, "decode": decode, "colocated": colocated}.items():
            for index in range(count):
                options = {"name": f"{role}-{index}", "role": role, "dtype": "float32", **common}
                options |= {**(worker or {}), **(roles or {}).get(role, {})}
                cluster.start(f"{role}-{index}", modules[role], options, variables)
        # A router that is replaced must be found where it was, if clients know several.
        for index in range(routers):
            port = 0 if routers == 1 else free_port()
            options = {"name": f"router-{index}", "grpc_port": port, "http_port": None, **common, **(router or {})}
            cluster.start(f"router-{index}", "kvrelay.router", options)
        for index in range(routers):
            cluster.addresses[f"router-{index}"] = cluster.processes[f"router-{index}"].address()
        cluster.router = ",".join(cluster.addresses.values())
        for process in cluster.workers.values():
            process.address()
        members = [name for name in cluster.processes if name != "supervisor"]
        wait_until(lambda: all(map(cluster.is_ready, members)), "all members are ready", START_SECONDS)
        wait_until(cluster.reached, "every router has reached every worker", START_SECONDS)
        yield cluster
    finally:
        cluster.stop()
