"""The progress of `kvrelay up`: one changing line on a terminal, elsewhere a line for each change."""

from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from kvrelay.cluster.asking.status import WORDS
from kvrelay.cluster.fleet.keepers import MemberStart

FRAMES_PER_SECOND = 12.5


class Reporting(Protocol):
    """Receiver of a cluster's progress while it starts: shows it, or passes it to the process that does."""

    def phase(self, text: str) -> None:
        """The present step of the whole cluster."""

    def progress(self, members: Sequence[MemberStart]) -> None:
        """The progress of each member."""


class Report:
    """Shows how a cluster comes up."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner = Spinner("dots", style="status.spinner") if console.is_terminal else None
        # sys.stdout and sys.stderr stay as they are: Ray keeps those that it finds when it is imported, to the end.
        self._live = Live(
            self._spinner,
            console=console,
            refresh_per_second=FRAMES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._shown: dict[str, str] = {}

    def phase(self, text: str) -> None:
        """Shows the present step of the whole cluster."""
        if self._spinner is None:
            self._console.print(text, markup=False)
        else:
            self._spinner.update(text=Text(text))
            self._live.start()

    def progress(self, members: Sequence[MemberStart]) -> None:
        """Shows the progress of each member."""
        words = {member.name: _word(member) for member in members}
        if self._spinner is not None:
            shares = {member.name: f" {member.loaded:.0%}" for member in members if words[member.name] == "loading"}
            line = "   ".join(f"{name} {word}{shares.get(name, '')}" for name, word in words.items())
            self._spinner.update(text=Text(line))
            return
        for name, word in words.items():
            if self._shown.get(name) != word:
                self._console.print(f"  {name}: {word}", markup=False)
        self._shown = words

    def close(self) -> None:
        """Removes the changing line."""
        self._live.stop()


def _word(member: MemberStart) -> str:
    return f"waits for {member.waits_for}" if member.waits_for else WORDS.get(member.state, "lost")
