"""`kvrelay logs`: which lines are shown, in which order, and as what."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cluster import state
from kvrelay.cluster.cli import main
from kvrelay.cluster.errors import UsageError
from kvrelay.cluster.logs.entry import Entry, Parser, Wanted, parse_since
from kvrelay.cluster.logs.sources import Files

SECONDS = 30


def line(second: int, name: str, level: str = "info", **more: object) -> str:
    head = {"time": f"2026-01-01T00:00:{second:02d}.000Z", "level": level, "logger": "kvrelay.x", "part": "worker"}
    return json.dumps({**head, "name": name, "message": f"at {second}", **more}) + "\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The logs of a cluster that ran here and has ended."""
    monkeypatch.setenv("KVRELAY_STATE_DIR", str(tmp_path / "state"))
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "worker-1.err").write_text(
        ":job_id:01\n:actor_name:prefill-0\n"
        + line(1, "prefill-0", incarnation="a")
        + line(4, "prefill-0", "error", exception="Traceback\n  File")
        + "terminate called in C++\n"
    )
    (logs / "worker-2.err").write_text(
        line(2, "decode-0", request="mine/0123", attempt=1)
        + line(3, "decode-0", "warning", request="another")
        + line(5, "decode-0", request="mine")
    )
    (logs / "raylet.err").write_text("not ours\n")
    state.keep_logs(logs)
    return logs


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("logs", *arguments))


def shown(*arguments: str) -> list[tuple[str, str]]:
    """Name and message of each line."""
    result = call("--json", *arguments)
    assert result.exit_code == 0, result.output
    return [(entry["name"], entry["message"]) for entry in map(json.loads, result.stdout.splitlines())]


def test_lines_of_all_members_come_in_the_order_of_time(folder: Path) -> None:
    assert shown() == [
        ("prefill-0", "at 1"),
        ("decode-0", "at 2"),
        ("decode-0", "at 3"),
        ("prefill-0", "at 4"),
        ("prefill-0", "terminate called in C++"),
        ("decode-0", "at 5"),
    ]


def test_lines_are_chosen(folder: Path) -> None:
    assert shown("decode-0", "--tail", "1") == [("decode-0", "at 5")]
    assert shown("--request", "mine") == [("decode-0", "at 2"), ("decode-0", "at 5")]
    assert shown("--request", "cmpl-mine") == [("decode-0", "at 2"), ("decode-0", "at 5")]
    assert [message for _, message in shown("--level", "warning")] == ["at 3", "at 4", "terminate called in C++"]
    assert shown("--since", "2026-01-01T00:00:05+00:00") == [("decode-0", "at 5")]
    assert shown("nobody") == []


def test_people_get_text(folder: Path) -> None:
    text = call("--level", "error").stdout
    assert "prefill-0" in text
    assert "at 4\n    Traceback\n      File" in text
    assert "incarnation=a" in call("prefill-0").stdout


@given(st.lists(st.integers(0, 400), max_size=6))
def test_entries_don_t_depend_on_how_the_file_is_read(cuts: list[int]) -> None:
    text = line(1, "a", note="ä") + "loose\n" + line(2, "a")
    parser, found, start = Parser(), [], 0
    for cut in [*sorted(cuts), len(text)]:
        found += parser.take(text[start:cut])
        start = max(start, cut)
    assert found == list(Parser().take(text))
    assert [entry.fields["message"] for entry in found] == ["at 1", "loose", "at 2"]


def test_following_shows_new_lines_and_new_files(folder: Path) -> None:
    entries: list[Entry] = []
    two = threading.Event()

    def read() -> None:
        for entry in filter(Wanted(member="decode-1"), Files(folder).follow()):
            entries.append(entry)
            if len(entries) == 2:
                two.set()
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    fresh = folder / "worker-3.err"
    fresh.write_text(line(7, "decode-1") + line(8, "decode-1")[:20])
    with fresh.open("a") as file:
        file.write(line(8, "decode-1")[20:])
    assert two.wait(SECONDS)
    assert [entry.fields["message"] for entry in entries] == ["at 7", "at 8"]
    reader.join(SECONDS)


def test_a_reader_that_leaves_ends_the_command(folder: Path) -> None:
    command = [sys.executable, "-m", "kvrelay.cluster.cli", "logs", "--follow", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ.copy()) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["message"] == "at 1"
        process.stdout.close()
        with (folder / "worker-1.err").open("a") as file:
            file.write(line(9, "prefill-0") * 5000)
        assert process.wait(SECONDS) == 1
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_mistakes_are_one_line(folder: Path, tmp_path: Path) -> None:
    for text in ("yesterday", "5x", ""):
        with pytest.raises(UsageError, match="--since is"):
            parse_since(text)
    state.keep_logs(tmp_path / "gone")
    result = call()
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert "there is no folder" in result.stderr
    state.keep_logs(None)
    assert "no cluster is running" in call().stderr
    assert shown("--folder", str(folder), "--tail", "1") == [("decode-0", "at 5")]
