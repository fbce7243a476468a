"""The lines that actors write into Ray's files come out, each once and whole."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from kvrelay.cluster.ray import follow
from kvrelay.cluster.ray.follow import Follower


def log(folder: Path, name: str, session: str = "session_2026-01-01") -> Path:
    path = folder / session / "logs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_whole_lines_of_every_actor_in_every_session(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert follower.read() == []
    first = log(tmp_path, "worker-a.err")
    append(first, ':job_id:01000000\n:actor_name:x\n{"a": 1}\n{"b"')
    assert follower.read() == [b'{"a": 1}\n']
    append(first, ": 2}\n")
    append(log(tmp_path, "worker-b.err"), "Traceback\n\n")
    append(log(tmp_path, "worker-b.out"), "not for us\n")
    log(tmp_path, "worker-b-.err").symlink_to(tmp_path / "removed")
    append(log(tmp_path, "raylet.err"), "not for us either\n")
    append(log(tmp_path, "worker-c.err", "session_2026-01-02"), "another start of Ray\n")
    assert follower.read() == [b'{"b": 2}\n', b"Traceback\n", b"another start of Ray\n"]
    assert follower.read() == []


def test_a_file_that_is_removed_is_read_to_its_end_and_closed(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    path = log(tmp_path, "worker-a.err")
    append(path, "one\n")
    assert follower.read() == [b"one\n"]
    append(path, "two\nthree")
    path.unlink()
    assert follower.read() == [b"two\n"]
    assert follower.read() == [b"three\n"]
    assert str(path) not in str([os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()])


def test_actors_that_end_again_and_again_take_no_further_descriptors(tmp_path: Path) -> None:
    follower, before = Follower(tmp_path), len(os.listdir("/proc/self/fd"))
    paths = [log(tmp_path, f"worker-{number:03d}.err") for number in range(3 * follow.MOST_OPEN)]
    for path in paths:
        append(path, f"{path.name}\nbegun ")
        assert follower.read() == [f"{path.name}\n".encode()]
        assert len(os.listdir("/proc/self/fd")) <= before + follow.MOST_OPEN
    append(paths[0], "and ended\n")
    append(paths[-1], "too\n")
    assert follower.read() == [b"begun and ended\n", b"begun too\n"]
    assert follower.close() == [b"begun \n"] * (len(paths) - 2)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_line_without_an_end_takes_no_more_memory_than_allowed(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    append(log(tmp_path, "worker-a.err"), "x" * (3 * follow.MOST_BYTES) + "\n")
    lines = [line for _ in range(5) for line in follower.read()]
    assert sum(line.count(b"x") for line in lines) == 3 * follow.MOST_BYTES
    assert max(map(len, lines)) <= 2 * follow.MOST_BYTES + 1


def test_all_that_is_left_is_printed_before_it_ends(tmp_path: Path) -> None:
    path = log(tmp_path, "worker-a.err")
    append(path, "one\n")
    command = [sys.executable, "-m", "kvrelay.cluster.ray.follow", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"one\n"
        line = b"x" * 99 + b"\n"  # more than one pass reads, and an unfinished line
        append(path, (3 * follow.MOST_BYTES // len(line) * line + b"killed her").decode())
        process.send_signal(signal.SIGTERM)
        *lines, last = process.stdout.readlines()
        assert set(lines) == {line}
        assert len(lines) == 3 * follow.MOST_BYTES // len(line)
        assert last == b"killed her\n"
        assert process.wait(60) == 0
