"""Processes that start in milliseconds: forked from a server that has imported what workers import.

A new interpreter needs seconds of CPU time for torch alone, most of what a test of processes costs. Forked workers of
several ranks start the other ranks so, too, unless their environment has KVRELAY_TEST_CHILDREN: then these are children
of rank 0, as they are outside of tests, and the kernel ends them with it.
"""

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
from typing import Any

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
END_SECONDS = 30.0


def quick_start() -> BaseContext:
    """A context whose processes start in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
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
    ) -> None:
        """
        Args:
            stderr: descriptor that the process writes its errors to.
            inherited: descriptors that it has, too; it is given their numbers as its last arguments.
            owner: process id of rank 0, if this is another rank of that worker; `left_of` finds it by that.
        """
        context = quick_start()
        reader, writer = context.Pipe(duplex=False)
        kept = _Inherited([stderr, *inherited])
        given = (module, list(arguments), dict(environment), kept, writer, owner)
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

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __getstate__(self) -> list[Any]:
        return [DupFd(number) for number in self.numbers]

    def __setstate__(self, state: list[Any]) -> None:
        self.numbers = [each.detach() for each in state]


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
    stdout: Connection,
    owner: int,
) -> None:
    os.setsid()
    if owner:
        Path("/proc/self/comm").write_text(_name(owner))
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    stderr, *others = inherited.numbers
    os.dup2(stderr, 2)
    os.close(stderr)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper
    # They were read when the server of forks imported them.
    from kvrelay.transfer import failpoints
    from kvrelay.worker.ranks import local

    failpoints.arm(failpoints.parse(environment.get(failpoints.VARIABLE, "")))
    if CHILDREN not in environment:
        local.subprocess = RANKS  # type: ignore[assignment, attr-defined]  # the part of the module that it uses
    # A child of the server may use the server, too, though CPython would start another one for it.
    multiprocessing.current_process().daemon = False
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]  # of a private object
    sys.argv = [module, *arguments, *map(str, others)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _fork_rank(command: list[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **streams: int) -> Forked:
    """As `subprocess.Popen` of `python -m MODULE DESCRIPTORS`."""
    return Forked(command[2], [], env, sys.stderr.fileno(), pass_fds, os.getpid())


RANKS = SimpleNamespace(Popen=_fork_rank, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
"""Stands in for `subprocess` in `kvrelay.worker.ranks.local`."""
