"""The ground of the nemesis: the cluster, the network and the load that its faults disturb."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc

from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY
from nemesis.load import Load
from support.chaos import Chaos
from support.supervised import Supervised


@dataclass(frozen=True)
class Ground:
    """The cluster, network and load that faults disturb."""

    cluster: Supervised
    chaos: Chaos
    load: Load
    webs: Sequence[str] = ()
    """host:port of each router's HTTP, in the order of the load's addresses."""
    authority: str = ""
    """File with the certificate that signed the routers'."""

    @property
    def workers(self) -> list[str]:
        """Names of the workers that are desired now; commands change them."""
        return [name for name, role in self._roles().items() if role != "router"]

    @property
    def prefills(self) -> list[str]:
        return [name for name, role in self._roles().items() if role == "prefill"]

    def _roles(self) -> dict[str, str]:
        """The role of each desired member whose process has started, as the supervisor says."""
        with suppress(grpc.RpcError):
            roles = self.cluster.desired()
            self.cluster.known = {
                name: role for name, role in roles.items() if (self.cluster.folder / f"{name}.pid").exists()
            }
        return self.cluster.known

    async def recovered(self, gone: dict[str, int]) -> bool:
        """Whether every member is ready, and the processes of `gone` (by name) are replaced."""
        with suppress(grpc.RpcError):
            status = await asyncio.to_thread(self.cluster.status)
            members = [each.member for each in status.members]
            ready = {member.name: member.pid for member in members if member.state == MEMBER_STATE_READY}
            wanted = {member.name for member in status.desired.members}
            # A command may have ended the victim for good meanwhile.
            replaced = all(ready.get(name, pid) != pid for name, pid in gone.items() if name in wanted)
            return status.ready and ready.keys() >= wanted and replaced and status.settled
        return False


Inject = Callable[[Ground, random.Random], Awaitable[dict[str, int]]]
"""Function that injects a fault; when it is over, returns the processes that must be replaced: pids by name."""
