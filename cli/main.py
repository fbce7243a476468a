"""The command line. Exit codes: 0 done; 1 it can't be done now; 2 the input can't be used. Each error is one line.

`kvrelay status` ends with 3 if requests are served, but the supervisor doesn't answer.

Each command imports Ray, gRPC and the configuration's classes only if it needs them, so that it starts fast.
"""

import json
import os
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from click.exceptions import NoArgsIsHelpError

from kvrelay.cli.common import Whole, class_option, config_option, connection, console, target_option
from kvrelay.cluster.errors import ERROR_PREFIX, NO_CLUSTER, ClusterError, UsageError

if TYPE_CHECKING:
    from kvrelay.client import GenerateOptions

COMMANDS = {name: name for name in ("bench", "chat", "doctor", "logs", "model", "top", "up")} | dict.fromkeys(
    ("scale", "drain", "role", "upgrade", "restart"), "change"
)
"""Commands of the modules in `commands`, which are imported when a command is called or listed."""


class OneLineErrors(click.Group):
    """A group whose errors are single lines on stderr, and whose commands include COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            module = import_module(f"kvrelay.cli.commands.{COMMANDS[cmd_name]}")
            return cast("click.Command", getattr(module, cmd_name))
        return super().get_command(ctx, cmd_name)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except ClusterError as error:
            for line in error.lines:
                click.echo(ERROR_PREFIX + line, err=True)
            sys.exit(error.code)
        except NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            click.echo(ERROR_PREFIX + " ".join(error.format_message().split()), err=True)
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            sys.exit(130)
        except BrokenPipeError:
            # The reader of our output has gone; Python must not fail again when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="kvrelay")
def main() -> None:
    """Serves a language model with prefill and decode on separate workers."""


@main.command()
@click.option("--wide", is_flag=True, help="Show every column.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(wide: bool, as_json: bool) -> None:
    """Shows the running cluster: its members, their requests and their KV.

    Exit code: 0 the supervisor answers; 1 no cluster runs, or it doesn't serve yet; 3 the supervisor is down, and the
    router serves on.
    """
    from kvrelay.cluster import state
    from kvrelay.cluster.asking import status as status_of
    from kvrelay.rpc.compatibility import unpaired

    current = state.current()
    found = None if current is None else status_of.get_status(current)
    router = current.router if current is not None and found is None and current.router else ""
    trouble = "" if current is None else current.trouble
    unsupervised = current is not None and router != "" and status_of.serves(router, current.router_tls)
    if as_json:
        shown = status_of.as_json(found)
        shown["trouble"] = trouble or None
        click.echo(json.dumps({**shown, "router": router, "ready": True} if unsupervised else shown))
    elif found is not None and current is not None:
        out = console()
        out.print(status_of.headline(found, current.dashboard), style="bold", soft_wrap=True, markup=False)
        out.print(Whole(status_of.as_table(found, wide=wide)), crop=False)
        for line in (
            *([f"{current.missing} ended; requests are served without it"] if current.missing else []),
            *status_of.changes(found),
            *unpaired(entry.member for entry in found.members),
            *status_of.context_notes(found),
            *status_of.scaling_lines(found.scaling),
        ):
            out.print(line, markup=False)
    elif unsupervised:
        click.echo(f"the supervisor is down; the router {router} serves, and lost members are not replaced meanwhile")
    elif trouble:
        click.echo(f"the cluster is lost and being started anew: {trouble}")
    else:
        click.echo(NO_CLUSTER if current is None else "a cluster is starting, or does not answer")
    if found is None:
        sys.exit(status_of.UNSUPERVISED_CODE if unsupervised else 1)


@main.command()
@click.argument("prompt")
@target_option
@connection
@click.option("--n", type=click.IntRange(1, 128), metavar="N", help="Completions, one after the other (default 1).")
@click.option("--max-tokens", type=click.IntRange(0, 2**32 - 1), metavar="N", help="Tokens to generate at most.")
@click.option("--temperature", type=float, metavar="T", help="0 is greedy.")
@click.option(
    "--top-k", type=click.IntRange(0, 2**32 - 1), metavar="K", help="Keep the K likeliest tokens; 0 keeps all."
)
@click.option("--top-p", type=float, metavar="P", help="Keep the likeliest tokens up to this total probability.")
@click.option("--repetition-penalty", type=float, metavar="R", help="Above 1, tokens that were there are less likely.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times.")
@click.option("--logprobs", type=click.IntRange(0, 20), metavar="K", help="With --json: those of K tokens each.")
@click.option("--json-schema", type=click.File(encoding="utf-8"), metavar="FILE", help="JSON that obeys this schema.")
@click.option("--regex", metavar="REGEX", help="A text that matches this regular expression.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Equal seeds give equal tokens.")
@class_option
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's end-of-sequence tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when it is done, instead of the text.")
@click.option("--timeline", is_flag=True, help="Print where the time went.")
def generate(prompt: str, target: str | None, as_json: bool, timeline: bool, **sampling: Any) -> None:
    """Continues PROMPT, or with - what comes on stdin; prints the text as it is generated.

    A newline at the end of stdin is left out, as a shell does in $(...).

    Other users of the machine can see a key on the command line; they can't see the variable.
    """
    from kvrelay.cli import generate as generation

    text = _stdin() if prompt == "-" else _utf8(prompt)
    tls, ca, api_key = (sampling.pop(name) for name in ("tls", "ca", "api_key"))
    if sampling["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs needs --json")
    if sampling["json_schema"] is not None:
        sampling["json_schema"] = sampling["json_schema"].read()
    options = cast("GenerateOptions", sampling)
    router = generation.Router.find(target, tls, ca, api_key)
    generation.generate(router, text, options, as_json=as_json, timeline=timeline)


def _utf8(prompt: str) -> str:
    """Refuses a prompt that wasn't UTF-8: Python decodes its wrong bytes to lone surrogates."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        byte = ord(prompt[error.start]) & 0xFF
        raise click.BadParameter(
            f"character {error.start} is the byte 0x{byte:02x}, not UTF-8", param_hint="PROMPT"
        ) from None
    return prompt


