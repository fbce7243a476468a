"""What `kvrelay up` tells while a cluster comes up: bars on a terminal, lines elsewhere, or JSON to its own starter."""

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvrelay.cluster.errors import ClusterError, RunError
from kvrelay.cluster.state import ClusterState
from kvrelay.cluster.supervisor import Progress as MemberProgress
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_STARTING,
    MEMBER_STATE_UNSPECIFIED,
)


def describe(member: MemberProgress) -> str:
    """One member's progress in a word or two."""
    if member.state == MEMBER_STATE_UNSPECIFIED:
        return "starting"
    if member.state == MEMBER_STATE_STARTING:
        return f"loading {member.loaded:.0%}" if member.loaded else "loading"
    return {MEMBER_STATE_READY: "ready", MEMBER_STATE_DRAINING: "draining"}.get(member.state, "lost")


class LinesReport:
    """One line for each change; for output that isn't a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: dict[str, str] = {}

    def phase(self, text: str) -> None:
        self._console.print(text)

    def progress(self, members: Sequence[MemberProgress]) -> None:
        for member in members:
            word = describe(member).split()[0]
            if self._said.get(member.name) != word:
                self._said[member.name] = word
                self._console.print(f"  {member.name}: {word}")

    def close(self) -> None:
        """Nothing is left on the screen."""


class BarsReport:
    """One bar for each member, gone when the cluster is there."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[now]}"),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=console, transient=True, redirect_stdout=False)
        self._tasks: dict[str, TaskID] = {}

    def phase(self, text: str) -> None:
        self._show("cluster", None, 0.0, text)

    def progress(self, members: Sequence[MemberProgress]) -> None:
        for member in members:
            ready = member.state == MEMBER_STATE_READY
            # Loading isn't all: the last part of the bar is for what comes after.
            self._show(member.name, 1.0, 1.0 if ready else 0.9 * member.loaded, describe(member))

    def close(self) -> None:
        self._bars.stop()

    def _show(self, name: str, total: float | None, completed: float, now: str) -> None:
        self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, now=now)
        self._bars.update(self._tasks[name], completed=completed, now=now)


class PipeReport:
    """JSON lines for `follow` in another process. That one may have gone: nobody to tell is no reason to stop."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` is the pipe's writing end, which this takes over."""
        self._descriptor = descriptor

    def phase(self, text: str) -> None:
        self._write({"phase": text})

    def progress(self, members: Sequence[MemberProgress]) -> None:
        self._write({"progress": [asdict(member) for member in members]})

    def ready(self, state: ClusterState) -> None:
        """Tells that the cluster serves; the last message of a cluster that came up."""
        self._write({"ready": asdict(state)})

    def error(self, error: ClusterError) -> None:
        """Tells why there is no cluster; the last message of one that did not come up."""
        self._write({"error": error.lines, "code": error.code})

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, message: dict[str, object]) -> None:
        with suppress(BrokenPipeError):
            os.write(self._descriptor, json.dumps(message).encode() + b"\n")


class Report(Protocol):
    """Takes what there is to tell while a cluster comes up."""

    def phase(self, text: str) -> None:
        """What is being done now."""

    def progress(self, members: Sequence[MemberProgress]) -> None:
        """How far the members are."""

    def close(self) -> None:
        """There is nothing more to tell."""


def console_report(console: Console) -> Report:
    """What suits this output."""
    return BarsReport(console) if console.is_terminal else LinesReport(console)


def follow(lines: Iterable[str], report: Report, log: Path) -> ClusterState:
    """Shows what a PipeReport in another process tells, until that cluster is ready.

    Raises:
        ClusterError: the cluster did not come up.
    """
    for line in lines:
        message = json.loads(line)
        if "phase" in message:
            report.phase(message["phase"])
        elif "progress" in message:
            report.progress([MemberProgress(**member) for member in message["progress"]])
        elif "ready" in message:
            return ClusterState(**message["ready"])
        else:
            raise ClusterError(message["error"], message["code"])
    raise RunError(f"the cluster's process ended while it was starting; see {log}")
