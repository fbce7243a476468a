"""A membership as the supervisor sends it to its members."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvrelay.internal.v1.supervisor_pb2 import Member, Role
from kvrelay.rpc.identity import WorkerId


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """One version of it."""

    version: int = -1
    members: tuple[Member, ...] = ()
    complete: bool = False
    roles: Mapping[str, Role] = field(default_factory=dict)
    """Those that members are to have, by name."""

    def generation(self, worker: WorkerId) -> int:
        """The generation of a member in it; 0 if it isn't."""
        for member in self.members:
            if (member.name, member.incarnation) == worker:
                return member.generation
        return 0
