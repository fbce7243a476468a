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

from kvrelay.cli.commands.common import connection, console, target_option
from kvrelay.cli.tables import Whole
from kvrelay.cluster.errors import ERROR_PREFIX, NO_CLUSTER, ClusterError, RunError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from kvrelay.client import GenerateOptions
    from kvrelay.cluster.config.options import ClusterConfig
    from kvrelay.cluster.state import ClusterState

COMMANDS = {name: name for name in ("bench", "chat", "doctor", "logs", "model", "top")} | dict.fromkeys(
    ("scale", "drain", "role", "upgrade", "restart"), "change"
)
"""Commands of the modules in `commands`, which are imported when a command is called or listed."""


class OneLineErrors(click.Group):
    """A group whose errors are single lines on stderr. It has those of COMMANDS, too."""

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


config_option = click.option(
    "--config", type=click.Path(path_type=Path), help="YAML file; see `kvrelay config schema`."
)


@main.command()
@config_option
@click.option("--model", help="Hugging Face folder, hf:ORG/NAME[@REVISION], or a bundled model (default pico).")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), help="Of weights and KV.")
@click.option("--prefill", type=int, metavar="N", help="Prefill workers.")
@click.option("--decode", type=int, metavar="N", help="Decode workers.")
@click.option("--colocated", type=int, metavar="N", help="Workers that do both, without a hand-off.")
@click.option("--gpus", type=int, metavar="N", help="GPUs that the workers share (default: all; 0: none).")
@click.option("--routers", type=int, metavar="N", help="Routers, each a process with ports of its own.")
@click.option(
    "--share-port", flag_value=0, type=int, default=None, help="They share the first one's ports, for more streams."
)
@click.option("--host", metavar="H", help="Address that the routers listen on (default 127.0.0.1).")
@click.option("--grpc-port", type=int, metavar="P", help="Port of the first router; 0 takes free ones.")
@click.option("--http-port", type=int, metavar="P", help="Port of its OpenAI-compatible HTTP (default 8000).")
@click.option("--served-model-name", metavar="NAME", multiple=True, help="A name of the model in requests.")
@click.option("--chat-template", metavar="FILE", help="Jinja template of chats; default: the model's own.")
@click.option("--address", metavar="local|auto|HOST:PORT", help="Start Ray here, or join a running Ray cluster.")
@click.option("--drain-seconds", type=float, metavar="S", help="For requests to finish when a member is to end.")
@click.option("--detach", is_flag=True, help="Return when the cluster is ready, and leave it running.")
@click.option("--unattended", is_flag=True, hidden=True)
def up(config: Path | None, detach: bool, unattended: bool, **flags: Any) -> None:
    """Starts a cluster and serves until Ctrl-C.

    A cluster whose Ray is lost is started anew; exit code 1 if that fails.
    """
    from kvrelay.cluster.ray import environment as rayenv
    from kvrelay.cluster.signals import Interrupted
    from kvrelay.cluster.up import background, owner, preflight
    from kvrelay.cluster.up.report import Report
    from kvrelay.kernels.cpu import library

    configured = _load(config, flags)
    _refuse_second()  # before its ports are found in use
    loaded = preflight.check(configured)

    out = console()
    report = Report(out)
    if loaded.local and (named := library.named_set()):
        out.print(f"native kernels are those for {named.name} ({library.VARIABLE})")

    def show_ready(state: "ClusterState") -> None:
        report.close()
        _print_ready(out, state, "kvrelay down" if detach else "Ctrl-C")

    code = 0
    try:
        if not detach:
            owner.run(loaded, report, show_ready, unattended=unattended)
            report.close()
            click.echo("the cluster has ended")
        elif loaded.local:
            show_ready(background.start(loaded, report))
        else:
            rayenv.prepare()
            from kvrelay.cluster.up import launch  # imports Ray

            show_ready(launch.leave_running(loaded, report))
    except Interrupted as interrupted:
        report.close()
        click.echo(f"{ERROR_PREFIX}{interrupted}", err=True)
        code = interrupted.code
    finally:
        report.close()
    # Everything has ended, or is left running. Threads of Ray's may crash an interpreter that is torn down around them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
    from kvrelay.cluster.scaling.shown import scaling_lines

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
            *status_of.incompatible_workers(found),
            *status_of.context_notes(found),
        ):
            out.print(line, markup=False)
        for line in scaling_lines(found.scaling):
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
    """The prompt; it isn't taken if it wasn't UTF-8, whose wrong bytes Python decodes to lone surrogates."""
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


OPTIONS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "prefill": "prefill.replicas",
    "decode": "decode.replicas",
    "colocated": "colocated.replicas",
    "gpus": "ray.gpus",
    "routers": "router.replicas",
    "share_port": "router.port_step",
    "host": "router.host",
    "grpc_port": "router.grpc_port",
    "http_port": "router.http_port",
    "served_model_name": "router.served_model_name",
    "chat_template": "router.chat_template",
    "address": "ray.address",
    "drain_seconds": "drain_seconds",
}
"""The key in the configuration of each of `up`'s options."""


def _load(path: Path | None, flags: dict[str, Any]) -> "ClusterConfig":
    from kvrelay.cluster.config import file as configfile

    overrides = {
        OPTIONS[name]: configfile.Override(f"--{name.replace('_', '-')}", value)
        for name, value in flags.items()
        if value not in (None, ())
    }
    return configfile.load(path, overrides)


def _refuse_second() -> None:
    from kvrelay.cluster import state
    from kvrelay.cluster.asking import status

    current = state.current()
    if current is None:
        return
    supervised = status.get_status(current) is not None
    if (
        current.pid is None
        and not supervised
        and not (current.router and status.serves(current.router, current.router_tls))
    ):
        state.forget()  # it was left on a shared Ray cluster and has ended there
        return
    owner = f"on Ray at {current.ray_address}" if current.pid is None else f"pid {current.pid}"
    raise RunError(f"a cluster is already running ({owner}); `kvrelay down` ends it")


def _print_ready(out: "Console", state: "ClusterState", stop: str) -> None:
    out.print("[bold green]kvrelay is ready[/]")
    out.print(f"  router     {state.router}")
    if state.http:
        bases = [f"{'https' if state.router_tls else 'http'}://{address}" for address in state.http.split(",")]
        out.print(f"  http       {'  '.join(f'{base}/v1' for base in bases)}", soft_wrap=True)
        if state.page:
            out.print(f"  page       {bases[0]}/", soft_wrap=True)
    if state.dashboard:
        out.print(f"  dashboard  {state.dashboard}   (asks for what `ray get-auth-token` prints)", soft_wrap=True)
    out.print("  try        kvrelay generate 'def __init__(self, '")
    out.print(f"  stop       {stop}")
