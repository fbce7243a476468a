"""`kvrelay doctor`: checks the cluster, or explains one request."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvrelay.cli.common import connection, console
from kvrelay.cluster.errors import NO_CLUSTER, RunError

if TYPE_CHECKING:
    from kvrelay.cluster.asking.routers import Access


@click.command()
@click.argument("request_id", required=False)
@click.option("--target", metavar="URL[,URL]...", help="HTTP of the routers; default: the running cluster's.")
@connection
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(
    request_id: str | None, target: str | None, tls: bool, ca: Path | None, api_key: str | None, as_json: bool
) -> None:
    """Checks the running cluster; with REQUEST_ID, says why that request was slow.

    Exit code of the checks: 0 nothing is wrong; 1 something is.
    """
    if request_id is None:
        _examine(as_json)
        return
    from kvrelay.cluster.asking.routers import Access

    _explain(request_id, Access.of(target, tls, ca, api_key), as_json)


MARKS = {"ok": "[green]ok[/]", "note": "[cyan]note[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}


def _examine(as_json: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    from kvrelay.cli.doctor import examine
    from kvrelay.cluster import state

    current = state.current()
    if current is None or not (current.supervisor or current.trouble):
        raise RunError(NO_CLUSTER if current is None else "the cluster is starting; try again")
    findings = examine.diagnose(examine.examine(current))
    if as_json:
        click.echo(json.dumps(examine.as_json(findings)))
    else:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("check", "", "about", "found"):
            table.add_column(column, overflow="fold")
        for name, each in findings.items():
            for at, finding in enumerate(each):
                advice = f"\n[dim]-> {escape(finding.advice)}[/]" if finding.advice else ""
                shown = escape(finding.found) + advice
                table.add_row("" if at else name, MARKS[finding.severity], escape(finding.subject), shown)
        console().print(table)
    if not examine.well(findings):
        sys.exit(1)


def _explain(request_id: str, access: "Access", as_json: bool) -> None:
    import asyncio

    from rich.table import Table
    from rich.text import Text

    from kvrelay.cli.doctor import request
    from kvrelay.cluster.asking.routers import Routers

    async def ask() -> list[dict[str, object]]:
        async with Routers(access) as routers:
            return await request.find(routers, request_id)

    lives = asyncio.run(ask())
    stories = [request.story(life) for life in lives]
    if as_json:
        found = [asdict(story) | {"life": life} for story, life in zip(stories, lives, strict=True)]
        click.echo(json.dumps(found))
        return
    out = console()
    for story in stories:
        out.print(Text.assemble((story.id, "bold"), f"  {story.headline}"), soft_wrap=True)
        out.print(f"{story.verdict}.", soft_wrap=True, markup=False)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(justify="right")
        table.add_column()
        table.add_column(overflow="fold")
        for part in story.parts:
            table.add_row(f"{1e3 * part.seconds:.1f} ms", part.stage, Text(part.text))
        out.print(table)
        for line in story.incidents:
            out.print(f"  {line}", soft_wrap=True, markup=False)
