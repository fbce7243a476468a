"""Common parts of several commands: options of the configuration and of a connection, the console, and tables."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvrelay.cluster.state import DEFAULT_TARGET

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

FILE_WIDTH = 160
MOST_COLUMNS = 10_000
"""Width limit of a table's line, in terminal columns."""

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

config_option = click.option(
    "--config", type=click.Path(path_type=Path), help="YAML file; see `kvrelay config schema`."
)
target_option = click.option(
    "--target",
    metavar="H:P[,H:P]...",
    help=f"The routers; default: the running cluster's, else {DEFAULT_TARGET}.",
)

class_option = click.option(
    "--slo-class", metavar="CLASS", help="Class of service: default, interactive, batch, or one of router.classes."
)

_CONNECTION = (
    click.option("--tls", is_flag=True, help="Use TLS, as a router with router.tls_certificate asks for."),
    click.option("--ca", type=click.Path(path_type=Path), help="Its authorities, in PEM; default: the usual ones."),
    click.option(
        "--api-key",
        metavar="KEY",
        envvar="KVRELAY_API_KEY",
        show_envvar=True,
        help="For a router with router.api_keys.",
    ),
)


def connection(command: CommandT) -> CommandT:
    """Adds --tls, --ca and --api-key to a command."""
    for option in reversed(_CONNECTION):
        command = option(command)
    return command


def console(*, record: bool = False) -> "Console":
    """Console on stdout; of fixed width if stdout is a file or a pipe. `record`: it keeps what it prints."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else FILE_WIDTH
    return Console(file=sys.stdout, highlight=False, width=width, record=record)


def duration(seconds: float) -> str:
    """A time for people, in ms or s."""
    return f"{1e3 * seconds:.1f} ms" if seconds < 1.0 else f"{seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Whole:
    """Draws a table as wide as its cells are. Where there is less room, its right end is missing, not a part of each
    cell."""

    table: "Table"

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.measure import Measurement

        unbounded = options.update(max_width=MOST_COLUMNS)
        width = Measurement.get(console, unbounded, self.table).maximum
        yield from console.render(self.table, options.update(width=width))
