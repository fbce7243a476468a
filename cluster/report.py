"""The progress of `kvrelay up`: bars on a terminal, lines elsewhere."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvrelay.cluster.supervisor import Progress as MemberProgress
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_STARTING,
    MEMBER_STATE_UNSPECIFIED,
)

WORDS = {
    MEMBER_STATE_UNSPECIFIED: "starting",
    MEMBER_STATE_STARTING: "loading",
    MEMBER_STATE_READY: "ready",
    MEMBER_STATE_DRAINING: "draining",
}


class LinesReport:
    """One line for each change of the cluster's step or of a member's state; for output that isn't a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[str, str] = {}

    def phase(self, text: str) -> None:
        self._console.print(text)

    def progress(self, members: Sequence[MemberProgress]) -> None:
        for member in members:
            word = WORDS.get(member.state, "lost")
            if self._shown.get(member.name) != word:
                self._shown[member.name] = word
                self._console.print(f"  {member.name}: {word}")

    def close(self) -> None:
        """Nothing to remove from the screen."""


class BarsReport:
    """One bar for each member, removed at the end."""

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
            loading = member.state == MEMBER_STATE_STARTING and member.loaded
            now = WORDS.get(member.state, "lost") + (f" {member.loaded:.0%}" if loading else "")
            # The last tenth of the bar is for what follows the loading of weights.
            self._show(member.name, 1.0, 1.0 if member.state == MEMBER_STATE_READY else 0.9 * member.loaded, now)

    def close(self) -> None:
        self._bars.stop()

    def _show(self, name: str, total: float | None, completed: float, now: str) -> None:
        self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, now=now)
        self._bars.update(self._tasks[name], completed=completed, now=now)


Report = LinesReport | BarsReport


def console_report(console: Console) -> Report:
    """Bars on a terminal, else lines."""
    return BarsReport(console) if console.is_terminal else LinesReport(console)
