"""Watches the processes of a Ray cluster from outside: whether they live, and whether those that serve answer.

Nothing of Ray is imported: a process of Ray's own ends, or hangs, with its cluster.

    process                 killed                                   frozen
    GCS, raylet             the cluster is lost                      the same
    agents of the raylet    the raylet ends with them: lost          requests are served; Ray's metrics stand still
    supervisor              Ray starts another one                   it is killed here, then the same
    dashboard, log monitor, requests are served without it           requests are served
    autoscaler's monitor
"""

import re
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from psutil import Process

from kvrelay.cluster.asking.status import get_status, serves
from kvrelay.cluster.errors import RunError
from kvrelay.cluster.membership.membership import ready_http, ready_routers
from kvrelay.cluster.processes import processes
from kvrelay.cluster.state import ClusterState
from kvrelay.internal.v1.supervisor_pb2 import GetStatusResponse
from kvrelay.machine.silence import Silence

NEEDED = {
    "Ray's GCS": r"^[^\0]*/gcs_server\0",
    "the raylet": r"^[^\0]*/raylet\0",
    "Ray's dashboard agent": r"^ray::DashboardAgent|^[^\0]*\0-u\0[^\0]*/dashboard/agent\.py",
    "Ray's runtime-env agent": r"^ray::RuntimeEnvAgent|^[^\0]*\0-u\0[^\0]*/runtime_env/agent/main\.py",
}
"""Processes whose end ends the cluster, by a pattern of their command line or title."""
SPARED = {
    "Ray's dashboard": r"^[^\0]*\0[^\0]*/dashboard/dashboard\.py",
    "Ray's log monitor": r"^[^\0]*\0-u\0[^\0]*/log_monitor\.py",
    "Ray's autoscaler monitor": r"^[^\0]*\0-u\0[^\0]*/monitor\.py",
}
"""Processes that serving doesn't need."""
SUPERVISOR = r"^ray::(SupervisorActor|kvrelay-supervisor)"
ASK_SECONDS = 1.0
EVERY_SECONDS = 0.5
MOST_FAILURES = 5
"""Looks in a row, each 0.5 to 4 s after the one before, at which neither the supervisor, nor the GCS, nor a router of a
cluster on a joined Ray answers."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of Ray's processes on this machine: host:port of each."""

    gcs: str
    raylet: str = ""


class LocalWatch:
    """Watches the Ray cluster whose processes are descendants of this one."""

    def __init__(self, addresses: Addresses, state: ClusterState) -> None:
        self._processes = {name: _find(pattern) for name, pattern in (NEEDED | SPARED).items()}
        self._state = state
        self._silences = {name: Silence() for name in ("Ray's GCS", "the raylet")}
        self._supervisor = Silence()
        self.routers: dict[str, str] = {}
        """Addresses of the routers that are ready, as in the ClusterState: one that is replaced may get other ports."""
        for name, silence in self._silences.items():  # they have answered the driver
            silence.answered(self._processes[name])
        self._supervisor.answered(_find(SUPERVISOR))
        self._closed = threading.Event()
        asked: dict[str, Callable[[], None]] = {
            "Ray's GCS": lambda: self._ask("Ray's GCS", addresses.gcs),
            "the raylet": lambda: self._ask("the raylet", addresses.raylet),
            "the supervisor": self._ask_supervisor,
        }
        for name, ask in asked.items():
            threading.Thread(target=self._repeat, args=(ask,), name=f"ask {name}", daemon=True).start()

    def lost(self) -> str:
        """The reason why the cluster is lost; empty if it isn't."""
        needed = ((name, process) for name in NEEDED if (process := self._processes[name]) is not None)
        # The raylet ends with its agents, perhaps before this look: all are named, the cause among them.
        ended = [f"{name} (pid {process.pid})" for name, process in needed if not processes.alive(process)]
        if ended:
            return f"{' and '.join(ended)} {'has' if len(ended) == 1 else 'have'} ended"
        for name, silence in self._silences.items():
            if verdict := silence.verdict():
                return f"{name} {verdict}"
        return ""

    def missing(self) -> str:
        """The processes that have ended and that serving doesn't need."""
        found = ((name, self._processes[name]) for name in SPARED)
        ended = (name for name, process in found if process is not None and not processes.alive(process))
        return ", ".join(ended)

    def mend(self) -> str:
        """Kills a supervisor that is frozen, which Ray then starts again; says so, or nothing."""
        verdict, process = self._supervisor.verdict(), self._supervisor.process
        if not verdict or process is None or not processes.alive(process):
            return ""
        processes.send(signal.SIGKILL, [process])
        self._supervisor.answered(None)
        return f"the supervisor (pid {process.pid}) {verdict} and is killed; Ray starts it again"

    def close(self) -> None:
        """Asks no more."""
        self._closed.set()

    def _repeat(self, ask: Callable[[], None]) -> None:
        while not self._closed.wait(EVERY_SECONDS):
            ask()

    def _ask(self, name: str, address: str) -> None:
        if answers(address):
            self._silences[name].answered(self._processes[name])

    def _ask_supervisor(self) -> None:
        known = self._supervisor.process
        process = known if known is not None and processes.alive(known) else _find(SUPERVISOR)
        try:
            status = get_status(self._state, ASK_SECONDS)
        except RunError:  # it refuses this caller, or the token can't be read: no sign that it is frozen
            self._supervisor.answered(process)
            return
        if status is not None:
            self._supervisor.answered(process)
            self.routers = _routers(status) or self.routers


class JoinedWatch:
    """Watches a Ray cluster that was joined: its own operator restarts its processes, and it may come back."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.routers: dict[str, str] = {}
        """Addresses of the routers that are ready, as in the ClusterState: a replaced one may be on another node."""
        self._failures = 0
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="ask Ray", daemon=True).start()

    def lost(self) -> str:
        """The reason why the cluster is lost; empty if it isn't."""
        address = self._state.ray_address
        return f"Ray at {address} does not answer, and no router serves" if self._failures >= MOST_FAILURES else ""

    def missing(self) -> str:
        """An empty result: this process doesn't know the other machines' processes."""
        return ""

    def mend(self) -> str:
        """Does nothing: the supervisor may be on another machine."""
        return ""

    def close(self) -> None:
        """Asks no more."""
        self._closed.set()

    def _run(self) -> None:
        state = self._state
        while not self._closed.wait(EVERY_SECONDS):
            status: GetStatusResponse | None = None
            with suppress(RunError):  # it refuses this caller, or the token can't be read
                status = get_status(state, ASK_SECONDS)
            if status is not None:
                self.routers = _routers(status) or self.routers
            routers = self.routers.get("router", state.router)
            well = status is not None or answers(state.ray_address) or serves(routers, state.router_tls, ASK_SECONDS)
            self._failures = 0 if well else self._failures + 1


def answers(address: str) -> bool:
    """Whether somebody answers gRPC calls at host:port in time, with a refusal too."""
    with grpc.insecure_channel(address) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=ASK_SECONDS)
        except grpc.RpcError as error:
            return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True


def _routers(status: GetStatusResponse) -> dict[str, str]:
    """Addresses of the routers that are ready, as in the ClusterState; empty if none is."""
    members = [entry.member for entry in status.members]
    routers = ready_routers(members)
    return {"router": ",".join(routers), "http": ",".join(ready_http(members))} if routers else {}


def _find(pattern: str) -> Process | None:
    """The descendant of this process with such a command line."""
    return next((each for each in processes.descendants() if re.search(pattern, processes.title(each))), None)
