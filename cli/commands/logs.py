"""`kvrelay logs`: what the members have written."""

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvrelay.cli.common import console
from kvrelay.cli.logs.entry import LEVELS, EntryFilter, parse_since
from kvrelay.cluster.errors import ERROR_PREFIX, NO_CLUSTER, RunError

if TYPE_CHECKING:
    from kvrelay.cli.logs.entry import Entry
    from kvrelay.cli.logs.sources import Source

POLL_SECONDS = 0.25


@click.command()
@click.argument("member", required=False, default="")
@click.option("--follow", "-f", is_flag=True, help="Go on with new lines until Ctrl-C.")
@click.option("--since", metavar="TIME", help="From 10m, 2h or 1d ago, or from 2026-01-31T12:00 on.")
@click.option("--request", metavar="ID", default="", help="Only lines about this request.")
@click.option("--level", type=click.Choice(LEVELS), default=None, help="And above.")
@click.option("--tail", type=click.IntRange(1), metavar="N", help="Only the last N of the lines that there are.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Read the logs there.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines as JSON, as they were written.")
def logs(
    member: str,
    follow: bool,
    since: str | None,
    request: str,
    level: str | None,
    tail: int | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Prints the logs of the cluster's members, or of MEMBER, in the order of time.

    Of a cluster on this machine, also after its end; of one on a shared Ray cluster, by the log service of Ray's
    dashboard.
    """
    name = request.removeprefix("chatcmpl-").removeprefix("cmpl-")
    wanted = EntryFilter(member, level or "", name, parse_since(since) if since else "")
    source = _source(folder, member)
    out = console()

    def show(entries: "Sequence[Entry]") -> None:
        for entry in entries:
            if as_json:
                click.echo(entry.as_json())
            else:
                out.print(entry.as_text(), soft_wrap=True)

    there = source.read()
    missing = _missing(there, source.names, member, name)
    if missing and not follow:
        raise RunError(missing)
    if missing:
        click.echo(f"{ERROR_PREFIX}{missing}; waiting for it", err=True)
    there = list(filter(wanted, there))
    show(there[-tail:] if tail else there)
    while follow:
        show(list(filter(wanted, source.read())))
        time.sleep(POLL_SECONDS)


def _missing(there: "Sequence[Entry]", names: Collection[str], member: str, request: str) -> str:
    """Says that the logs, without regard to time and level, have nothing of the member or about the request; empty if
    they have."""
    if member and member not in names:
        return f"no log is of {member!r}; there are those of {', '.join(sorted(names)) or 'nobody'}"
    about = EntryFilter(member, request=request)
    if request and not any(about(entry) for entry in there):
        whose = f"of {member} " if member else ""
        return f"no line {whose}is about request {request!r}; routers may know it: `kvrelay doctor {request}`"
    return ""


def _source(folder: Path | None, member: str) -> "Source":
    from kvrelay.cli.logs.sources import Files, RayActors
    from kvrelay.cluster import state

    if folder is not None:
        return Files(folder)
    local = state.logs()
    if local is not None:
        return Files(local)
    current = state.current()
    if current is None:
        raise RunError(f"{NO_CLUSTER}, and none has run here; --folder names a folder with logs")
    if not current.dashboard:
        raise RunError("the logs of a shared Ray cluster come from its dashboard, which does not run")

    def warn(text: str) -> None:
        click.echo(ERROR_PREFIX + text, err=True)

    return RayActors(current.ray_address, current.namespace, member, warn)
