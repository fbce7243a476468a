"""`kvrelay up` when its Ray driver is lost, when Ray hangs, and when a member can't start. A fake driver stands in for
Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kvrelay.cluster.errors import UsageError
from kvrelay.cluster.fleet.replacement import ProcessEnd
from kvrelay.cluster.processes.processes import alive, find
from kvrelay.cluster.ray import watch
from kvrelay.cluster.state import ClusterState
from kvrelay.cluster.supervisor.supervisor import MemberStart, Startup
from kvrelay.cluster.up.down import down
from kvrelay.cluster.up.launch import Cluster, check_failures
from kvrelay.cluster.up.report import Report
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_READY,
    ROLE_ROUTER,
    GetStatusResponse,
    Member,
    MemberStatus,
)
from kvrelay.machine.silence import SILENT_SECONDS
from support.processes import wait_until

SECONDS = 30.0
NOTICED_SECONDS = 10.0
DRIVER = """
import json, os, signal, sys, threading, time
from pathlib import Path
folder = Path(sys.argv[1])
sys.stdin.readline()
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
tell = lambda **event: print(json.dumps(event), flush=True)
starts = len(list(folder.glob("start-*")))
(folder / f"start-{starts}").write_text(str(os.getpid()))
if starts and (folder / "fail").exists():
    tell(error=["Ray did not start"], code=1)
    sys.exit(1)
tell(state={"pid": None, "namespace": "kvrelay", "router": f"127.0.0.1:{starts + 1}"})
tell(ready={"gcs": "127.0.0.1:1", "raylet": "127.0.0.1:1"})
ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
while not ended.wait(0.2):
    tell()
(folder / "ended").touch()
"""
OWNER = """
import sys
from kvrelay.cluster.up import owner
from kvrelay.cli.common import console
from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.fleet import replacement
from kvrelay.cluster.up.report import Report
replacement.FIRST_SECONDS = 0.02
owner.COMMAND = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
try:
    config = ClusterConfig(drain_seconds=0)
    owner.run(config, Report(console()), lambda state: None, unattended="unattended" in sys.argv)
except ClusterError as error:
    sys.exit("\\n".join(error.lines))
"""
STUCK = """
import ctypes, subprocess, sys
import ray
from kvrelay.cluster.ray import supervisor_actor
from kvrelay.cluster.up import launch
from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.cli.common import console
from kvrelay.cluster.up.report import Report
from kvrelay.cluster.secrets import Secured
from kvrelay.cluster.signals import Signals

def stuck(*args, **options):
    # In C code no signal handler of Python's runs.
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

launch.STALL_SECONDS = launch.END_SECONDS = 1.0
supervisor_actor.connect = supervisor_actor.end = stuck
config = ClusterConfig(drain_seconds=0.0)
cluster = launch.Cluster(Secured(config, "", ""), Report(console()), Signals(), lambda state: None)
if sys.argv[1] == "stop":
    ray.is_initialized = lambda: True
    cluster._supervisor = object()
