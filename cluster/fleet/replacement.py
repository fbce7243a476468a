"""Keeps a member's process running: how it ended, and when its replacement starts. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.rpc.identity import MemberRole

FIRST_SECONDS = 0.5
MOST_SECONDS = 30.0
LONG_LIFE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The end of one process of a member."""

    reason: str = ""
    """Reason in one line; empty if it was asked to stop."""
    mistake: bool = False
    """Whether its configuration made it fail at start (a missing model, a port in use): another try would fail too."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one process: its role and its configuration."""

    role: MemberRole
    config: str
    """Text of the cluster's configuration."""
    roles: Mapping[str, MemberRole] = field(default_factory=dict)
    """Roles of all members, by name; the place of this one depends on them."""


class Launcher(Protocol):
    """Starts, finds and ends the processes of members, at most one for each name at any time.

    It reads configurations, which are text to the others: a whole cluster's options, as JSON.
    """

    config: str
    """Configuration that a new cluster begins with."""

    def members(self, config: str) -> dict[str, MemberRole]:
        """The members that a new cluster begins with."""

    async def upgrade(self, present: str, config: str) -> str:
        """The configuration that follows the present one, complete.

        Raises:
            ValueError: it can't be used, or differs in what can't change while the cluster runs; the text says why.
        """

    def startable(self, config: str, role: MemberRole, others: int) -> str:
        """The reason why no further member of this role can be started; empty if it can.

        Args:
            others: routers, or workers of all roles, that there are already.
        """

    def lacks_room(self, config: str, present: Mapping[MemberRole, int], wanted: Mapping[MemberRole, int]) -> str:
        """The reason why there is no room for so many members; empty if there is, or may be. Blocks for a while.

        Args:
            present: members of every role that there are.
        """

    def cycled(self, config: str) -> frozenset[MemberRole]:
        """The roles whose members must end before their successors start: those with an address of their own."""

    def unchanged(self, present: str, config: str) -> frozenset[MemberRole]:
        """The roles whose members are started as before with another configuration."""

    async def adopt(self, name: str) -> bool:
        """Finds a process that an earlier supervisor has started, for `run` to watch; False if none runs."""

    async def run(self, name: str, plan: Plan, supervisor: str) -> ProcessEnd:
        """Returns when the member's process has ended. Starts one first, unless one was just adopted.

        Args:
            supervisor: host:port that the process sends its heartbeats to.
        """

    def waits_for(self, name: str) -> str:
        """The reason why `run` can't start the member's process yet, such as missing resources; empty if none."""

    async def stop(self, name: str, grace: float) -> None:
        """Gives the member `grace` seconds to finish, and ends its process in any case.

        May be called before `run` has started it; then it is called again.
        """

    async def kill(self, name: str) -> None:
        """Ends the member's process at once."""


class Backoff:
    """The wait before a member's next process: none after a long life, then 0.5 s doubling to 30 s."""

    def __init__(self) -> None:
        self._next = 0.0

    def after(self, life_seconds: float) -> float:
        """Seconds to wait after a process that lived for `life_seconds`."""
        if life_seconds >= LONG_LIFE_SECONDS:
            self._next = 0.0
        wait = self._next
        self._next = min(max(FIRST_SECONDS, 2 * self._next), MOST_SECONDS)
        return wait
