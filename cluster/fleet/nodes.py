"""Chooses the node of a Ray cluster for a member. No I/O; a hint, since Ray knows best which resources are free.

A role's workers are spread, so that a lost node takes few of them. Among nodes that are equal in that, a worker goes
where it finds the most workers that it can hand KV over to: on its own node first, then within each wider domain, such
as NVLink domain, rack and zone, as far as the nodes' labels tell.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrelay.rpc.identity import MemberRole

PARTNERS: Mapping[MemberRole, MemberRole] = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the Ray cluster."""

    id: str
    labels: Mapping[str, str]
    free: Mapping[str, float]
    """Resources that no reservation has."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Needs of a member that its place depends on."""

    role: MemberRole
    bundle: Mapping[str, float]
    """Resources that it reserves on each of its machines."""
    roles: Mapping[str, MemberRole]
    """Roles of all members, by name."""
    domains: Sequence[str]
    """Labels of nodes that are near each other if they have the same value, the nearest first."""
    role_label: str = ""
    """Label of a node that is meant for one role, with the role as its value; empty if nodes are for all."""
    hosts: int = 1
    """Machines that it is divided over."""

    @property
    def selector(self) -> dict[str, str]:
        """Labels of the nodes that are meant for the role."""
        return {self.role_label: self.role} if self.role_label else {}


def preferred(request: PlacementRequest, nodes: Sequence[Node], places: Mapping[str, str]) -> str | None:
    """The node where the member is to run; None if its resources are free on none.

    Args:
        places: ids of the members' nodes, by name.
    """
    fitting = [node for node in nodes if all(node.free.get(name, 0.0) >= need for name, need in request.bundle.items())]
    known = {node.id: node for node in nodes}
    residents = [
        (known[place], role)
        for name, place in places.items()
        if place in known and (role := request.roles.get(name)) is not None
    ]

    def order(node: Node) -> tuple[int, list[int], str]:
        here = Counter(role for other, role in residents if other.id == node.id)
        near = [here, *(_within(node, label, residents) for label in request.domains)]
        partner = PARTNERS.get(request.role)
        lack = [count[request.role] - (count[partner] if partner else 0) for count in near]
        return here[request.role], lack, node.id

    best = min(fitting, key=order, default=None)
    return None if best is None else best.id


def _within(node: Node, label: str, residents: Sequence[tuple[Node, MemberRole]]) -> Counter[MemberRole]:
    """The number of members of each role that run in the same domain."""
    domain = node.labels.get(label)
    return Counter(role for other, role in residents if domain is not None and other.labels.get(label) == domain)
