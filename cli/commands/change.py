"""The commands that change a running cluster: scale, drain, role, upgrade, restart.

Each returns when the cluster is as asked for; with --no-wait when the supervisor has accepted it, which goes on in any
case. Exit codes: as in `cli/main.py`.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvrelay.cluster.errors import MOST_LISTED, NO_CLUSTER, RunError
from kvrelay.rpc.identity import ROLES, WORKER_ROLES, MemberRole, WorkerRole

if TYPE_CHECKING:
    from kvrelay.cluster.asking.control import Control
    from kvrelay.cluster.asking.status import MemberProgress

TIMEOUT_SECONDS = 600.0


def _following(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that has something to wait for."""
    command = click.option("--no-wait", is_flag=True, help="Return when the supervisor has accepted it.")(command)
    return click.option(
        "--timeout",
        type=click.FloatRange(min=0),
        default=TIMEOUT_SECONDS,
        show_default=True,
        metavar="S",
        help="Wait so long at most; the cluster goes on by itself.",
    )(command)


in_place = click.option(
    "--in-place", is_flag=True, help="End each member before its successor starts: needs no free resources."
)


@click.command()
@click.argument("pools", nargs=-1, required=True, metavar="ROLE=N...")
@_following
def scale(pools: tuple[str, ...], **following: Any) -> None:
    """Sets the number of members of roles, e.g. `kvrelay scale prefill=3 decode=5`.

    Roles: prefill, decode, colocated, router. 0 ends a whole pool. Members that leave finish their requests, or move
    them to others.
    """
    counts: dict[MemberRole, int] = {}
    for pool in pools:
        match = re.fullmatch(r"(\w+)=(\d{1,6})", pool)
        role = next((role for role in ROLES if match is not None and role == match[1]), None)
        if match is None or role is None or role in counts:
            raise click.BadParameter(f"{pool}; allowed: each of {', '.join(ROLES)} once, e.g. prefill=3")
        counts[role] = int(match[2])
    _follow(lambda control: control.scale(counts), **following)


@click.command()
@click.argument("member")
@click.option("--replace", is_flag=True, help="Start another one first, so that the number stays.")
@click.option("--force", is_flag=True, help="Also if no request can be served without it.")
@_following
def drain(member: str, replace: bool, force: bool, **following: Any) -> None:
    """Ends MEMBER when its requests are done or have moved to others."""
    _follow(lambda control: control.drain(member, replace=replace, force=force), **following)


@click.command()
@click.argument("worker")
@click.argument("role", type=click.Choice(WORKER_ROLES))
@click.option("--force", is_flag=True, help="Also if no request can be served meanwhile.")
@_following
def role(worker: str, role: WorkerRole, force: bool, **following: Any) -> None:
    """Gives WORKER another ROLE; its process, weights and prefix cache stay."""
    _follow(lambda control: control.set_role(worker, role, force=force), **following)


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="YAML file; see `kvrelay config schema`.")
@click.option("--rollback", is_flag=True, help="Go back to the configuration before.")
@in_place
@_following
def upgrade(config: Path | None, rollback: bool, in_place: bool, **following: Any) -> None:
    """Replaces every member by one with the configuration of a file, one after another; no request fails.

    Its replicas apply where they differ from those of the present configuration.
    """
    if (config is None) == (not rollback):
        raise click.UsageError("give either --config FILE or --rollback")
    if config is None:
        _follow(lambda control: control.roll_back(in_place=in_place), **following)
        return
    from kvrelay.cluster import state
    from kvrelay.cluster.config import file as configfile
    from kvrelay.cluster.up import preflight

    loaded = configfile.load(config)
    current = state.current()
    if current is not None and current.pid is not None:  # on this machine
        loaded = preflight.check_files(loaded)
    _follow(lambda control: control.upgrade(loaded.model_dump_json(), in_place=in_place), **following)


@click.command()
@click.argument("members", nargs=-1)
@in_place
@_following
def restart(members: tuple[str, ...], in_place: bool, **following: Any) -> None:
    """Replaces MEMBERS (all, if none are given) by ones with the same configuration, one after another."""
    _follow(lambda control: control.restart(members, in_place=in_place), **following)


def _follow(give: Callable[["Control"], int], *, no_wait: bool, timeout: float) -> None:
    """Sends a command to the supervisor, and shows its progress."""
    from kvrelay.cluster import state
    from kvrelay.cluster.asking.control import Control

    current = state.current()
    if current is None or not current.supervisor:
        raise RunError(NO_CLUSTER if current is None else "a cluster is starting")
    control = Control(current)
    revision = give(control)
    if no_wait:
        click.echo(f"accepted (revision {revision})")
        return
    shown: dict[str, str] = {}

    def tell(members: Sequence["MemberProgress"]) -> None:
        texts = {member.name: member.text for member in members}
        lines = [f"  {name}: gone" for name in sorted(shown.keys() - texts.keys())]
        lines += [
            f"  {member.name}: {member.text}"
            for member in members
            if shown.get(member.name) != member.text and (shown or not member.settled)
        ]
        for line in lines[:MOST_LISTED]:
            click.echo(line)
        if len(lines) > MOST_LISTED:
            click.echo(f"  and {len(lines) - MOST_LISTED} more")
        shown.clear()
        shown.update(texts)

    control.wait(revision, timeout, tell)
    click.echo(f"done: {_summary(shown)}")


def _summary(members: dict[str, str]) -> str:
    """The number of members of each role, as a text."""
    roles = [text.partition(" ")[0] for text in members.values()]
    return ", ".join(f"{roles.count(role)} {role}" for role in ROLES if role in roles) or "no members"
