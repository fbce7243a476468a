"""The commands of SupervisorService: from messages to the fleet, and from its refusals to messages."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from kvrelay.cluster.fleet.desired import Refused
from kvrelay.cluster.fleet.fleet import Fleet
from kvrelay.internal.v1.supervisor_pb2 import (
    CommandResponse,
    DrainRequest,
    Refusal,
    RestartRequest,
    Role,
    ScaleRequest,
    SetRoleRequest,
    UpgradeRequest,
)
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceServicer
from kvrelay.rpc.identity import ROLES, MemberRole, role_of

RequestT = TypeVar("RequestT")
Context = grpc.aio.ServicerContext[Any, Any]


def _answered(
    command: Callable[["Commands", RequestT], Awaitable[int]],
) -> Callable[["Commands", RequestT, Context], Awaitable[CommandResponse]]:
    """A handler of gRPC for a command that returns a revision; a refusal is an answer, too."""

    async def handle(self: "Commands", request: RequestT, context: Context) -> CommandResponse:
        try:
            return CommandResponse(revision=await command(self, request))
        except Refused as refused:
            return CommandResponse(refusal=Refusal(code=refused.code, message=str(refused)))

    return handle


class Commands(SupervisorServiceServicer):
    """Serves the commands; every one is authorized as all of the supervisor's calls are."""

    def __init__(self) -> None:
        self.fleet: Fleet | None = None
        """The fleet; None for a supervisor that starts no members."""

    @_answered
    async def Scale(self, request: ScaleRequest) -> int:
        counts: dict[MemberRole, int] = {}
        for pool in request.pools:
            role = _role(pool.role)
            if role in counts:
                raise Refused(Refusal.CODE_INVALID, f"{role} is given twice")
            counts[role] = pool.count
        return await self._fleet.scale(counts)

    @_answered
    async def Drain(self, request: DrainRequest) -> int:
        return await self._fleet.drain(request.member, replaced=request.replace, force=request.force)

    @_answered
    async def SetRole(self, request: SetRoleRequest) -> int:
        return await self._fleet.set_role(request.member, _role(request.role), force=request.force)

    @_answered
    async def Upgrade(self, request: UpgradeRequest) -> int:
        if request.rollback:
            return await self._fleet.roll_back(in_place=request.in_place)
        return await self._fleet.upgrade(request.config, in_place=request.in_place)

    @_answered
    async def Restart(self, request: RestartRequest) -> int:
        return await self._fleet.restart(request.members, request.id, in_place=request.in_place)

    @property
    def _fleet(self) -> Fleet:
        if self.fleet is None:
            raise Refused(Refusal.CODE_UNSUPPORTED, "this supervisor starts no members, so it can't change them either")
        return self.fleet


def _role(number: Role) -> MemberRole:
    role = role_of(number)
    if role is None:
        raise Refused(Refusal.CODE_INVALID, f"role is {number}; allowed: {', '.join(map(str, ROLES.values()))}")
    return role
