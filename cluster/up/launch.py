"""A cluster's life in the process that is its Ray driver.

    start or join Ray -> start the supervisor's actor, which starts the others -> ready
    -> wait for SIGINT, SIGTERM or SIGHUP -> members finish and end -> end or leave Ray

`kvrelay up` runs it in a process of its own (`driver.py`), which can be ended with its Ray when that hangs.

Signals are checked between steps. Ray may wait without end, for a process of its own that hangs: its start and its end
have deadlines, at which this process ends where it is, with its descendants.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from kvrelay.cluster import secrets, state
from kvrelay.cluster.asking.status import serves
from kvrelay.cluster.config.options import MEMBER, MEMBERS, ClusterConfig, available_cores
from kvrelay.cluster.config.sections import AUTO
from kvrelay.cluster.errors import ERROR_PREFIX, RunError, UsageError, listed
from kvrelay.cluster.fleet.keepers import MOST_FAILURES, STALL_SECONDS
from kvrelay.cluster.grafana import dashboards
from kvrelay.cluster.processes import processes
from kvrelay.cluster.ray import supervisor_actor
from kvrelay.cluster.ray.actors import WATCH_SECONDS
from kvrelay.cluster.ray.launcher import present_gpus
from kvrelay.cluster.ray.watch import Addresses
from kvrelay.cluster.secrets import Secured
from kvrelay.cluster.signals import Signals
from kvrelay.cluster.state import ClusterState
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY
from kvrelay.kernels.cpu.library import library
from kvrelay.rpc.identity import join
from kvrelay.rpc.serve import ExitDeadline

if TYPE_CHECKING:
    from kvrelay.cluster.supervisor.supervisor import Startup
    from kvrelay.cluster.up.report import Reporting

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
EXIT_SECONDS = 10.0
"""Seconds for Ray's own processes to end after its shutdown."""
END_SECONDS = 50.0
"""Seconds for the cluster and Ray to end, beyond the time for its requests; less than `kvrelay down` waits."""
GRAFANA_FOLDER_VARIABLE = "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"
"""Ray's own variable for the folder of its dashboards."""
OBJECT_STORE_BYTES = 80 * 2**20
"""Nearly Ray's minimum: kvrelay sends nothing through the object store."""


def leave_running(config: ClusterConfig, report: "Reporting") -> ClusterState:
    """Starts a cluster on a shared Ray cluster and leaves it there, for `kvrelay down` to end.

    Raises:
        ClusterError: it can't be started; nothing of it is left.
        Interrupted: a signal came before it was ready; nothing of it is left.
    """
    signals = Signals()
    with state.owned(), quiet():
        signals.install()
        secured = secrets.prepare(config)
        cluster = Cluster(secured, report, signals, state.save)
        try:
            cluster.start()
        except BaseException:
            cluster.stop()
            raise
        ray.shutdown()
    state.save(cluster.state)
    return cluster.state


