"""Processes of this machine, and the descendants of this one: psutil's, where one that has ended is no error."""

import ctypes
import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

import psutil
from psutil import NoSuchProcess, Process

POLL_SECONDS = 0.02
KILLED_SECONDS = 5.0
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl."""


def find(pid: int) -> Process | None:
    """The process with this pid now. It is not equal to a later one with the same pid."""
    with suppress(NoSuchProcess):
        return Process(pid)
    return None


def alive(process: Process) -> bool:
    """Whether a process still runs; a zombie, which waits for its parent, doesn't."""
    with suppress(NoSuchProcess):
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def title(process: Process) -> str:
    """The command line of a process with \\0 behind each argument, or what it has set in its place; empty if it has
    ended."""
    with suppress(psutil.Error):
        return "".join(f"{argument}\0" for argument in process.cmdline())
    return ""


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
    return Process().children(recursive=True)


def end(processes: Sequence[Process], seconds: float) -> list[Process]:
    """Waits up to `seconds` until all have ended by themselves; kills the rest and returns them.

    `psutil.wait_procs` would take the exit code of a child from its Popen.
    """
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if alive(process)]) and time.monotonic() < deadline:
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
    """Sends a signal to those that still exist; never to another process that has the pid of one by now."""
    for process in processes:
        with suppress(NoSuchProcess):
            process.send_signal(number)
