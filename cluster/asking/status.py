"""`kvrelay status`: the supervisor's view of the cluster: a table and sentences for people, JSON for programs."""

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.table import Table

from kvrelay.cluster.errors import RunError
from kvrelay.cluster.membership.membership import ready_routers
from kvrelay.cluster.state import ClusterState
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_STARTING,
    MEMBER_STATE_UNSPECIFIED,
    ROLE_ROUTER,
    STAGE_LEAVE,
    STAGE_RETURN,
    STAGE_SERVE,
    DescribeRequest,
    DescribeResponse,
    DesiredMember,
    GetStatusRequest,
    GetStatusResponse,
    Member,
    MemberStatus,
    Scaling,
    ScalingDecision,
    Stage,
)
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceStub
from kvrelay.internal.v1.worker_pb2 import CONTEXT_LIMIT_UNSPECIFIED
from kvrelay.rpc.compatibility import groups
from kvrelay.rpc.credentials import Credentials, Metadata
from kvrelay.rpc.identity import CONTEXT_LIMITS, CONTEXT_REASONS, role_name, state_name
from kvrelay.rpc.options import channel_options
from kvrelay.rpc.security import SecurityConfig

TIMEOUT_SECONDS = 5.0
DESCRIBE_SECONDS = 15.0
"""Longer than the supervisor waits for its members (`inquiry.ANSWER_SECONDS`)."""
AnswerT = TypeVar("AnswerT")
UNSUPERVISED_CODE = 3
"""Exit code of `kvrelay status` if requests are served without the supervisor."""
MOST_DECISIONS = 3
"""Number of scaling's decisions in the text; the JSON has all."""
Figure = Literal["ttft_attained", "tpot_attained", "prefill_pressure", "decode_pressure"]
"""Names of scaling's figures that may be unknown."""
WORDS = {
    MEMBER_STATE_UNSPECIFIED: "starting",
    MEMBER_STATE_STARTING: "loading",
    MEMBER_STATE_READY: "ready",
    MEMBER_STATE_DRAINING: "draining",
}
"""Words for the states of a member while it comes up; another state is `lost`."""


def get_status(cluster: ClusterState, timeout: float = TIMEOUT_SECONDS) -> GetStatusResponse | None:
    """The status from the cluster's supervisor; None if it isn't known yet, or doesn't answer in time.

    Raises:
        RunError: the supervisor refuses this caller, or the join token or a certificate can't be read.
    """
    return _ask(cluster, lambda stub, metadata: stub.GetStatus(GetStatusRequest(), timeout=timeout, metadata=metadata))


def get_descriptions(cluster: ClusterState) -> DescribeResponse | None:
    """Every member's description of itself and its machine; None if the supervisor doesn't answer in time.

    Raises:
        RunError: as `get_status`.
    """
    seconds = DESCRIBE_SECONDS
    return _ask(cluster, lambda stub, metadata: stub.Describe(DescribeRequest(), timeout=seconds, metadata=metadata))


def _ask(cluster: ClusterState, call: Callable[[SupervisorServiceStub, Metadata], AnswerT]) -> AnswerT | None:
    """The supervisor's answer to a call of the operator."""
    if not cluster.supervisor:
        return None
    credentials = operator(cluster)
    with credentials.blocking_channel(cluster.supervisor, "supervisor") as channel:
        try:
            return call(SupervisorServiceStub(channel), credentials.metadata)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                raise RunError(f"the supervisor at {cluster.supervisor}: {error.details()}") from None
            return None


def operator(cluster: ClusterState) -> Credentials:
    """The credentials of the command line for calls to the supervisor.

    Raises:
        RunError: the join token or a certificate can't be read.
    """
    security = SecurityConfig(
        cluster.join_token_path, "mutual" if cluster.certificates else "off", cluster.certificates
    )
    try:
        return Credentials.of("operator", security)
    except ValueError as error:
        raise RunError(str(error)) from None


def serves(routers: str, tls: bool, timeout: float = TIMEOUT_SECONDS) -> bool:
    """Whether the health service of one of the routers answers that a request can be placed now.

    With `tls`, whether somebody listens there: this process may have no certificate that the router takes.

    Args:
        routers: host:port of each, with commas between.
    """
    return any(_serves(router, tls, timeout) for router in routers.split(","))


def _serves(router: str, tls: bool, timeout: float) -> bool:
    if tls:
        host, _, port = router.rpartition(":")
        with suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), timeout).close()
            return True
        return False
    with grpc.insecure_channel(router, options=channel_options()) as channel, suppress(grpc.RpcError):
        response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
    return False


def as_json(status: GetStatusResponse | None) -> dict[str, Any]:
    """The output of `kvrelay status --json`; None if no cluster answers."""
    supervised = status is not None
    status = status or GetStatusResponse()
    paired = groups(entry.member for entry in status.members)
    return {
        "supervised": supervised,
        "ready": status.ready,
        "metrics": status.metrics_address or None,
        "router": _router(status),
        "routers": [_router_entry(entry) for entry in status.members if entry.member.role == ROLE_ROUTER],
        "workers": [_worker_entry(entry) for entry in status.members if entry.member.role != ROLE_ROUTER],
        "scaling": scaling_json(status.scaling) if status.HasField("scaling") else None,
        "desired": _desired(status) if status.HasField("desired") else None,
        "incompatible": [sorted(member.name for member in group) for group in paired] if len(paired) > 1 else [],
    }


