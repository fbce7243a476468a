"""One line of a log, and which lines are wanted."""

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kvrelay.cluster.errors import UsageError

if TYPE_CHECKING:
    from rich.text import Text

LEVELS = ("debug", "info", "warning", "error", "critical")
STYLES = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}
SHOWN_APART = ("time", "level", "logger", "part", "name", "message", "exception")
RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")
"""Beginnings of lines that Ray writes into the files for itself."""
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class Entry:
    """One line."""

    time: str
    """Time in UTC in ISO's form; a line that isn't kvrelay's has the time of the line before it."""
    name: str
    """The member that wrote it; empty if it isn't known."""
    level: str
    fields: Mapping[str, Any]
    """Fields of a JSON line; a line that isn't JSON has its text as `message`."""

    @property
    def request(self) -> str:
        """The request that it is about, or empty."""
        return str(self.fields.get("request", ""))

    def as_json(self) -> str:
        """The line as JSON, also if it wasn't JSON."""
        return json.dumps(self.fields)

    def as_text(self) -> "Text":
        """The entry for people, with the time of this machine's zone."""
        from rich.text import Text

        clock = self.time
        if self.time:
            clock = datetime.fromisoformat(self.time).astimezone().strftime("%m-%d %H:%M:%S.%f")[:-3]
        text = Text(f"{clock} ", style="dim")
        text.append(f"{self.level or '-':<8}", style=STYLES.get(self.level, ""))
        text.append(f"{self.name or '-':<12} ", style="bold")
        text.append(str(self.fields.get("message", "")))
        for key, value in self.fields.items():
            if key not in SHOWN_APART and value not in ("", None):
                text.append(f"  {key}=", style="dim")
                text.append(value if isinstance(value, str) else json.dumps(value))
        for line in str(self.fields.get("exception", "")).splitlines():
            text.append(f"\n    {line}", style="red")
        return text


@dataclass(slots=True)
class Parser:
    """Makes entries of the lines of one file, which one process has written."""

    name: str = ""
    """Name of the process, read from its lines."""
    _time: str = ""
    _rest: str = field(default="", repr=False)

    def take(self, text: str) -> Iterator[Entry]:
        """Entries of the complete lines in the next part of the file."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip() and not line.startswith(RAY_MARKS):
                yield self._entry(line.rstrip("\r"))

    def end(self) -> Iterator[Entry]:
        """Entry of a last line without a newline."""
        return self.take("\n")

    def _entry(self, line: str) -> Entry:
        try:
            fields = json.loads(line)
        except ValueError:
            fields = None
        if not isinstance(fields, dict) or "message" not in fields or not _is_time(fields.get("time")):
            # A traceback, or a line of a library: it belongs to what was said last.
            return Entry(self._time, self.name, "", {"time": self._time, "name": self.name, "message": line})
        self._time = fields["time"]
        self.name = str(fields.get("name") or self.name)
        return Entry(self._time, self.name, str(fields.get("level", "")), fields)


@dataclass(frozen=True, slots=True)
class EntryFilter:
    """A filter that says which entries are shown."""

    member: str = ""
    """Name of the only member to show; empty: all."""
    level: str = ""
    """Least level to show; empty: any."""
    request: str = ""
    """Name, the client's or the router's, of the only request to show; empty: any."""
    since: str = ""
    """Earliest time to show, in UTC in ISO's form."""

    def __call__(self, entry: Entry) -> bool:
        if self.member and entry.name != self.member:
            return False
        if self.level and LEVELS.index(self.level) > (LEVELS.index(entry.level) if entry.level in LEVELS else 99):
            return False
        if self.request and entry.request != self.request and not entry.request.startswith(f"{self.request}/"):
            return False
        return not (self.since and entry.time < self.since)


def _is_time(value: object) -> bool:
    """Whether it is a time in ISO's form."""
    try:
        return isinstance(value, str) and bool(datetime.fromisoformat(value))
    except ValueError:
        return False


def parse_since(text: str) -> str:
    """The time that `10m`, `2h`, `1d`, `30s`, or a time in ISO's form means, as UTC in ISO's form.

    Raises:
        UsageError: it is something else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    try:
        if match:
            moment = datetime.fromtimestamp(time.time() - float(match[1]) * UNITS[match[2]], UTC)
        else:
            moment = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(
            f"--since is {text!r}; allowed: a number with s, m, h or d, or a time such as 2026-01-31T12:00"
        ) from None
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"
