"""Findings, the checks that make them, and the cluster as all checks see it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from kvrelay.cluster.state import ClusterState
from kvrelay.internal.v1.describe_pb2 import Description
from kvrelay.internal.v1.supervisor_pb2 import DescribeResponse, GetStatusResponse, Member

Severity = Literal["ok", "note", "warning", "error"]
"""An error keeps requests from being served or makes answers doubtful; a warning may become an error or costs speed; a
note is information."""

WRONG: tuple[Severity, ...] = ("warning", "error")
"""Severities with which `kvrelay doctor` exits with code 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about the cluster."""

    severity: Severity
    subject: str
    """Member, pair or other thing that the finding is about."""
    found: str
    advice: str = ""
    """Advice on what to do about the finding; empty if nothing has to be done."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Result of the attempt to reach one address."""

    name: str
    """Kind and address of a router, page or dashboard."""
    error: str
    """Reason why it didn't answer; empty if it did."""


@dataclass(frozen=True, slots=True)
class Examined:
    """A cluster, as the checks see it."""

    state: ClusterState
    status: GetStatusResponse | None
    """Status from the supervisor; None if it doesn't answer."""
    described: DescribeResponse | None = None
    """Descriptions from the supervisor; None if it doesn't answer."""
    reached: tuple[Reached, ...] = ()
    """Answers of routers and dashboards."""

    @property
    def members(self) -> dict[str, Member]:
        """All members by name."""
        return {} if self.status is None else {entry.member.name: entry.member for entry in self.status.members}

    @property
    def descriptions(self) -> Mapping[str, Description]:
        """The description of each member that has answered, by its name, and the supervisor's as `supervisor`."""
        if self.described is None:
            return {}
        found = {each.name: each.description for each in self.described.members if each.HasField("description")}
        if self.described.HasField("supervisor"):
            found["supervisor"] = self.described.supervisor
        return found


Check = Callable[[Examined], Iterator[Finding]]
"""Checks one aspect of a cluster: yields its findings, good ones included; none if the aspect doesn't apply."""


def size(nbytes: float) -> str:
    """A number of bytes with a unit, for people."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes:.0f} bytes"
