"""The servers in Ray's actors: the address that a router tells, the metrics that Ray exports, the end of a pod."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.cluster.ray import metrics as ray_metrics
from kvrelay.cluster.ray.actors import LEAVING, RankHostActor, ServerActor, reachable
from kvrelay.cluster.ray.node_drain import VARIABLE, Registration, drain
from kvrelay.cluster.ray.supervisor_actor import SupervisorActor
from kvrelay.cluster.supervisor.supervisor import Startup, SupervisorServer
from kvrelay.router.config import RouterConfig
from kvrelay.router.server import RouterServer
from kvrelay.rpc.metrics import families
from kvrelay.rpc.metrics.metric_set import MetricSet
from kvrelay.rpc.serve import ExitDeadline
from support.processes import wait_until

SECONDS = 60.0


class Serving:
    """A server with one request that lasts until `finish` is set."""

    address = "127.0.0.1:1"

    def __init__(self) -> None:
        self.metrics = MetricSet("supervisor")
        self.finish = threading.Event()
        self.grace: float | None = None

    async def start(self) -> None:
        """Does nothing: this server binds no port."""

    async def failed(self) -> BaseException:
        await asyncio.Event().wait()
        raise AssertionError

    async def stop(self, grace: float) -> None:
        self.grace = grace
        await asyncio.to_thread(self.finish.wait, grace)


class NoDeadline(ExitDeadline):
    """Ends no process: that of the tests isn't a member's own."""

    def set(self, seconds: float, code: int, message: str = "") -> None:
        """Nothing."""


class Supervising(SupervisorActor):
    """The supervisor's actor with another server, in this process, without Ray."""

    def __init__(self, server: Any) -> None:
        ServerActor.__init__(self, "supervisor", "supervisor", "supervisor", lambda: server, "")


class Member(ServerActor[Serving]):
    """An actor in this process, without Ray."""

    drain_seconds = SECONDS

    def __init__(self, server: Serving) -> None:
        super().__init__("worker", "decode-0", "decode-0", lambda: server, "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where members are registered. The metrics aren't exported: no agent of Ray is here to take them."""
    monkeypatch.setattr(ray_metrics, "export", lambda metrics: asyncio.sleep(0))
    monkeypatch.setattr("kvrelay.cluster.ray.actors.ExitDeadline", NoDeadline)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "drain"))
    return tmp_path / "drain"


