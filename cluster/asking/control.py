"""Sends the operator's commands to the supervisor, and follows their progress."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from kvrelay.cluster.asking import status as status_of
from kvrelay.cluster.asking.status import MemberProgress, progress
from kvrelay.cluster.errors import RunError, UsageError, listed
from kvrelay.cluster.state import ClusterState
from kvrelay.internal.v1.supervisor_pb2 import (
    CommandResponse,
    DrainRequest,
    PoolSize,
    Refusal,
    RestartRequest,
    ScaleRequest,
    SetRoleRequest,
    UpgradeRequest,
)
from kvrelay.internal.v1.supervisor_pb2_grpc import SupervisorServiceStub
from kvrelay.rpc.identity import ROLES, MemberRole, WorkerRole

COMMAND_SECONDS = 10.0
"""Seconds for the supervisor to answer; it may be starting again."""
POLL_SECONDS = 0.2
USAGE = (Refusal.CODE_INVALID, Refusal.CODE_UNKNOWN_MEMBER)


class Control:
    """Gives commands to the supervisor of one cluster. Each returns the revision of the desired state that has it.

    Every command may be repeated: one that was carried out already changes nothing. So each is tried again for
    COMMAND_SECONDS while the supervisor can't be reached.

    Raises:
        UsageError: the supervisor refuses the command, as it names something that isn't there or isn't allowed.
        RunError: it refuses it for now, or doesn't answer.
    """

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster

    def scale(self, counts: Mapping[MemberRole, int]) -> int:
        """Sets the number of members by role."""
        pools = [PoolSize(role=ROLES[role], count=count) for role, count in counts.items()]
        return self._give("Scale", ScaleRequest(pools=pools))

    def drain(self, member: str, *, replace: bool = False, force: bool = False) -> int:
        """Ends a member when its requests are done or have moved."""
        return self._give("Drain", DrainRequest(member=member, replace=replace, force=force))

    def set_role(self, member: str, role: WorkerRole, *, force: bool = False) -> int:
        """Gives a worker another role."""
        return self._give("SetRole", SetRoleRequest(member=member, role=ROLES[role], force=force))

    def upgrade(self, config: str, *, in_place: bool = False) -> int:
        """Replaces every member by one with another configuration, given as JSON."""
        return self._give("Upgrade", UpgradeRequest(config=config, in_place=in_place))

    def roll_back(self, *, in_place: bool = False) -> int:
        """Goes back to the configuration before."""
        return self._give("Upgrade", UpgradeRequest(rollback=True, in_place=in_place))

    def restart(self, members: Sequence[str] = (), *, in_place: bool = False) -> int:
        """Replaces these members, or all."""
        return self._give("Restart", RestartRequest(id=uuid.uuid4().hex, members=members, in_place=in_place))

    def wait(self, revision: int, seconds: float, tell: Callable[[Sequence[MemberProgress]], None]) -> None:
        """Returns when the cluster is as desired.

        Args:
            revision: of the desired state, at least.
            tell: called with how far the members are, whenever that may have changed.

        Raises:
            RunError: a rolling change has stopped, or it takes longer than `seconds`; the cluster goes on by itself.
        """
        deadline = time.monotonic() + seconds
        left: list[MemberProgress] = []
        while time.monotonic() < deadline:
            status = status_of.get_status(self._cluster)
            if status is not None and status.desired.revision >= revision:
                left = progress(status)
                tell(left)
                if status.desired.halted:
                    raise RunError(
                        f"{status.desired.halted}; the other members serve on. `kvrelay upgrade --rollback` goes back"
                    )
                if status.settled:
                    return
            time.sleep(POLL_SECONDS)
        missing = listed(f"{each.name} {each.text}" for each in left if not each.settled)
        raise RunError(
            f"not done within {seconds:g} s: {missing or 'the supervisor does not answer'}. It goes on; see "
            "`kvrelay status`"
        )

    def _give(self, command: str, request: Any) -> int:
        credentials = status_of.operator(self._cluster)
        address = self._cluster.supervisor
        deadline = time.monotonic() + COMMAND_SECONDS
        while True:
            with credentials.blocking_channel(address, "supervisor") as channel:
                try:
                    answer: CommandResponse = getattr(SupervisorServiceStub(channel), command)(
                        request, timeout=COMMAND_SECONDS, metadata=credentials.metadata
                    )
                    break
                except grpc.RpcError as error:
                    if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                        text = error.details() or error.code().name
                        raise RunError(f"the supervisor at {address}: {text}; the command may be repeated") from None
            time.sleep(POLL_SECONDS)
        if answer.HasField("refusal"):
            kind = UsageError if answer.refusal.code in USAGE else RunError
            raise kind(answer.refusal.message)
        return answer.revision
