"""`kvrelay top`: the cluster, live."""

from pathlib import Path

import click

from kvrelay.cli.common import connection, console
from kvrelay.cluster.errors import UsageError


@click.command()
@click.option("--target", metavar="URL[,URL]...", help="HTTP of the routers; default: the running cluster's.")
@connection
@click.option("--goodput", multiple=True, metavar="NAME:MS", help="Limits of a good request: ttft, tpot, e2el.")
@click.option("--sort", type=click.Choice(["name", "load", "memory", "tokens"]), default="name", show_default=True)
@click.option("--wide", is_flag=True, help="Show every column.")
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option("--json", "as_json", is_flag=True, help="Print each frame as a line of JSON.")
@click.option("--svg", type=click.Path(path_type=Path), help="With --once: write a picture of the frame.")
def top(
    target: str | None,
    tls: bool,
    ca: Path | None,
    api_key: str | None,
    goodput: tuple[str, ...],
    sort: str,
    wide: bool,
    once: bool,
    as_json: bool,
    svg: Path | None,
) -> None:
    """Shows pools, load, links, goodput and placements, each second.

    Keys: q ends it, p holds the picture, s changes the order of the workers, w shows every column.
    """
    import asyncio
    import sys

    from kvrelay.cli.bench.options import parse_goodput
    from kvrelay.cli.top.run import TopOptions, run
    from kvrelay.cluster.asking.routers import Access

    if svg is not None and (not once or as_json):
        raise UsageError("--svg is given; allowed: with --once, without --json")
    if not (once or as_json or sys.stdout.isatty()):
        raise UsageError("stdout is no terminal; allowed: with --once or --json")
    options = TopOptions(parse_goodput(goodput), sort, once, wide, as_json, svg)
    asyncio.run(run(Access.of(target, tls, ca, api_key), options, console(record=svg is not None)))
