"""Common parts of several commands: options of the configuration and of a connection, and the console."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvrelay.cluster.state import DEFAULT_TARGET

if TYPE_CHECKING:
    from rich.console import Console

FILE_WIDTH = 160

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


def console() -> "Console":
    """Console on stdout; of fixed width if stdout is a file or a pipe."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
