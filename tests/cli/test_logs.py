"""`kvrelay logs`: which lines are shown, in which order, and as what."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from command import call, fails
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cli.logs.entry import Parser, parse_since
from kvrelay.cli.logs.sources import Files, RayActors, Source
from kvrelay.cluster import state
from kvrelay.cluster.errors import RunError, UsageError
from support.processes import wait_until

SECONDS = 30


def line(second: int, name: str, level: str = "info", **more: object) -> str:
    head = {"time": f"2026-01-01T00:00:{second:02d}.000Z", "level": level, "logger": "kvrelay.x", "part": "worker"}
    return json.dumps({**head, "name": name, "message": f"at {second}", **more}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The logs of a cluster that ran here and has ended."""
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


def shown(*arguments: str) -> list[tuple[str, str]]:
    """Name and message of each line."""
    result = call("logs", "--json", *arguments)
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


def test_people_get_text(folder: Path) -> None:
    text = call("logs", "--level", "error").stdout
    assert "prefill-0" in text
    assert "at 4\n    Traceback\n      File" in text
    assert "incarnation=a" in call("logs", "prefill-0").stdout


@given(st.lists(st.integers(0, 400), max_size=6))
def test_entries_don_t_depend_on_how_the_file_is_read(cuts: list[int]) -> None:
    text = line(1, "a", note="ä") + "loose\n" + line(2, "a")
    parser, found, start = Parser(), [], 0
    for cut in [*sorted(cuts), len(text)]:
        found += parser.take(text[start:cut])
        start = max(start, cut)
    assert found == list(Parser().take(text))
    assert [entry.fields["message"] for entry in found] == ["at 1", "loose", "at 2"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("decode-1",), "no log is of 'decode-1'; there are those of decode-0, prefill-0"),
        (("--request", "theirs"), "no line is about request 'theirs'; .*`kvrelay doctor theirs`"),
        (("--request", "cmpl-min"), "no line is about request 'min'; "),
        (("prefill-0", "--request", "mine"), "no line of prefill-0 is about request 'mine'; "),
    ],
)
def test_a_member_or_request_that_no_log_knows_is_an_error(
    folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = call("logs", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(f"kvrelay: {words}.*\n", result.stderr), result.stderr
    later = ("decode-0", "--request", "mine", "--level", "error")
    assert (call("logs", *later).exit_code, call("logs", *later).output) == (0, ""), "it is known, but has no error"


def test_a_line_of_another_program_is_text_whatever_it_calls_time() -> None:
    odd = ['{"time": 1700000000.5, "message": "x"}', '{"time": "soon", "message": "x"}', '{"time": null, "message": 1}']
    _, *found = Parser().take(line(1, "a") + "\n".join(odd) + "\n")
    assert [entry.fields["message"] for entry in found] == odd
    assert {(entry.name, entry.time) for entry in found} == {("a", "2026-01-01T00:00:01.000Z")}
    assert all(text in entry.as_text().plain for text, entry in zip(odd, found, strict=True))


def test_reading_again_gives_new_lines_and_new_files(folder: Path) -> None:
    source = Files(folder)
    assert len(source.read()) == 6
    assert source.read() == []
    fresh = folder / "worker-3.err"
    fresh.write_text(line(9, "decode-1") + line(7, "decode-1") + line(8, "decode-1")[:20])
    assert messages(source) == ["at 7", "at 9"]
    with fresh.open("a") as file:
        file.write(line(8, "decode-1")[20:])
    assert messages(source) == ["at 8"]


def messages(source: Source) -> list[str]:
    return [entry.fields["message"] for entry in source.read()]


class Actor(NamedTuple):
    name: str
    actor_id: str
    state: str = "ALIVE"
    pid: int = 1


class RayLogs:
    """Ray's log service: a file for each process of an actor, in pieces that may cut a character."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actors: list[Actor] = []
        self.files: dict[str, bytes] = {}
        self.read: list[str] = []
        """Actors whose logs were asked for."""
        self._changed = threading.Condition()
        monkeypatch.setattr("ray.util.state.list_actors", lambda **_: list(self.actors))
        monkeypatch.setattr("ray.util.state.get_log", self._get)
        monkeypatch.setattr("kvrelay.cli.logs.sources.LIST_SECONDS", 0.0)

    def start(self, actor: Actor, text: str | None) -> None:
        """An actor; without a text, its node is gone."""
        self.actors = [each for each in self.actors if each.actor_id != actor.actor_id] + [actor]
        if text is not None:
            self.files[actor.actor_id] = text.encode()

    def write(self, actor_id: str, text: str) -> None:
        with self._changed:
            self.files[actor_id] += text.encode()
            self._changed.notify_all()

    def _get(self, actor_id: str, follow: bool, encoding: None, **_: object) -> Iterator[bytes]:
        from ray.util.state.exception import RayStateApiException

        self.read.append(actor_id)
        sent, data = 0, self.files.get(actor_id)
        if data is None:
            raise RayStateApiException("no node has it")
        while True:
            with self._changed:
                while follow and self.files[actor_id] is data and sent == len(data):
                    self._changed.wait(SECONDS)
                data = self.files[actor_id]
            while sent < len(data):
                piece = data[sent : sent + 7]
                sent += len(piece)
                yield piece
            if not follow:
                return


def until(source: Source, count: int) -> list[str]:
    """The messages of so many entries, as they come."""
    found: list[str] = []

    def enough() -> bool:
        found.extend(messages(source))
        return len(found) >= count

    wait_until(enough, lambda: f"{count} entries: {found}", SECONDS)
    return found


def test_actors_that_can_t_be_read_are_told_and_the_others_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    service, told = RayLogs(monkeypatch), list[str]()
    service.start(Actor("prefill-0", "p"), line(2, "prefill-0", note="ä"))
    service.start(Actor("decode-0", "d", "DEAD"), None)
    service.start(Actor("kvrelay-supervisor", "s"), line(1, "supervisor") + line(3, "supervisor"))
    service.start(Actor("decode-1", "pending", pid=0), None)
    assert messages(RayActors("head:1", "x", "", told.append)) == ["at 1", "at 2", "at 3"]
    assert len(told) == 1
    assert "the log of decode-0 from" in told[0]
    assert "no node has it" in told[0]
    service.read.clear()
    assert messages(RayActors("head:1", "x", "supervisor", told.append)) == ["at 1", "at 3"]
    assert service.read == ["s"]
    with pytest.raises(RunError, match="the log of decode-0"):
        RayActors("head:1", "x", "decode-0", told.append).read()
    assert len(told) == 1


def test_following_actors_repeats_nothing_and_sees_those_that_start_later(monkeypatch: pytest.MonkeyPatch) -> None:
    service, told = RayLogs(monkeypatch), list[str]()
    service.start(Actor("prefill-0", "p"), line(1, "prefill-0", note="ä") + line(2, "prefill-0")[:20])
    source = RayActors("head:1", "x", "", told.append)
    assert messages(source) == ["at 1"]
    service.write("p", line(2, "prefill-0")[20:])
    assert until(source, 1) == ["at 2"]
    service.start(Actor("decode-0", "d"), line(3, "decode-0", note="ä"))
    assert until(source, 1) == ["at 3"]
    service.start(Actor("decode-1", "gone"), None)  # whose log can be read some time later
    wait_until(lambda: messages(source) or told, "it is told", SECONDS)
    assert told
    service.start(Actor("decode-1", "gone"), line(4, "decode-1"))
    assert until(source, 1) == ["at 4"]
    service.start(Actor("decode-2", "short", "DEAD"), line(5, "decode-2") + "without an end")
    assert until(source, 2) == ["at 5", "without an end"]
    service.write("p", line(6, "prefill-0"))
    assert until(source, 1) == ["at 6"]
    assert len(told) == 1


def test_a_reader_that_leaves_ends_the_command(folder: Path) -> None:
    command = [sys.executable, "-m", "kvrelay.cli", "logs", "--follow", "--json", "--tail", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ.copy()) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["message"] == "at 5"
        process.stdout.close()
        with (folder / "worker-1.err").open("a") as file:
            file.write(line(9, "prefill-0") * 5000)
        assert process.wait(SECONDS) == 1
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_mistakes_are_one_line(folder: Path, tmp_path: Path) -> None:
    for text in ("yesterday", "5x", "", "999999d", "9" * 30 + "s"):
        with pytest.raises(UsageError, match="--since is"):
            parse_since(text)
    state.keep_logs(tmp_path / "gone")
    fails(1, "there is no folder", "logs")
    state.keep_logs(None)
    fails(1, "no cluster is running", "logs")
    assert shown("--folder", str(folder), "--tail", "1") == [("decode-0", "at 5")]
