"""`kvrelay status`: what the supervisor knows, as a table for people and as JSON for programs."""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.table import Table

from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_READY,
    ROLE_ROUTER,
    GetStatusRequest,
    GetStatusResponse,
    MemberState,
    MemberStatus,
    Role,
)
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceStub
from kvrelay.rpc.options import channel_options

TIMEOUT_SECONDS = 5.0
NOT_RUNNING: dict[str, Any] = {"ready": False, "router": None, "routers": [], "workers": []}


def get_status(supervisor: str, timeout: float = TIMEOUT_SECONDS) -> GetStatusResponse | None:
    """What the supervisor at host:port knows; None if it doesn't answer in time."""
    with grpc.insecure_channel(supervisor, options=channel_options()) as channel:
        stub = SupervisorServiceStub(channel)
        try:
            response: GetStatusResponse = stub.GetStatus(GetStatusRequest(), timeout=timeout)
        except grpc.RpcError:
            return None
        return response


def serves(router: str, timeout: float = TIMEOUT_SECONDS) -> bool:
    """Whether the router at host:port says that a request can be placed now."""
    with grpc.insecure_channel(router, options=channel_options()) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def as_json(status: GetStatusResponse) -> dict[str, Any]:
    """What `kvrelay status --json` prints."""
    return {
        "ready": status.ready,
        "router": _router(status),
        "routers": [_router_entry(entry) for entry in status.members if entry.member.role == ROLE_ROUTER],
        "workers": [_worker(entry) for entry in status.members if entry.member.role != ROLE_ROUTER],
    }


def as_table(status: GetStatusResponse, dashboard: str) -> Table:
    """The same for people."""
    title = (
        f"{'ready' if status.ready else 'not ready'}   router {_router(status) or '-'}   dashboard {dashboard or '-'}"
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("worker", "role", "state"):
        table.add_column(column)
    for column in ("pid", "free", "cached", "held", "blocks", "waiting", "running", "heard"):
        table.add_column(column, justify="right")
    table.add_column("incarnation", no_wrap=True)
    for entry in status.members:
        member, blocks, requests = entry.member, entry.load.blocks, entry.load.requests
        table.add_row(
            member.name,
            _role(member.role),
            _state(member.state),
            str(member.pid),
            *(str(count) for count in (blocks.free, blocks.cached, blocks.held, blocks.total)),
            *(str(count) for count in (requests.waiting, requests.running)),
            f"{entry.heartbeat_age_seconds:.1f} s",
            member.incarnation[:8],
        )
    return table


def _router_entry(entry: MemberStatus) -> dict[str, Any]:
    member, requests = entry.member, entry.load.requests
    return {
        "name": member.name,
        "address": member.address,
        "pid": member.pid,
        "incarnation": member.incarnation,
        "state": _state(member.state),
        "requests": {"queued": requests.waiting, "running": requests.running},
    }


def _worker(entry: MemberStatus) -> dict[str, Any]:
    member, blocks, requests = entry.member, entry.load.blocks, entry.load.requests
    return {
        "name": member.name,
        "role": _role(member.role),
        "pid": member.pid,
        "incarnation": member.incarnation,
        "state": _state(member.state),
        "blocks": {"total": blocks.total, "free": blocks.free, "cached": blocks.cached, "held": blocks.held},
        "requests": {"waiting": requests.waiting, "running": requests.running},
    }


def _router(status: GetStatusResponse) -> str | None:
    for entry in status.members:
        if entry.member.role == ROLE_ROUTER and entry.member.state == MEMBER_STATE_READY:
            return entry.member.address
    return None


def _role(role: Role) -> str:
    return Role.Name(role).removeprefix("ROLE_").lower()


def _state(state: MemberState) -> str:
    return MemberState.Name(state).removeprefix("MEMBER_STATE_").lower()
