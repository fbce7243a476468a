"""`kvrelay up`: starts a cluster. Most of its options are keys of the configuration, which checks their values."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
import yaml

from kvrelay.cli.common import config_option, console
from kvrelay.cluster.errors import ERROR_PREFIX, RunError, UsageError
from kvrelay.engine.config import CacheDtype, Dtype, Quantization
from kvrelay.transfer.config import Transport

if TYPE_CHECKING:
    from rich.console import Console

    from kvrelay.cluster.config.file import Override
    from kvrelay.cluster.config.options import ClusterConfig
    from kvrelay.cluster.state import ClusterState

HEADINGS = {
    "model": "The model",
    "engine": "How workers compute",
    "prefill": "Workers",
    "decode": "Workers",
    "colocated": "Workers",
    "ray": "Workers",
    "transfer": "Workers",
    "scaling": "Scaling",
    "router": "Routers",
}
"""Heading in the help of the options whose key is in each section of the configuration, in order."""
OTHERS = "The cluster"
"""Heading of all other options."""


class Setting(click.Option):
    """An option that is a key of the configuration. Its value is checked there."""

    def __init__(
        self, *args: Any, key: str, values: Callable[[Any], Mapping[str, object]] | None = None, **kwargs: Any
    ):
        """
        Args:
            key: its key, e.g. `router.grpc_port`.
            values: makes the values of all keys that the option sets; default: its own value, of its key.
        """
        super().__init__(*args, **kwargs)
        self.key = key
        self._values = values

    @property
    def heading(self) -> str:
        """Heading under which the help shows it."""
        return HEADINGS.get(self.key.partition(".")[0], OTHERS)

    def overrides(self, value: object) -> "dict[str, Override]":
        """The part of the configuration that the option sets when it is given with this value."""
        from kvrelay.cluster.config.file import Override

        values = {self.key: value} if self._values is None else self._values(value)
        name = self.opts[0]
        return {
            key: Override(name if key == self.key else f"{name} {key.rpartition('.')[2]}", each)
            for key, each in values.items()
        }


class ByHeading(click.Command):
    """A command whose help has a heading above the options of each part of the configuration."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        parts: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*HEADINGS.values(), OTHERS)}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                parts[parameter.heading if isinstance(parameter, Setting) else OTHERS].append(record)
        for heading, records in parts.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def setting(key: str, *names: str, **attributes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option of a command that is a key of the configuration."""
    return click.option(*names, cls=Setting, key=key, **attributes)


def _switch(key: str, name: str, value: object, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option without an argument, which sets a key to a value."""
    return setting(key, name, flag_value=value, type=type(value), default=None, help=text)


def _bound(which: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A limit of what scaling changes. Without scaling it would mean nothing, so it turns scaling on."""
    key, name = f"scaling.{which}", f"--{which.replace('_', '-')}"
    return setting(
        key, name, type=int, metavar="N", values=lambda value: {key: value, "scaling.enabled": True}, help=text
    )


def _target(which: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A target of latency, of the class of service whose targets scaling looks at."""
    key = f"router.classes.interactive.{which}_target_seconds"
    return setting(key, f"--{which}-target", type=float, metavar="S", help=text)


def _degree(role: str, way: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A degree of parallelism of a role's workers."""
    return setting(f"{role}.engine.{way}_parallel", f"--{role}-{way[0]}p", type=int, metavar="N", help=text)


def _one_of(words: Sequence[str]) -> dict[str, Any]:
    """Makes an option show its words in the help and in the shell's completion. The configuration refuses others."""
    return {
        "metavar": f"[{'|'.join(words)}]",
        "shell_complete": lambda ctx, param, begun: [word for word in words if word.startswith(begun)],
    }


def _number_or_text(value: str) -> int | str:
    return int(value) if value.isdecimal() else value


def _speculation(value: str) -> dict[str, object]:
    """The keys that METHOD, or METHOD=MODEL, stands for."""
    method, _, model = value.partition("=")
    return {"engine.speculation.method": method, "engine.speculation.draft_model": model}


@click.command(cls=ByHeading)
@config_option
@setting(
    "model.path",
    "--model",
    metavar="MODEL",
    help="Hugging Face folder, GGUF file, ORG/NAME[@REVISION] of the Hugging Face hub, smollm2, or pico (default).",
)
@setting("model.dtype", "--dtype", **_one_of(get_args(Dtype)), help="Type of weights and KV.")
@setting(
    "engine.quantization",
    "--quantization",
    **_one_of(get_args(Quantization)),
    help="Format that weights are converted to when they are loaded.",
)
@setting(
    "engine.kv_dtype",
    "--kv-dtype",
    **_one_of(get_args(CacheDtype)),
    help="Type that KV is stored and handed over in; auto: that of --dtype.",
)
@setting(
    "engine.kv_memory_bytes",
    "--kv-memory",
    type=_number_or_text,
    metavar="auto|BYTES",
    help="Memory of each worker's KV, such as 8GiB; auto: a share of what is free.",
)
@setting("engine.max_context", "--max-context", type=int, metavar="N", help="Tokens of prompt and completion at most.")
@setting("engine.threads", "--threads", type=int, metavar="N", help="CPU threads of each worker (default: its cores).")
@setting(
    "engine.speculation.method",
    "--speculate",
    values=_speculation,
    metavar="METHOD[=MODEL]",
    help="Method that guesses tokens, so that one step computes several: ngram, suffix, draft=MODEL, medusa=FOLDER, "
    "eagle3=FOLDER, mtp (the model's own layer) or off (default).",
)
@setting(
    "engine.speculation.max_tokens",
    "--speculate-tokens",
    type=int,
    metavar="N",
    help="Tokens that are guessed in one step at most.",
)
@setting("prefill.replicas", "--prefill", type=int, metavar="N", help="Prefill workers.")
@setting("decode.replicas", "--decode", type=int, metavar="N", help="Decode workers.")
@setting("colocated.replicas", "--colocated", type=int, metavar="N", help="Workers that do both, without a hand-off.")
@_degree("prefill", "tensor", "Ranks of a prefill worker that share each layer.")
@_degree("prefill", "pipeline", "Stages of layers of a prefill worker, each of --prefill-tp ranks.")
@_degree("decode", "tensor", "Ranks of a decode worker that share each layer.")
@_degree("decode", "pipeline", "Stages of layers of a decode worker, each of --decode-tp ranks.")
@setting("ray.gpus", "--gpus", type=int, metavar="N", help="GPUs that the workers share (default: all; 0: none).")
@setting(
    "transfer.transport",
    "--transport",
    **_one_of(get_args(Transport)),
    help="How KV gets from prefill to decode workers; auto: the best that both can use.",
)
@_switch(
    "scaling.enabled", "--scaling", True, "Let workers change roles by themselves, so that requests meet the targets."
)
@_target("ttft", "Target of the class interactive: seconds to the first token.")
@_target("tpot", "Target of the class interactive: seconds from one token to the next.")
@_bound("min_prefill", "Prefill workers that stay. This option and the next five turn scaling on.")
@_bound("max_prefill", "Prefill workers at most.")
@_bound("min_decode", "Decode workers that stay.")
@_bound("max_decode", "Decode workers at most.")
@_bound("min_workers", "Workers that stay; 0, the default: none is removed.")
@_bound("max_workers", "Workers at most; 0, the default: none is added.")
@setting("router.replicas", "--routers", type=int, metavar="N", help="Routers, each a process with ports of its own.")
@_switch("router.port_step", "--share-port", 0, "They share the first one's ports, for more streams.")
@setting("router.host", "--host", metavar="H", help="Address that the routers listen on (default 127.0.0.1).")
@setting("router.grpc_port", "--grpc-port", type=int, metavar="P", help="Port of the first router; 0 takes free ones.")
@setting(
    "router.http_port",
    "--http-port",
    type=int,
    metavar="P",
    help="Port of its OpenAI-compatible HTTP (default 8000).",
)
@setting(
    "router.served_model_name",
    "--served-model-name",
    metavar="NAME",
    multiple=True,
    help="A name of the model in requests.",
)
@setting(
    "router.chat_template",
    "--chat-template",
    metavar="FILE",
    help="Jinja template of chats; default: the model's own.",
)
@setting(
    "ray.address", "--address", metavar="local|auto|HOST:PORT", help="Start Ray here, or join a running Ray cluster."
)
@setting(
    "drain_seconds",
    "--drain-seconds",
    type=float,
    metavar="S",
    help="For requests to finish when a member is to end.",
)
@click.option(
    "--set",
    "others",
    metavar="KEY=VALUE",
    multiple=True,
    help="Any other key of the configuration, e.g. decode.engine.max_sequences=64; may be given several times.",
)
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

    configured = configuration(config, flags)
    _refuse_second()  # before its ports are found in use
    loaded = preflight.check(preflight.with_model(configured))

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


SETTINGS = {parameter.name: parameter for parameter in up.params if isinstance(parameter, Setting)}
"""The options of `up` that are keys of the configuration."""


def configuration(path: Path | None, flags: Mapping[str, Any]) -> "ClusterConfig":
    """The configuration of a file with the options of the command line on top.

    Args:
        flags: the values of `up`'s parameters, by name; None for an option that wasn't given.

    Raises:
        UsageError: the file can't be read, or a key or value isn't allowed.
    """
    from kvrelay.cluster.config import file as configfile

    overrides: dict[str, Override] = {}
    for pair in flags.get("others", ()):
        overrides |= _other(pair)
    for name, each in SETTINGS.items():
        if flags.get(name) not in (None, ()):
            overrides |= each.overrides(flags[name])
    return configfile.load(path, overrides)


def _other(pair: str) -> "dict[str, Override]":
    """The configuration that `--set KEY=VALUE` sets; the value is YAML.

    Raises:
        UsageError: it has another form.
    """
    from kvrelay.cluster.config.file import Override, parsed

    key, equals, value = pair.partition("=")
    if not (key and equals):
        raise UsageError(f"--set is {pair!r}; allowed: KEY=VALUE, e.g. engine.max_sequences=64")
    try:
        return {key: Override(f"--set {key}", parsed(value))}
    except yaml.YAMLError:
        raise UsageError(f"--set {key} is {value!r}; allowed: a value in YAML") from None


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
    out.print(f"  router     {state.router}", markup=False)  # an IPv6 address has brackets
    if state.http:
        bases = [f"{'https' if state.router_tls else 'http'}://{address}" for address in state.http.split(",")]
        out.print(f"  http       {'  '.join(f'{base}/v1' for base in bases)}", soft_wrap=True, markup=False)
        if state.page:
            out.print(f"  page       {bases[0]}/", soft_wrap=True, markup=False)
    if state.dashboard:
        asked = "(asks for what `ray get-auth-token` prints)"
        out.print(f"  dashboard  {state.dashboard}   {asked}", soft_wrap=True, markup=False)
    out.print("  try        kvrelay generate 'def __init__(self, '")
    out.print(f"  stop       {stop}")
