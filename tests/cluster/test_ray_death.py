"""Each process of a running cluster is killed or frozen: it serves again, or `kvrelay up` has ended with the reason.

The cases share one cluster, since a start of Ray takes long.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvrelay.cluster.asking.status import serves
from kvrelay.cluster.processes.processes import title
from support.processes import wait_until
from support.ray_commands import START_SECONDS, STOP_SECONDS, World, cluster_processes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NOTICED_SECONDS = 10.0
AGAIN_SECONDS = 30.0
"""Seconds within which it serves again; on a slow machine, twice the time of the cluster's own start."""
POLL_SECONDS = 0.2
ENDING = ("gcs_server", "raylet", "dashboard_agent", "runtime_env_agent", "driver")
"""Kinds whose end ends Ray, so that it is started anew."""
AGENTS = ("dashboard_agent", "runtime_env_agent")
"""Agents of Ray, which harm no request while they are frozen."""
SPARED = ("monitor", "dashboard", "log_monitor")
MEMBERS = ("supervisor", "router", "worker")


class Cluster:
    """A detached cluster, and how long it took to start."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder)
        self.state = folder / "state"
        begun = time.monotonic()
        config = folder / "kvrelay.yaml"
        config.write_text("drain_seconds: 1\n")
        self.world.up("--config", str(config))
        self.again_seconds = max(AGAIN_SECONDS, 2 * (time.monotonic() - begun))
        self.answer = self.world.generate()

    def pids(self) -> dict[str, list[int]]:
        return cluster_processes(self.state)

    def serves(self) -> bool:
        """Whether it is whole and answers."""
        with contextlib.suppress(FileNotFoundError):
            remembered = self.world.remembered()
            if not remembered["router"] or not serves(remembered["router"], False, 1.0):
                return False
            status = self.world.status()
            members = status["workers"] + status["routers"]
            return bool(status["ready"]) and len(members) == 3 and all(each["state"] == "ready" for each in members)
        return False

    def strike(self, kind: str, number: signal.Signals) -> float:
        """Sends a signal to a process of this kind; returns the seconds until the cluster is whole again."""
        wait_until(self.serves, "it is whole before", START_SECONDS, POLL_SECONDS)
        pid = self.pids()[kind][0]
        begun = time.monotonic()
        os.kill(pid, number)
        try:
            if kind in ENDING:
                trouble = wait_until(
                    lambda: self.world.remembered()["trouble"], f"{kind}: noticed", NOTICED_SECONDS, POLL_SECONDS
                )
                assert f"pid {pid}" in trouble or number == signal.SIGSTOP
                said = self.world.call("status").stdout
                assert said.startswith("the cluster is lost and being started anew: ") or self.serves()
            elif kind in MEMBERS:
                wait_until(
                    lambda: not psutil.pid_exists(pid), f"{kind}: it has ended", self.again_seconds, POLL_SECONDS
                )
            wait_until(self.serves, f"{kind}: serves again", self.again_seconds, POLL_SECONDS)
            seconds = time.monotonic() - begun
            assert self.world.generate() == self.answer
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return seconds


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("death")
    try:
        yield Cluster(folder)
    finally:
        World(folder).call("down", seconds=STOP_SECONDS)


def test_every_process_listens_on_loopback_only(cluster: Cluster) -> None:
    own = {pid for pids in cluster.pids().values() for pid in pids}
    found = []
    for pid in own:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            listening = (each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
            found += [(each.laddr.ip, title(process)[:60]) for each in listening]
    assert len(found) > 10, "Ray's processes and the members listen"
    assert [each for each in found if each[0] not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")] == []


@pytest.mark.parametrize("kind", ["worker", "supervisor"])
def test_a_frozen_one_is_replaced(cluster: Cluster, kind: str) -> None:
    cluster.strike(kind, signal.SIGSTOP)


def test_a_killed_agent_of_ray_ends_in_a_new_start_that_keeps_the_desired_state(cluster: Cluster) -> None:
    before = cluster.world.json("status")["desired"]["revision"]
    cluster.strike("dashboard_agent", signal.SIGKILL)
    assert cluster.world.json("status")["desired"]["revision"] >= before
    assert "Ray's dashboard agent" in (cluster.state / "up.out").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*ENDING, *SPARED, *MEMBERS])
def test_each_process_may_be_killed_or_frozen(cluster: Cluster, kind: str) -> None:
    killed = cluster.strike(kind, signal.SIGKILL)
    if kind in SPARED:
        wait_until(lambda: cluster.world.remembered()["missing"], "its end is told", NOTICED_SECONDS, POLL_SECONDS)
        cluster.strike("driver", signal.SIGKILL)  # a new start brings it back
    if kind not in AGENTS:
        frozen = cluster.strike(kind, signal.SIGSTOP)
        print(f"{kind}: whole again {killed:.1f} s after SIGKILL, {frozen:.1f} s after SIGSTOP")


@pytest.mark.slow
def test_members_are_replaced_while_rays_agents_are_frozen(cluster: Cluster) -> None:
    wait_until(cluster.serves, "it is whole before", START_SECONDS, POLL_SECONDS)
    pids = cluster.pids()
    frozen = pids["dashboard_agent"] + pids["runtime_env_agent"]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        cluster.strike("worker", signal.SIGKILL)
        cluster.strike("router", signal.SIGKILL)
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)


def test_the_end_of_up_ends_everything(cluster: Cluster) -> None:
    """The last test of this file: it ends the shared cluster."""
    wait_until(cluster.serves, "it is whole before", START_SECONDS, POLL_SECONDS)
    (up,) = cluster.pids()["up"]
    os.kill(up, signal.SIGKILL)
    wait_until(lambda: cluster.pids() == {}, lambda: f"all have ended: {cluster.pids()}", NOTICED_SECONDS, POLL_SECONDS)
    assert cluster.world.call("status").stdout == "no cluster is running; `kvrelay up` starts one\n"
