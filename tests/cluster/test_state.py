"""The record of this machine's cluster: never a dead one, never two."""

import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrelay.cluster import state
from kvrelay.cluster.errors import RunError
from kvrelay.cluster.state import ClusterState

SECONDS = 10.0
OWNER = """
import os, sys, time
from kvrelay.cluster import state
with state.owned():
    state.save(state.ClusterState(pid=os.getpid(), namespace="kvrelay", router="127.0.0.1:5"))
    print("owned", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRELAY_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@contextmanager
def owner() -> Iterator[subprocess.Popen[str]]:
    """A process that owns a cluster until its stdin is closed."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "owned\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_folder_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert state.folder() == tmp_path / "state"
    monkeypatch.delenv("KVRELAY_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state.folder() == tmp_path / "xdg" / "kvrelay"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert state.folder() == tmp_path / "home" / ".local" / "state" / "kvrelay"


def test_a_folder_that_cannot_be_used_is_one_line_that_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVRELAY_STATE_DIR", str(tmp_path / "file" / "state"))
    with pytest.raises(RunError, match=r"file/state: Not a directory; KVRELAY_STATE_DIR names"):
        state.current()
    monkeypatch.setenv("KVRELAY_STATE_DIR", str(folder))
    monkeypatch.setattr("os.access", lambda path, mode: path != folder)  # as for another user's
    with pytest.raises(RunError, match="state: not this user's to write; KVRELAY_STATE_DIR names"):
        state.current()


def test_only_the_user_can_read_the_record(folder: Path) -> None:
    state.save(ClusterState(pid=None, namespace="n", router="127.0.0.1:5"))
    assert stat.S_IMODE((folder / "cluster.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert state.current() == ClusterState(pid=None, namespace="n", router="127.0.0.1:5")


def test_a_running_owner_is_found_and_keeps_a_second_one_out() -> None:
    with owner() as process:
        current = state.current()
        assert current is not None
        assert current.pid == process.pid
        with pytest.raises(RunError, match=f"already running \\(pid {process.pid}\\)"), state.owned():
            raise AssertionError("two owners")
        assert state.current() == current


def test_an_owner_that_ends_removes_its_record() -> None:
    with owner() as process:
        process.communicate()
        assert process.returncode == 0
    assert state.current() is None
    with state.owned(), pytest.raises(RunError, match="already running"), state.owned():
        raise AssertionError("two owners")
    with state.owned():
        pass  # the lock is free again


def test_the_record_of_a_killed_owner_is_removed(folder: Path) -> None:
    with owner() as process:
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS)
        assert (folder / "cluster.json").exists()
        assert state.current() is None
        assert not (folder / "cluster.json").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": 1, "namespace": "n", "more": 1}'])
def test_a_file_that_is_no_record_is_removed(folder: Path, text: str) -> None:
    state.folder()
    (folder / "cluster.json").write_text(text)
    assert state.current() is None
    assert not (folder / "cluster.json").exists()
