"""A pod's end: its members drain first, and the hook waits for them, but not for ever."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvrelay.cluster.ray import metrics as ray_metrics
from kvrelay.cluster.ray.actors import LEAVING, ServerActor
from kvrelay.cluster.ray.node_drain import VARIABLE, Registration, drain
from kvrelay.rpc.metrics.metric_set import MetricSet
from kvrelay.rpc.serve import ExitDeadline

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


class Member(ServerActor[Serving]):
    """An actor in this process, without Ray."""

    drain_seconds = SECONDS
    deadline_type = NoDeadline

    def __init__(self, server: Serving) -> None:
        super().__init__("worker", "decode-0", "decode-0", lambda: server, "")


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the export of metrics to Ray: no agent of Ray is here to take them."""
    monkeypatch.setattr(ray_metrics, "export", lambda metrics: asyncio.sleep(0))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
        deadline = time.monotonic() + SECONDS
        while server.grace is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.grace == SECONDS
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


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    registration = Registration("decode-0")
    registration.done()
    assert not registration.requested
    assert os.listdir(tmp_path) == []
