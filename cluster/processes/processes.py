"""Processes of this machine by pid and start time, and the descendants of this one (Linux's /proc)."""

import ctypes
import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

POLL_SECONDS = 0.02
KILLED_SECONDS = 5.0
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process; its start time distinguishes it from a later one with the same pid."""

    pid: int
    started: int
    """Clock ticks since the machine started."""
    parent: int = field(default=0, compare=False)
    state: str = field(default="", compare=False)

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie, which waits for its parent, doesn't."""
        found = find(self.pid)
        return found is not None and found == self and found.state not in "ZX"


def find(pid: int) -> Process | None:
    """The process with this pid now, from /proc/PID/stat: pid (name) state ppid ..., its start time as field 22."""
    with suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = text[text.rindex(")") + 2 :].split()  # the name may contain anything
        return Process(pid, started=int(fields[19]), parent=int(fields[1]), state=fields[0])
    return None


def title(pid: int) -> bytes:
    """The command line of a process, or what it has set in its place; empty if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def activity(pid: int) -> tuple[int, bool]:
    """The CPU time that a process has used, in clock ticks, and whether a thread of it runs, or waits for a core or
    the disk."""
    used, running = 0, False
    with suppress(FileNotFoundError, ProcessLookupError):
        for path in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # this thread has ended
                text = (path / "stat").read_text(errors="replace")
                fields = text[text.rindex(")") + 2 :].split()
                used += int(fields[11]) + int(fields[12])
                running |= fields[0] in "RD"
    return used, running


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants whose own parents end, so that `descendants` finds them.

    Raises:
        OSError: the kernel refuses it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def reap(but: int) -> None:
    """Removes the adopted children that have ended; the child with the pid `but` is its starter's to wait for."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == but:
                return  # the kernel names one child only; the others follow when this one is waited for
            os.waitpid(ended.si_pid, 0)


def descendants() -> list[Process]:
    """The children of this process, their children, and so on."""
    found = [process for path in Path("/proc").iterdir() if path.name.isdigit() and (process := find(int(path.name)))]
    below: list[Process] = []
    parents = {os.getpid()}
    while parents:
        children = [process for process in found if process.parent in parents]
        below += children
        parents = {child.pid for child in children}
    return below


def end(processes: Sequence[Process], seconds: float) -> list[Process]:
    """Waits up to `seconds` until all have ended by themselves; kills the rest and returns them."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if process.alive]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    send(signal.SIGKILL, left)
    return left


def kill_descendants() -> None:
    """Kills every descendant of this process at once.

    They are stopped first, and searched again until none is new: a process that was started while its parent was being
    killed would have no parent here and not be found.
    """
    stopped: set[Process] = set()
    while fresh := set(descendants()) - stopped:
        send(signal.SIGSTOP, fresh)
        stopped |= fresh
    send(signal.SIGKILL, stopped)
    end(list(stopped), KILLED_SECONDS)


def send(number: int, processes: Iterable[Process]) -> None:
    """Sends a signal to those that still exist."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