def _stdin() -> str:
    """All of stdin but a newline at its end."""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin: byte {error.start} is not UTF-8") from None


@main.command()
def down() -> None:
    """Ends the cluster that was started from this machine."""
    from kvrelay.cluster.up import down as down_of
    from kvrelay.cluster.up.report import Report

    with closing(Report(console())) as report:
        ended = down_of.down(report)
    click.echo("the cluster has ended" if ended else "no cluster is running")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--days", type=click.IntRange(1, 3650), default=365, show_default=True, help="Until they end.")
def certificates(folder: Path, days: int) -> None:
    """Makes the certificates of a cluster's roles in FOLDER, for `security.tls: mutual`.

    An authority in FOLDER (ca.crt, ca.key) signs them, else a new one is made. Keep ca.key away from the cluster.
    """
    from kvrelay.cluster import certificates as made

    made.make(folder, days, keep_authority=True)
    click.echo(f"{folder}: ca.crt, ca.key, and a .crt and .key for each role, valid for {days} days")


@main.group()
def config() -> None:
    """Shows and checks the configuration."""


@config.command()
@config_option
def show(config: Path | None) -> None:
    """Prints the whole configuration, defaults included."""
    from kvrelay.cluster.config import file as configfile

    click.echo(configfile.dump(configfile.load(config)), nl=False)


@config.command()
@config_option
def validate(config: Path | None) -> None:
    """Checks a configuration file."""
    from kvrelay.cluster.config import file as configfile

    configfile.load(config)
    click.echo(f"{config or 'defaults'}: ok")


@config.command()
def schema() -> None:
    """Prints the configuration file's JSON schema."""
    from kvrelay.cluster.config.options import schema as schema_of

    click.echo(json.dumps(schema_of(), indent=2))
