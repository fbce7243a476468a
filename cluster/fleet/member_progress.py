"""Progress of each member towards the desired state, for people."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_STARTING,
    MEMBER_STATE_UNSPECIFIED,
    ROLE_ROUTER,
    STAGE_LEAVE,
    STAGE_RETURN,
    STAGE_SERVE,
    DesiredMember,
    GetStatusResponse,
    Member,
)
from kvrelay.rpc.identity import role_name

WORDS = {
    MEMBER_STATE_UNSPECIFIED: "starting",
    MEMBER_STATE_STARTING: "loading",
    MEMBER_STATE_READY: "ready",
    MEMBER_STATE_DRAINING: "draining",
}
"""Words for the states of a member while it comes up; another state is `lost`."""


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
