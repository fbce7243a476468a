"""Prints what kvrelay's actors on this Ray node write to their logs: `python -m kvrelay.cluster.ray.follow [FOLDER]`.

Ray sends the output of actors to files below FOLDER (/tmp/ray), and a container's runtime collects only what its first
process prints. The chart runs this beside Ray, so that `kubectl logs` and collectors of logs have the actors' lines. It
imports nothing of Ray or kvrelay, to stay small.
"""

import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

FOLDER = Path("/tmp/ray")
PATTERN = "session_2*/logs/worker-*.err"
"""Standard error of each actor, of every start of Ray on this node."""
MARKS = (b":job_id:", b":actor_name:", b":task_name:")
"""Beginnings of lines that Ray writes there for itself."""
SCAN_SECONDS = 0.5
MOST_BYTES = 2**20
"""Read of one file at a time, and of one line at most."""
MOST_OPEN = 64
"""Files that stay open while they don't grow. Each start of an actor makes one more, which Ray keeps."""


class Follower:
    """Reads every file that there is and that appears, from its beginning, in whole lines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        """Bytes read of each file."""
        self._files: dict[Path, BinaryIO] = {}
        """Open files, the one that was opened last at the end."""
        self._rests: dict[Path, bytes] = {}

    def read(self) -> list[bytes]:
        """The lines since the last call, each with its end."""
        lines: list[bytes] = []
        for path in sorted(self._folder.glob(PATTERN)):
            with suppress(FileNotFoundError):  # it was removed since
                if path not in self._files and path.stat().st_size > self._offsets.setdefault(path, 0):
                    self._open(path)
            if path in self._files:
                lines += self._lines_of(path)
        for path in [path for path in self._offsets if not path.exists()]:
            lines += (self._lines_of(path) if path in self._files else []) or self._close(path)
        return lines

    def close(self) -> list[bytes]:
        """Last lines without an end, which get one."""
        return [line for path in list(self._offsets) for line in self._close(path)]

    def _open(self, path: Path) -> None:
        if len(self._files) >= MOST_OPEN:
            self._files.pop(next(iter(self._files))).close()
        self._files[path] = path.open("rb", buffering=0)
        self._files[path].seek(self._offsets[path])

    def _close(self, path: Path) -> list[bytes]:
        del self._offsets[path]
        if path in self._files:
            self._files.pop(path).close()
        return _lines(self._rests.pop(path, b""))

    def _lines_of(self, path: Path) -> list[bytes]:
        fresh = self._files[path].read(MOST_BYTES)
        self._offsets[path] += len(fresh)
        data = self._rests.get(path, b"") + fresh
        whole, _, rest = data.rpartition(b"\n") if b"\n" in data else (b"", b"", data)
        if len(rest) >= MOST_BYTES:
            whole, rest = data, b""
        self._rests[path] = rest
        return _lines(whole)


def _lines(text: bytes) -> list[bytes]:
    return [line + b"\n" for line in text.split(b"\n") if line.strip() and not line.startswith(MARKS)]


def main() -> None:
    """Follows until SIGTERM; then prints all that is left."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    follower = Follower(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
    while True:
        last = stopped
        lines = follower.read()
        if last and not lines:
            break
        _print(lines)
        if not lines:
            time.sleep(SCAN_SECONDS)
    _print(follower.close())


def _print(lines: list[bytes]) -> None:
    sys.stdout.buffer.writelines(lines)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
