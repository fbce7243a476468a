"""Processes that start in milliseconds: forked from a server that has imported what workers import.

A new interpreter needs seconds of CPU time for torch alone, most of what a test of processes costs. Forked workers of
several ranks start the other ranks so, too, unless their environment has KVRELAY_TEST_CHILDREN: then these are children
of rank 0, as they are outside of tests, and the kernel ends them with it. Forked supervisors whose environment has
KVRELAY_TEST_MEMBERS start their members so.
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import psutil

PRELOADED = (
    "support.hash_worker",
    "kvrelay.worker.server",
    "kvrelay.router.server",
    "kvrelay.cluster.supervisor.supervisor",
    "kvrelay.engine.build",
    "kvrelay.engine.runner.cpu",
    "kvrelay.engine.runner.general",
    "kvrelay.transfer.links.rank_transfers",
    "kvrelay.transfer.transports.gloo",
    "kvrelay.transfer.transports.tcp",
    "support.preloaded",
)


CHILDREN = "KVRELAY_TEST_CHILDREN"
MEMBERS = "KVRELAY_TEST_MEMBERS"
SERVER = "KVRELAY_TEST_FORKS"
"""Variable with the address of the server of forks of all test processes, if they share one."""
END_SECONDS = 30.0


def share() -> None:
    """Starts a server of forks for this process and those that it will start: a server of each one's own would import
    the same for seconds. It ends with this process."""
    quick_start()
    forkserver.ensure_running()
    os.environ[SERVER] = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]  # of a private object


def quick_start() -> BaseContext:
    """A context whose processes start in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]  # a private object
    if SERVER in os.environ and server._forkserver_address is None:
        server._forkserver_address, server.ensure_running = os.environ[SERVER], lambda: None
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    return context


@contextmanager
def spawned(target: Callable[..., object], *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """Calls `target(connection, *arguments)` in a process that is always ended: that process, and the other end."""
    context = quick_start()
    here, there = context.Pipe()
    process: BaseProcess = context.Process(target=target, args=(there, *arguments), daemon=True)  # type: ignore[attr-defined]  # of every context
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        here.close()
        process.kill()
        process.join(END_SECONDS)


class Forked:
    """`python -m module arguments`, with the part of `subprocess.Popen`'s interface that tests use."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stderr: int,
        inherited: Sequence[int] = (),
        owner: int = 0,
        piped: bool = True,
    ) -> None:
        """
        Args:
            stderr: descriptor that the process writes its errors to.
            inherited: descriptors that it has, too; its numbers stand in the arguments where those here do.
            owner: process id of rank 0, if this is another rank of that worker; `left_of` finds it by that.
            piped: whether `stdout` has what it prints; if not, that goes to `stderr`.
        """
        context = quick_start()
        reader, writer = context.Pipe(duplex=False)
        kept = _Inherited([stderr, *inherited])
        given = (module, list(arguments), dict(environment), kept, writer if piped else None, owner)
        self._process = context.Process(target=_main, args=given, daemon=True)  # type: ignore[attr-defined]  # of every context
        self._process.start()
        writer.close()
        self.pid = int(self._process.pid or 0)
        self.stdout = os.fdopen(os.dup(reader.fileno()), "rb")
        reader.close()

    def poll(self) -> int | None:
        """The exit status; negative for a signal, None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        """
        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> None:
        """Waits for its end, and closes `stdout`."""
        self.wait(timeout)
        self.stdout.close()

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Inherited:
    """Descriptors, duplicated for the process that is being started."""

    def __init__(self, given: list[int]) -> None:
        self.given = given

    def __getstate__(self) -> list[Any]:
        return [(number, DupFd(number)) for number in self.given]

    def __setstate__(self, state: list[Any]) -> None:
        self.given = [number for number, _ in state]
        self.numbers = [each.detach() for _, each in state]


def left_of(pid: int) -> list[int]:
    """The processes that a worker, with this process id, has left: other ranks, which are in the session of a worker
    that has started them itself, or have its process id in their name."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.NoSuchProcess):
            owned = os.getsid(process.pid) == pid or Path(f"/proc/{process.pid}/comm").read_text() == f"{_name(pid)}\n"
            if owned and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return sorted(set(found) - {pid})


def _name(owner: int) -> str:
    return f"rank of {owner}"


def _main(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    inherited: _Inherited,
    stdout: Connection | None,
    owner: int,
) -> None:
    os.setsid()
    _set_title("python", "-m", module, *arguments)
    if owner:
        Path("/proc/self/comm").write_text(_name(owner))
    os.environ.clear()
    os.environ.update(environment)
    stderr, *others = inherited.numbers
    numbers = dict(zip(map(str, inherited.given[1:]), map(str, others), strict=True))
    os.dup2(stderr if stdout is None else stdout.fileno(), 1)
    if stdout is not None:
        stdout.close()
    os.dup2(stderr, 2)
    os.close(stderr)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper
    # They were read when the server of forks imported them.
    from kvrelay.cluster.processes import launcher
    from kvrelay.machine import forks
    from kvrelay.transfer import failpoints
    from kvrelay.worker.ranks import local

    failpoints.arm(failpoints.parse(environment.get(failpoints.VARIABLE, "")))
    forks.subprocess = _starting(_fork_template)  # type: ignore[attr-defined]  # the part of the module that it uses
    if CHILDREN not in environment:
        local.subprocess = _starting(_fork_rank)  # type: ignore[attr-defined]
    if MEMBERS in environment:
        launcher.subprocess = _starting(_fork_member)  # type: ignore[attr-defined]
    # A child of the server may use the server, too, though CPython would start another one for it.
    multiprocessing.current_process().daemon = False
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]  # of a private object
    sys.argv = [module, *(numbers.get(word, word) for word in arguments)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _set_title(*words: str) -> None:
    """Writes a command line over that of the server of forks, as supervisors know their members by theirs."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    title = "".join(f"{word}\0" for word in words).encode().rjust(end - start)
    ctypes.memmove(start, title[start - end :], end - start)


def _fork_member(command: list[str], *, stderr: IO[bytes], **_: object) -> Forked:
    """As `subprocess.Popen` of `python -m MODULE ARGUMENTS`, for a supervisor."""
    return Forked(command[2], command[3:], os.environ, stderr.fileno(), piped=False)


def _fork_rank(command: list[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **streams: int) -> Forked:
    """As `subprocess.Popen` of `python -m MODULE DESCRIPTORS`."""
    return Forked(command[2], command[3:], env, sys.stderr.fileno(), pass_fds, os.getpid())


def _fork_template(command: list[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: object) -> Forked:
    """As `subprocess.Popen` of `python -P -m MODULE DESCRIPTOR OPTIONS`; its output goes nowhere."""
    with open(os.devnull, "wb") as nowhere:
        return Forked(command[3], command[4:], env, nowhere.fileno(), pass_fds, piped=False)


def _starting(popen: Callable[..., Forked]) -> Any:
    """Stands in for `subprocess` in a module that starts processes of one kind."""
    return SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