def headline(status: GetStatusResponse, dashboard: str) -> str:
    """Whether requests are served, and where."""
    ready = "ready" if status.ready else "not ready"
    return f"{ready}   router {_router(status) or '-'}   dashboard {dashboard or '-'}"


def as_table(status: GetStatusResponse, *, wide: bool) -> Table:
    """The members, as `kvrelay status` shows them; with `wide`, all that is known of each."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("member", "role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("running", "waiting", "KV blocks held", *(("free", "cached", "heard", "pid") if wide else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("tensor x pipeline", "weights / KV", "prompts by", "context", "incarnation") if wide else ():
        table.add_column(name, no_wrap=True)
    for entry in status.members:
        member, blocks, requests = entry.member, entry.load.blocks, entry.load.requests
        more = (
            str(blocks.free),
            str(blocks.cached),
            "-" if entry.restored else f"{entry.heartbeat_age_seconds:.1f} s",
            ", ".join(map(str, member.rank_pids)) or str(member.pid),
            f"{member.tensor_ranks} x {member.pipeline_stages}" if member.tensor_ranks else "-",
            f"{member.weights} / {member.kv_dtype}" if member.kv_dtype else "-",
            member.prefill_attention or "-",
            f"{member.max_context} ({CONTEXT_LIMITS[member.context_limit]})" if member.max_context else "-",
            member.incarnation[:8],
        )
        table.add_row(
            member.name,
            role_name(member.role),
            state_name(member.state),
            str(requests.running),
            str(requests.waiting),
            f"{blocks.held} of {blocks.total} ({blocks.held / blocks.total:.0%})" if blocks.total else "-",
            *(more if wide else ()),
        )
    return table


def _desired(status: GetStatusResponse) -> dict[str, Any]:
    """The desired state, and whether the cluster has reached it, as JSON."""
    desired = status.desired
    return {
        "revision": desired.revision,
        "config": desired.config,
        "settled": status.settled,
        "halted": desired.halted or None,
        "members": [
            {
                "name": member.name,
                "role": role_name(member.role),
                "config": member.config,
                "stage": Stage.Name(member.stage).removeprefix("STAGE_").lower(),
                "replaces": member.replaces or None,
                "trouble": status.troubles.get(member.name),
                "waits_for": status.waits.get(member.name),
            }
            for member in desired.members
        ],
    }


def changes(status: GetStatusResponse) -> list[str]:
    """A sentence for each member that isn't as desired, and for a rolling change that has stopped; none if all is."""
    lines = [f"{each.name}: {each.text}" for each in progress(status) if not each.settled]
    return [*lines, f"the rolling change has stopped: {status.desired.halted}"] if status.desired.halted else lines


def _process(entry: MemberStatus) -> dict[str, Any]:
    member = entry.member
    return {
        "pid": member.pid,
        "incarnation": member.incarnation,
        "generation": member.generation,
        "state": state_name(member.state),
    }


def _router_entry(entry: MemberStatus) -> dict[str, Any]:
    requests = {"queued": entry.load.requests.waiting, "running": entry.load.requests.running}
    return {
        "name": entry.member.name,
        "address": entry.member.address,
        "http": entry.member.http_address or None,
        "metrics": entry.member.metrics_address or entry.member.http_address or None,
        **_process(entry),
        "requests": requests,
    }


def _worker_entry(entry: MemberStatus) -> dict[str, Any]:
    blocks, requests = entry.load.blocks, entry.load.requests
    return {
        "name": entry.member.name,
        "role": role_name(entry.member.role),
        "metrics": entry.member.metrics_address or None,
        **_process(entry),
        "ranks": {
            "tensor": max(1, entry.member.tensor_ranks),
            "pipeline": max(1, entry.member.pipeline_stages),
            "pids": list(entry.member.rank_pids) or [entry.member.pid],
        },
        "compatibility": entry.member.compatibility,
        "weights": entry.member.weights or None,
        "kv_dtype": entry.member.kv_dtype or None,
        "prefill_attention": entry.member.prefill_attention or None,
        "blocks": {"total": blocks.total, "free": blocks.free, "cached": blocks.cached, "held": blocks.held},
        "requests": {"waiting": requests.waiting, "running": requests.running},
        "context": {
            "tokens": entry.member.max_context,
            "limit": CONTEXT_LIMITS[entry.member.context_limit],
            "reason": _context_reason(entry.member),
        },
    }


def context_notes(status: GetStatusResponse) -> list[str]:
    """A sentence for each worker whose contexts are shorter than the model's."""
    cut = (entry.member for entry in status.members if entry.member.context_limit != CONTEXT_LIMIT_UNSPECIFIED)
    return [
        f"{member.name}: prompt plus completion are at most {member.max_context} tokens: {_context_reason(member)}"
        for member in cut
    ]


