"""Names that processes share: of processes, roles, states of members and limits of contexts; and addresses as text."""

from typing import Literal, NamedTuple, get_args

from kvrelay.internal.v1.supervisor_pb2 import (
    ROLE_COLOCATED,
    ROLE_DECODE,
    ROLE_PREFILL,
    ROLE_ROUTER,
    MemberState,
    Role,
)
from kvrelay.internal.v1.worker_pb2 import (
    CONTEXT_LIMIT_OPTION,
    CONTEXT_LIMIT_POOL,
    CONTEXT_LIMIT_UNSPECIFIED,
    ContextLimit,
)


class WorkerId(NamedTuple):
    """One incarnation of one worker. Every part of kvrelay identifies a worker by it."""

    name: str
    """Unique in the cluster, e.g. `worker-0`; a replacement of the worker keeps it."""
    incarnation: str
    """Drawn when the process starts: a message for an earlier process of this name can be refused."""

    def __str__(self) -> str:
        return f"{self.name} {self.incarnation}"


def join(host: str, port: int) -> str:
    """host:port, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


WorkerRole = Literal["prefill", "decode", "colocated"]
MemberRole = WorkerRole | Literal["router"]

WORKER_ROLES: tuple[WorkerRole, ...] = get_args(WorkerRole)
ROLES: dict[MemberRole, Role] = {
    "prefill": ROLE_PREFILL,
    "decode": ROLE_DECODE,
    "colocated": ROLE_COLOCATED,
    "router": ROLE_ROUTER,
}
WORKERS: dict[Role, WorkerRole] = {ROLES[role]: role for role in WORKER_ROLES}

CONTEXT_LIMITS: dict[ContextLimit, str] = {
    CONTEXT_LIMIT_UNSPECIFIED: "model",
    CONTEXT_LIMIT_OPTION: "option",
    CONTEXT_LIMIT_POOL: "pool",
}
CONTEXT_REASONS: dict[ContextLimit, str] = {
    CONTEXT_LIMIT_UNSPECIFIED: "the model's context is {}",
    CONTEXT_LIMIT_OPTION: "the workers' option engine.max_context is {}",
    CONTEXT_LIMIT_POOL: "the KV pool of a worker (engine.kv_memory_bytes) holds {} tokens",
}
"""Reasons why a context isn't longer, to be formatted with its greatest length in tokens."""


def role_name(role: Role) -> str:
    """`prefill`, for example."""
    return Role.Name(role).removeprefix("ROLE_").lower()


def role_of(number: Role) -> MemberRole | None:
    """The role with this number; None if there is none."""
    return next((role for role, known in ROLES.items() if known == number), None)


def state_name(state: MemberState) -> str:
    """`ready`, for example."""
    return MemberState.Name(state).removeprefix("MEMBER_STATE_").lower()


def context_limit(name: str) -> ContextLimit:
    """The number of one of CONTEXT_LIMITS."""
    return next(number for number, known in CONTEXT_LIMITS.items() if known == name)