getattr(cluster, sys.argv[1])()
"""


@dataclass
class Up:
    """A running owner."""

    folder: Path
    process: subprocess.Popen[str]

    def state(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / "cluster.json").read_text()))
        except FileNotFoundError:
            return {}

    def serves(self, start: int) -> bool:
        """Whether the driver of this start is ready."""
        return self.state().get("router") == f"127.0.0.1:{start + 1}"

    def driver(self, start: int) -> int:
        return int((self.folder / f"start-{start}").read_text())

    def signal(self, start: int, number: signal.Signals) -> None:
        wait_until(lambda: self.serves(start), f"start {start} serves", SECONDS)
        os.kill(self.driver(start), number)


@pytest.fixture
def up(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Up]:
    environment = os.environ | {"KVRELAY_STATE_DIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, DRIVER, str(tmp_path), *getattr(request, "param", [])],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Up(tmp_path, process)
    finally:
        process.kill()
        process.communicate()


def test_a_lost_driver_is_started_again_and_a_signal_ends_all(up: Up) -> None:
    up.signal(0, signal.SIGKILL)
    killed = time.monotonic()
    wait_until(lambda: up.serves(1), "it serves again", SECONDS)
    killed = time.monotonic() - killed
    up.signal(1, signal.SIGSTOP)
    frozen = time.monotonic()
    wait_until(lambda: "has not answered" in up.state().get("trouble", ""), "it is noticed", NOTICED_SECONDS)
    wait_until(lambda: up.serves(2), "it serves again", SECONDS)
    assert time.monotonic() - frozen < killed + SILENT_SECONDS + 5.0  # 0.5 s on a machine that isn't busy
    assert up.state()["trouble"] == ""
    assert find(up.driver(1)) is None
    up.process.terminate()
    out, err = up.process.communicate(timeout=SECONDS)
    assert (up.process.returncode, err) == (0, "")
    assert (up.folder / "ended").exists(), "the driver was asked to end the cluster"
    assert "was killed by SIGKILL; starting anew" in out
    assert not (up.folder / "cluster.json").exists()


def test_a_cluster_that_cannot_be_started_anew_ends_up_with_the_reason(up: Up) -> None:
    (up.folder / "fail").touch()
    up.signal(0, signal.SIGKILL)
    _, err = up.process.communicate(timeout=SECONDS)
    assert up.process.returncode == 1
    assert err.splitlines() == [
        f"the driver (pid {up.driver(0)}) was killed by SIGKILL",
        "it can't be started anew: Ray did not start",
    ]


@pytest.mark.parametrize("up", [["unattended"]], indirect=True)
def test_an_unattended_one_goes_on_trying(up: Up) -> None:
    (up.folder / "fail").touch()
    up.signal(0, signal.SIGKILL)
    wait_until(lambda: (up.folder / "start-4").exists(), "four more starts", SECONDS)
    (up.folder / "fail").unlink()
    wait_until(lambda: up.state().get("router"), "it serves again", SECONDS)
    assert up.process.poll() is None


def test_the_driver_ends_with_its_owner(up: Up) -> None:
    wait_until(lambda: up.serves(0), "it serves", SECONDS)
    driver = find(up.driver(0))
    up.process.kill()
    wait_until(lambda: driver is None or not alive(driver), "the driver has ended", SECONDS)


@pytest.mark.more
@pytest.mark.parametrize(
    ("step", "said"),
    [("start", "Ray did not answer within 1 s"), ("stop", "the cluster did not end within 1 s")],
)
def test_a_ray_that_hangs_ends_the_step_in_time(
    step: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_STATE_DIR", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, step], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 1, err
    assert f"kvrelay: {said}\n" in err
    child = find(int(out.split()[-1]))
    wait_until(lambda: child is None or not alive(child), "its child has ended")


def test_a_hopeless_member_ends_the_start_with_its_reason() -> None:
    members = [
        MemberStart("router-0"),
        MemberStart("prefill-0", failures=1, reason="kv_memory_bytes is 1000", hopeless=True),
    ]
    with pytest.raises(UsageError) as caught:
        check_failures(Startup(False, (), (), members))
    assert caught.value.lines == ["prefill-0: kv_memory_bytes is 1000"]
    check_failures(Startup(False, (), (), [MemberStart("prefill-0", failures=2, reason="killed")]))


def test_a_cluster_whose_router_is_replaced_meanwhile_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        records = [ClusterState(owner.pid, "kvrelay", router=router) for router in ("127.0.0.1:5", "127.0.0.1:6")]
        monkeypatch.setattr("kvrelay.cluster.state.current", lambda: records.pop(0))
        try:
            assert down(Report(Console(quiet=True)))
            assert owner.wait(SECONDS) == -signal.SIGTERM
        finally:
            owner.kill()


def test_each_end_of_a_supervisor_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    full, none = ProcessEnd("the disk is full"), None
    answers = [none, full, full, full, none, full, full]
    told: list[str] = []
    cluster = object.__new__(Cluster)
    watched = SimpleNamespace(remote=lambda seconds: answers.pop(0))
    monkeypatch.setattr(cluster, "_supervisor", SimpleNamespace(watch=watched), raising=False)
    monkeypatch.setattr(cluster, "_signals", SimpleNamespace(wait=lambda seconds: not answers), raising=False)
    monkeypatch.setattr(cluster, "_report", SimpleNamespace(phase=told.append), raising=False)
    monkeypatch.setattr("ray.wait", lambda calls, timeout: (calls, []))
    monkeypatch.setattr("ray.get", lambda call: call)
    cluster.wait()
    assert told == ["the supervisor has ended and is started again: the disk is full"] * 2


def test_a_joined_cluster_is_not_lost_while_a_router_on_another_node_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVERY_SECONDS", 0.01)
    router = Member(name="router-0", role=ROLE_ROUTER, state=MEMBER_STATE_READY, address="10.0.0.2:5")
    status: GetStatusResponse | None = GetStatusResponse(members=[MemberStatus(member=router)])
    serving = {"10.0.0.2:5"}
    asked: list[str] = []

    def serves(routers: str, tls: bool, timeout: float) -> bool:
        asked.append(routers)
        return routers in serving

    monkeypatch.setattr(watch, "get_status", lambda state, timeout: status)
    monkeypatch.setattr(watch, "answers", lambda address: False)
    monkeypatch.setattr(watch, "serves", serves)
    joined = watch.JoinedWatch(ClusterState(1, "kvrelay", ray_address="10.0.0.1:6379", router="10.0.0.1:5"))
    try:
        wait_until(lambda: joined.routers == {"router": "10.0.0.2:5", "http": ""}, "its router is known", SECONDS)
        status = None
        wait_until(lambda: len(asked) > 2 * watch.MOST_FAILURES, "asked often", SECONDS)
        assert joined.lost() == ""
        serving.clear()
        wait_until(lambda: joined.lost() != "", "it is lost", SECONDS)
    finally:
        joined.close()