def hook(seconds: float) -> "subprocess.Popen[str]":
    """The command of the chart's preStop hook."""
    command = [sys.executable, "-m", "kvrelay.cluster.ray.node_drain", str(seconds)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_the_hook_waits_until_the_requests_have_finished(folder: Path) -> None:
    server = Serving()
    member = Member(server)
    assert member.address() == server.address
    with hook(SECONDS) as process:
        wait_until(lambda: server.grace == SECONDS, "the member drains", SECONDS)
        assert process.poll() is None
        assert member.watch(0) is None
        server.finish.set()
        assert process.wait(SECONDS) == 0
    ended = member.watch(SECONDS)
    assert ended is not None
    assert (ended.reason, ended.mistake) == (LEAVING, False)


def test_the_hook_gives_up_in_time_and_names_who_is_left(folder: Path) -> None:
    Registration("decode-0")
    with hook(0.1) as process:
        assert process.wait(SECONDS) == 1
        assert process.stderr is not None
        assert "not drained: decode-0" in process.stderr.read()


def test_a_member_that_is_gone_is_not_waited_for(folder: Path) -> None:
    Registration("decode-0")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (folder / "decode-0").write_text(str(ended.pid))
    assert drain(folder, SECONDS) == []


def test_a_replacement_on_a_node_that_stops_ends_at_once(folder: Path) -> None:
    drain(folder, 0)
    ended = Member(Serving()).watch(SECONDS)
    assert ended is not None
    assert ended.reason == LEAVING


def test_a_worker_drains_when_the_node_of_its_further_ranks_is_to_stop(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Serving()
    server.finish.set()
    member = Member(server)
    assert member.address() == server.address
    monkeypatch.setattr("ray.get_gpu_ids", list)
    monkeypatch.setattr(RankHostActor, "_run", lambda actor, address: None)
    monkeypatch.setenv(VARIABLE, str(folder.with_name("another node")))
    agent = RankHostActor("decode-0", 1, "", "")
    agent.begin("127.0.0.1:1", SimpleNamespace(leave=SimpleNamespace(remote=member.leave)))
    assert member.watch(0) is None
    assert drain(folder.with_name("another node"), 0) == ["decode-0 host 1"], "until its ranks have ended"
    ended = member.watch(SECONDS)
    assert ended is not None
    assert ended.reason == LEAVING


@pytest.mark.usefixtures("folder")
def test_the_supervisor_is_asked_on_its_event_loop_which_changes_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def startup(server: Serving) -> Startup:
        assert asyncio.get_running_loop().is_running()
        return Startup(ready=server.grace is None, routers=(), http=(), members=[])

    monkeypatch.setattr(SupervisorServer, "startup", startup)
    monkeypatch.setattr(Serving, "startup", startup, raising=False)
    server = Serving()
    server.finish.set()
    actor = Supervising(server)
    assert actor.startup() == Startup(True, (), (), [])
    actor.stop(0.0)
    with pytest.raises(RuntimeError):
        actor.startup()


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    registration = Registration("decode-0")
    registration.done()
    assert not registration.requested
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("host", "told"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", "localhost")],
)
async def test_a_router_tells_others_an_address_at_which_they_reach_it(host: str, told: str) -> None:
    router = RouterServer(reachable(RouterConfig(host=host, grpc_port=0, http_port=None), local=True))
    port = await router.start()
    try:
        assert router.address == f"{told}:{port}"
    finally:
        await router.stop(0.0)


class Ray:
    """Takes gauges as Ray's own class does; the first values only when `answering` is set."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self.threads: set[int] = set()
        self.answering = threading.Event()

    def gauge(self, name: str, description: str, labels: tuple[str, ...]) -> "Gauge":
        assert description
        return Gauge(self, name, labels)


class Gauge:
    def __init__(self, ray: Ray, name: str, labels: tuple[str, ...]) -> None:
        self._ray, self._name, self._labels = ray, name, labels

    def set(self, value: float, labels: dict[str, str]) -> None:
        assert self._ray.answering.wait(SECONDS)
        self._ray.threads.add(threading.get_ident())
        self._ray.values[self._name, *(labels[name] for name in self._labels)] = value


async def test_values_are_taken_on_the_event_loop_and_handed_over_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, metrics, read_by = Ray(), MetricSet("supervisor"), list[int]()
    begun, changed = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(ray_metrics, "Gauge", ray.gauge)
    monkeypatch.setattr(ray_metrics, "INTERVAL_SECONDS", 0.0)

    def update() -> None:
        read_by.append(threading.get_ident())
        metrics.gauge(families.HEARTBEAT_AGE, "worker-0").set(len(read_by))
        begun.set()
        if len(read_by) > 2:
            changed.set()
        elif len(read_by) == 2:
            raise OSError("once")  # which ends nothing

    metrics.before_scrape(update)
    exporting = asyncio.create_task(ray_metrics.export(metrics))
    await asyncio.wait_for(begun.wait(), SECONDS)
    await asyncio.sleep(0)  # the event loop goes on though Ray doesn't answer
    assert ray.values == {}
    ray.answering.set()
    await asyncio.wait_for(changed.wait(), SECONDS)
    exporting.cancel()
    await asyncio.wait((exporting,))
    assert exporting.cancelled()
    assert set(read_by) == {threading.get_ident()}
    assert threading.get_ident() not in ray.threads
    assert ray.values["kvrelay_supervisor_heartbeat_age_seconds", "worker-0"] >= 1.0
    assert all(name.startswith("kvrelay_") and not name.endswith("_created") for name, *_ in ray.values)
