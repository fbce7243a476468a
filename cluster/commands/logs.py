"""`kvrelay logs`: what the members have written."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvrelay.cluster.commands.common import console
from kvrelay.cluster.errors import RunError

if TYPE_CHECKING:
    from kvrelay.cluster.logs.sources import Source


@click.command()
@click.argument("member", required=False, default="")
@click.option("--follow", "-f", is_flag=True, help="Go on with new lines until Ctrl-C.")
@click.option("--since", metavar="TIME", help="From 10m, 2h or 1d ago, or from 2026-01-31T12:00 on.")
@click.option("--request", metavar="ID", default="", help="Only lines about this request.")
@click.option(
    "--level", type=click.Choice(["debug", "info", "warning", "error", "critical"]), default=None, help="And above."
)
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
    from itertools import chain

    from kvrelay.cluster.logs.entry import Wanted, parse_since

    name = request.removeprefix("chatcmpl-").removeprefix("cmpl-")
    wanted = Wanted(member, level or "", name, parse_since(since) if since else "")
    source = _source(folder)
    old = [entry for entry in source.read() if wanted(entry)] if tail or not follow else []
    fresh = filter(wanted, source.follow()) if follow else iter(())
    out = console()
    for entry in chain(old[-tail:] if tail else old, fresh):
        if as_json:
            click.echo(entry.as_json())
        else:
            out.print(entry.as_text(), soft_wrap=True)


def _source(folder: Path | None) -> "Source":
    from kvrelay.cluster import state
    from kvrelay.cluster.logs.sources import Files, RayActors

    if folder is not None:
        return Files(folder)
    local = state.logs()
    if local is not None:
        return Files(local)
    current = state.current()
    if current is None:
        raise RunError("no cluster is running, and none has run here; --folder names a folder with logs")
    if not current.dashboard:
        raise RunError("the logs of a shared Ray cluster come from its dashboard, which does not run")
    return RayActors(current.ray_address, current.namespace)
