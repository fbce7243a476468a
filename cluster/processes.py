"""The processes below this one, so that none of Ray's is left when a local cluster has ended (Linux's /proc)."""

import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.02
KILLED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Process:
    """One process; its start time tells it from a later one with the same pid."""

    pid: int
    started: int
    """Clock ticks since the machine started."""

    @property
    def alive(self) -> bool:
        """Whether it still runs; one that waits to be reaped by its parent doesn't."""
        found = _read(self.pid)
        return found is not None and found.process == self and found.state not in "ZX"


@dataclass(frozen=True, slots=True)
class _Stat:
    process: Process
    parent: int
    state: str


def find(pid: int) -> Process | None:
    """The process that has this pid now."""
    found = _read(pid)
    return None if found is None else found.process


def descendants() -> list[Process]:
    """Every process that this one started, and that those started, and so on."""
    found = [stat for path in Path("/proc").iterdir() if path.name.isdigit() and (stat := _read(int(path.name)))]
    below, parents = [], {os.getpid()}
    while parents:
        children = [stat.process for stat in found if stat.parent in parents]
        below += children
        parents = {child.pid for child in children}
    return below


def end(processes: Sequence[Process], seconds: float) -> list[Process]:
    """Waits until all have ended by themselves, `seconds` at most, and kills the rest, which it returns."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if process.alive]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    _send(signal.SIGKILL, left)
    return left


def kill_descendants() -> None:
    """Kills every process below this one at once.

    They are frozen first, and looked for again until none is new: one that was started while its parent was being
    killed would belong to nobody and be found by nobody.
    """
    frozen: set[Process] = set()
    while fresh := set(descendants()) - frozen:
        _send(signal.SIGSTOP, fresh)
        frozen |= fresh
    _send(signal.SIGKILL, frozen)
    end(list(frozen), KILLED_SECONDS)


def _send(number: int, processes: Iterable[Process]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _read(pid: int) -> _Stat | None:
    """/proc/PID/stat: pid (name) state ppid ... with the start time as field 22; the name may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(Process(pid, int(fields[19])), parent=int(fields[1]), state=fields[0])
