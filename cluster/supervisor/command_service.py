"""The commands of SupervisorService: from messages to the fleet, and from its refusals to messages."""

from collections.abc import Awaitable
from typing import Any

import grpc

from kvrelay.cluster.fleet.desired import Code, Refused
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

Context = grpc.aio.ServicerContext[Any, Any]


class Commands(SupervisorServiceServicer):
    """Serves the commands; every one is authorized as all of the supervisor's calls are."""

    def __init__(self) -> None:
        self.fleet: Fleet | None = None
        """The fleet; None for a supervisor that starts no members."""

    async def Scale(self, request: ScaleRequest, context: "Context") -> CommandResponse:
        async def scale() -> int:
            counts: dict[MemberRole, int] = {}
            for pool in request.pools:
                role = _role(pool.role)
                if role in counts:
                    raise Refused(Code.INVALID, f"{role} is given twice")
                counts[role] = pool.count
            return await self._fleet.scale(counts)

        return await _answer(scale())

    async def Drain(self, request: DrainRequest, context: "Context") -> CommandResponse:
        async def drain() -> int:
            return await self._fleet.drain(request.member, replaced=request.replace, force=request.force)

        return await _answer(drain())

    async def SetRole(self, request: SetRoleRequest, context: "Context") -> CommandResponse:
        async def set_role() -> int:
            return await self._fleet.set_role(request.member, _role(request.role), force=request.force)

        return await _answer(set_role())

    async def Upgrade(self, request: UpgradeRequest, context: "Context") -> CommandResponse:
        async def upgrade() -> int:
            if request.rollback:
                return await self._fleet.roll_back(in_place=request.in_place)
            return await self._fleet.upgrade(request.config, in_place=request.in_place)

        return await _answer(upgrade())

    async def Restart(self, request: RestartRequest, context: "Context") -> CommandResponse:
        async def restart() -> int:
            return await self._fleet.restart(request.members, request.id, in_place=request.in_place)

        return await _answer(restart())

    @property
    def _fleet(self) -> Fleet:
        if self.fleet is None:
            raise Refused(Code.UNSUPPORTED, "this supervisor starts no members, so it can't change them either")
        return self.fleet


async def _answer(command: Awaitable[int]) -> CommandResponse:
    try:
        return CommandResponse(revision=await command)
    except Refused as refused:
        return CommandResponse(refusal=Refusal(code=f"CODE_{refused.code.name}", message=str(refused)))


def _role(number: Role) -> MemberRole:
    role = role_of(number)
    if role is None:
        raise Refused(Code.INVALID, f"role is {number}; allowed: {', '.join(map(str, ROLES.values()))}")
    return role