class Cluster:
    """One cluster on Ray, from this process's side."""

    def __init__(
        self,
        secured: Secured,
        report: "Reporting",
        signals: Signals,
        save: Callable[[ClusterState], None],
        *,
        resume: bool = False,
    ) -> None:
        """
        Args:
            secured: the configuration, and its secrets.
            save: takes the cluster's addresses whenever they change.
            resume: whether a cluster that runs on the joined Ray already is this one.
        """
        config = self._config = secured.config
        self._token = secured.token
        self._report = report
        self._signals = signals
        self._save = save
        self._resume = resume
        self._supervisor: Any = None
        self._kernels = threading.Thread(target=library, name="kernels", daemon=True)
        self._session = Path()
        """Ray's folder of its present session."""
        self._deadline = ExitDeadline(before=processes.kill_descendants)
        self.state = ClusterState(
            pid=None,
            namespace=config.ray.namespace,
            drain_seconds=config.drain_seconds,
            join_token_path=secured.token_path,
            certificates=config.security.certificates,
            router_tls=bool(config.router.tls_certificate),
            page=config.router.page,
        )
        self.addresses = Addresses("")
        """Addresses of Ray's own processes."""

    def start(self) -> None:
        """Returns when every member is ready, or, after STALL_SECONDS without progress, when requests can be served."""
        self._save(self.state)
        if self._config.local:
            # The native kernels take seconds to build the first time, as Ray does to start; minutes on a busy machine.
            # Workers wait for them.
            self._kernels.start()
        self._report.phase("starting Ray" if self._config.local else f"joining Ray at {self._config.ray.address}")
        late = f"{ERROR_PREFIX}Ray did not answer within {STALL_SECONDS:g} s"
        self._deadline.set(STALL_SECONDS, RunError.code, late)
        self._connect()
        self._deadline.cancel()
        self._signals.check()
        self._report.phase("starting the cluster")
        self._supervisor = self._found() or self._created()
        self._update(supervisor=self._ask(self._supervisor.address))
        startup = self._until_ready()
        if self._config.local and self._config.ray.include_dashboard:
            self._add_dashboards()
        self._update(router=",".join(startup.routers), http=",".join(startup.http))

    def wait(self) -> None:
        """Returns when a signal has come. The cluster serves without its supervisor, which Ray starts again if it ends.

        A supervisor that Ray has given up is replaced from here; the new one finds the members running.
        """
        watch, told = self._supervisor.watch.remote(WATCH_SECONDS), None
        while not self._signals.wait(1.0):
            if not ray.wait([watch], timeout=0)[0]:
                continue
            try:
                ended = ray.get(watch)
                if ended not in (None, told):  # its process says so until it has ended, too
                    self._report.phase(f"the supervisor has ended and is started again: {ended.reason}")
                told = ended
            except RayError as error:
                reason = " ".join(str(error).split())
                self._report.phase(f"the supervisor is lost and replaced; requests are served meanwhile: {reason}")
                self._supervisor = self._found() or self._created()
            watch = self._supervisor.watch.remote(WATCH_SECONDS)

    def stop(self) -> None:
        """Ends every member and actor, then Ray itself, or this process's part in it."""
        if not ray.is_initialized():
            self._deadline.cancel()
            processes.kill_descendants()  # those of an interrupted start
            return
        self._report.phase("stopping")
        seconds = self._config.drain_seconds + END_SECONDS
        self._deadline.set(seconds, RunError.code, f"{ERROR_PREFIX}the cluster did not end within {seconds:g} s")
        if self._supervisor is not None:
            supervisor_actor.end(self._config.ray.namespace, self._config.drain_seconds)
        below = processes.descendants()
        ray.shutdown()
        for process in processes.end(below, EXIT_SECONDS):
            logger.warning("pid %d did not end with Ray and was killed", process.pid)
        self._deadline.cancel()

    def _found(self) -> Any | None:
        return supervisor_actor.find(self._config.ray.namespace)

    def _created(self) -> Any:
        # A Ray of this machine's own keeps nothing beyond its end, so the record outlives it in the state folder.
        record = str(state.record()) if self._config.local else ""
        return supervisor_actor.create(self._config, self._token, record)

    def _update(self, **fields: Any) -> None:
        self.state = replace(self.state, **fields)
        self._save(self.state)

    def _connect(self) -> None:
        if self._config.local:
            context = self._start_ray()
        else:
            address, namespace = self._config.ray.address, self._config.ray.namespace
            if address != AUTO:
                _check_reachable(address)
            context = supervisor_actor.connect(f"--address {address}", address=address, namespace=namespace)
            if self._found() is not None and not self._resume:
                ray.shutdown()
                raise RunError(f"ray.namespace {namespace}: a kvrelay cluster is running there already")
        try:
            self._config = self._config.with_gpus(*present_gpus())
        except ValueError as error:
            raise UsageError(str(error)) from None
        state.keep_logs(Path(_logs()) if self._config.local else None)
        dashboard = f"http://{context.dashboard_url}" if context.dashboard_url else ""
        self._session = Path(context.address_info["session_dir"])
        gcs, own = context.address_info["gcs_address"], context.address_info["node_id"]
        node = next(node for node in ray.nodes() if node["NodeID"] == own)  # type: ignore[no-untyped-call]
        self.addresses = Addresses(gcs, join(node["NodeManagerAddress"], node["NodeManagerPort"]))
        self._update(ray_address=gcs, dashboard=dashboard)

    def _add_dashboards(self) -> None:
        """Puts kvrelay's dashboards beside Ray's own, for a Grafana that is provisioned from Ray's session."""
        chosen = os.environ.get(GRAFANA_FOLDER_VARIABLE)
        folder = Path(chosen) if chosen else self._session / "metrics" / "grafana" / "dashboards"
        try:
            dashboards.write(folder, dashboards.RAY_PREFIX)
        except OSError as error:
            logger.warning("no dashboards in %s: %s", folder, error.strerror)

    def _start_ray(self) -> Any:
        section = self._config.ray
        try:
            return supervisor_actor.connect(
                "Ray did not start",
                address="local",
                num_cpus=available_cores(),
                resources={MEMBER: MEMBERS},
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=section.include_dashboard,
                dashboard_host=section.dashboard_host,
                dashboard_port=section.dashboard_port or None,
                namespace=section.namespace,
            )
        finally:
            self._signals.install()  # Ray has put a handler of its own in their place

    def _ask(self, method: Any) -> Any:
        """The answer of the supervisor's actor; signals are checked while it is awaited."""
        answer = method.remote()
        deadline = time.monotonic() + STALL_SECONDS
        while not ray.wait([answer], timeout=POLL_SECONDS)[0]:
            self._signals.check()
            if time.monotonic() > deadline:
                raise RunError(f"the supervisor does not answer within {STALL_SECONDS:g} s; see {_logs()}")
        try:
            return ray.get(answer)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            raise RunError(f"the supervisor: {' '.join(str(cause).split())}; see {_logs()}") from error

    def _until_ready(self) -> "Startup":
        """Returns when every member is ready, or when requests can be served and the others make no progress.

        Raises:
            ClusterError: the start can't succeed, or nothing is served and nobody makes progress.
        """
        last: Startup | None = None
        changed = time.monotonic()
        while True:
            startup: Startup = self._ask(self._supervisor.startup)
            self._report.progress(startup.members)
            check_failures(startup)
            everyone = all(member.state == MEMBER_STATE_READY for member in startup.members)
            if startup.ready and everyone and all(serves(router, self.state.router_tls) for router in startup.routers):
                return startup
            if startup != last or self._kernels.is_alive():
                last, changed = startup, time.monotonic()
            elif time.monotonic() - changed > STALL_SECONDS:
                missing = listed(member.name for member in startup.members if member.state != MEMBER_STATE_READY)
                if startup.ready:
                    self._report.phase(f"serving without {missing}, which did not come up in {STALL_SECONDS:g} s")
                    return startup
                waits = listed(f"{each.name} waits for {each.waits_for}" for each in startup.members if each.waits_for)
                waits = waits and f"; {waits}"
                raise RunError(f"not ready: no progress of {missing} in {STALL_SECONDS:g} s{waits}; see {_logs()}")
            self._signals.wait(POLL_SECONDS)
            self._signals.check()


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps Ray's driver from writing to this process's output; Ray's log files have all of it."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def _check_reachable(address: str) -> None:
    """Fails at once where Ray itself would try for a minute and print to stderr."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError as error:
        raise RunError(f"--address {address}: {error.strerror or error}") from None


def check_failures(startup: "Startup") -> None:
    """Ends a start that can't succeed.

    Raises:
        UsageError: members have ended because of their configuration; a line for each.
        RunError: a member has ended MOST_FAILURES times.
    """
    if hopeless := [f"{member.name}: {member.reason}" for member in startup.members if member.hopeless]:
        raise UsageError(*hopeless)
    for member in startup.members:
        if member.failures >= MOST_FAILURES:
            raise RunError(
                f"{member.name} ended {member.failures} times while starting: {member.reason}; see {_logs()}"
            )


def _logs() -> str:
    """The folder of Ray's log files."""
    context = ray.get_runtime_context()
    return f"{context.get_temp_dir()}/{context.get_session_name()}/logs"
