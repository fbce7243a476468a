"""`kvrelay doctor`: checks the cluster, or explains one request."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvrelay.cluster.commands.common import connection, console

if TYPE_CHECKING:
    from kvrelay.cluster.routers import Access


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
    from kvrelay.cluster.routers import Access

    access = Access.of(target, tls, ca, api_key)
    if request_id is not None:
        _explain(request_id, access, as_json)


def _explain(request_id: str, access: "Access", as_json: bool) -> None:
    import asyncio

    from rich.table import Table

    from kvrelay.cluster.doctor import request
    from kvrelay.cluster.routers import Routers

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
        out.print(f"[bold]{story.id}[/]  {story.headline}", soft_wrap=True)
        out.print(f"{story.verdict}.", soft_wrap=True)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(justify="right")
        table.add_column()
        table.add_column(overflow="fold")
        for part in story.parts:
            table.add_row(f"{1e3 * part.seconds:.1f} ms", part.stage, part.text)
        out.print(table)
        for line in story.incidents:
            out.print(f"  {line}", soft_wrap=True)