def _context_reason(member: Member) -> str:
    if member.max_context == 0:
        return "the model isn't loaded yet"
    return CONTEXT_REASONS[member.context_limit].format(member.max_context)


def _router(status: GetStatusResponse) -> str | None:
    """host:port of each router that is ready, with commas between."""
    return ",".join(ready_routers(entry.member for entry in status.members)) or None


@dataclass(frozen=True, slots=True)
class MemberProgress:
    """Progress of one member."""

    name: str
    text: str
    """Role and state of the member."""
    settled: bool
    """Whether the member is as desired."""


def progress(status: GetStatusResponse) -> list[MemberProgress]:
    """The progress of every member that is desired or still there."""
    present = {entry.member.name: entry.member for entry in status.members}
    wanted = {member.name: member for member in status.desired.members}
    found = []
    for name in sorted(wanted, key=lambda name: (name.rpartition("-")[0] != "worker", len(name), name)):
        trouble, waits_for = status.troubles.get(name, ""), status.waits.get(name, "")
        words = " ".join(_words(wanted[name], present.get(name), trouble, waits_for))
        # A router is ready when it can place requests; without workers it is as desired nevertheless.
        idle = wanted[name].role == ROLE_ROUTER and words.endswith(" loading") and not status.ready
        plain = wanted[name].stage == STAGE_SERVE and not wanted[name].replaces
        found.append(MemberProgress(name, words, plain and (words.endswith(" ready") or (idle and status.settled))))
    return found


def _words(wanted: DesiredMember, present: Member | None, trouble: str, waits_for: str) -> Iterator[str]:
    yield role_name(wanted.role)
    if wanted.replaces:
        yield f"for {wanted.replaces},"
    if wanted.stage not in (STAGE_SERVE, STAGE_LEAVE, STAGE_RETURN):
        yield "to be replaced,"
    if waits_for:
        yield f"waits for {waits_for}"
    elif trouble:
        yield f"failing ({trouble})"
    elif wanted.stage in (STAGE_LEAVE, STAGE_RETURN):
        yield "leaving" if wanted.stage == STAGE_LEAVE else "restarting"
    elif present is None:
        yield "starting"
    elif present.state == MEMBER_STATE_READY and present.role != wanted.role:
        yield "changing its role"
    else:
        yield WORDS.get(present.state, "lost")


def scaling_json(scaling: Scaling) -> dict[str, Any]:
    """The JSON for `kvrelay status --json`."""
    return {
        "enabled": scaling.enabled,
        "ttft": {
            "target_seconds": scaling.ttft_target_seconds,
            "attained": _optional(scaling, "ttft_attained"),
        },
        "tpot": {
            "target_seconds": scaling.tpot_target_seconds,
            "attained": _optional(scaling, "tpot_attained"),
        },
        "prefill": {
            "pressure": _optional(scaling, "prefill_pressure"),
            "queue": scaling.prefill_queue,
            "queue_seconds": round(scaling.prefill_queue_seconds, 3),
        },
        "decode": {
            "pressure": _optional(scaling, "decode_pressure"),
            "queue": scaling.decode_queue,
            "queue_seconds": round(scaling.decode_queue_seconds, 3),
        },
        "decisions": [_decision(decision) for decision in scaling.decisions],
    }


def scaling_lines(scaling: Scaling) -> Iterator[str]:
    """The lines for `kvrelay status`; none if the supervisor tells nothing about scaling."""
    if not scaling.ttft_target_seconds:
        return
    prefill, decode = _pressure(scaling, "prefill_pressure"), _pressure(scaling, "decode_pressure")
    yield (
        f"scaling {'on' if scaling.enabled else 'off'}   "
        f"TTFT within {scaling.ttft_target_seconds:g} s: {_share(scaling, 'ttft_attained')}   "
        f"TPOT within {1000 * scaling.tpot_target_seconds:g} ms: {_share(scaling, 'tpot_attained')}   "
        f"predicted/target: prefill {prefill}, decode {decode}   "
        f"waiting: prefill {scaling.prefill_queue}, decode {scaling.decode_queue}"
    )
    for decision in scaling.decisions[-MOST_DECISIONS:]:
        refused = f"; refused: {decision.refused}" if decision.refused else ""
        yield f"  {_clock(decision)}   {decision.reason}{refused}"


def _decision(decision: ScalingDecision) -> dict[str, Any]:
    return {
        "time": _clock(decision),
        "reason": decision.reason,
        "roles": {worker: role_name(role) for worker, role in sorted(decision.moves.items())},
        "workers": {role_name(pool.role): pool.count for pool in decision.pools},
        "refused": decision.refused or None,
    }


def _clock(decision: ScalingDecision) -> str:
    return datetime.fromtimestamp(decision.time, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _optional(scaling: Scaling, name: Figure) -> float | None:
    return round(getattr(scaling, name), 3) if scaling.HasField(name) else None


def _share(scaling: Scaling, name: Figure) -> str:
    return f"{100 * getattr(scaling, name):.0f} %" if scaling.HasField(name) else "-"


def _pressure(scaling: Scaling, name: Figure) -> str:
    return f"{getattr(scaling, name):.2f}" if scaling.HasField(name) else "-"
