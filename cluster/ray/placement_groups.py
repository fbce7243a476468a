"""The resources that members have on a Ray cluster: a placement group for each, found by its name.

A group outlives its actor, so a replacement finds its resources still reserved. One that waits for resources is a
demand that Ray's autoscaler sees.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from kvrelay.cluster.fleet.nodes import Node, PlacementRequest, preferred

logger = logging.getLogger(__name__)

WAIT_SECONDS = 2
"""Seconds that a member waits for its resources before this is reported."""
OWN_SECONDS = 60.0
"""Seconds to wait for a node that is meant for the member's role, before it takes one of another role."""
UNNAMED_SECONDS = 30.0
"""Seconds for Ray to free the name of a killed actor or of a removed placement group."""


class PlacementGroups:
    """Reservations of Ray's resources for one cluster's members."""

    def __init__(self, namespace: str) -> None:
        self._prefix = f"{namespace}/"
        self._lock = asyncio.Lock()
        """Lock that is held while a place is chosen: the next choice has to know it."""
        self._chosen: dict[str, str] = {}
        """Ids of the nodes that were asked for, by the member's name. Ray may choose others."""
        self._waits: dict[str, str] = {}

    def waits_for(self, name: str) -> str:
        """The resources that a member waits for; empty if for none."""
        return self._waits.get(name, "")

    async def reserve(self, name: str, request: PlacementRequest, wanted: Callable[[], bool]) -> PlacementGroup | None:
        """Returns the member's reservation when it has its resources, or None as soon as it isn't `wanted` any more."""
        own, begun = request.selector, time.monotonic()
        group = await self._asked(name, request, own)
        try:
            # Asks Ray's GCS; `group.ready()` would start a process for that.
            while not await asyncio.to_thread(group.wait, WAIT_SECONDS):
                if not wanted():
                    return None
                if own and time.monotonic() - begun > OWN_SECONDS:
                    own = {}
                    await asyncio.to_thread(self.release, name)
                    group = await self._asked(name, request, own)
                if name not in self._waits:
                    logger.warning("waiting for resources", extra={"member": name, "resources": request.bundle})
                    needed = ", ".join(f"{amount:g} {resource}" for resource, amount in request.bundle.items())
                    several = "" if request.hosts == 1 else f" {request.hosts} times"
                    self._waits[name] = f"a node of the Ray cluster with {needed} free{several}"
        finally:
            self._waits.pop(name, None)
            self._chosen.pop(name, None)
        return group

    def release(self, name: str) -> None:
        """Gives a reservation back; returns when Ray has forgotten its name."""
        deadline = time.monotonic() + UNNAMED_SECONDS
        while (group := self._find(name)) is not None and time.monotonic() < deadline:
            remove_placement_group(group)
            time.sleep(0.05)

    async def _asked(self, name: str, request: PlacementRequest, own: dict[str, str]) -> PlacementGroup:
        async with self._lock:
            return await asyncio.to_thread(self._made, name, request, own)

    def _made(self, name: str, request: PlacementRequest, own: dict[str, str]) -> PlacementGroup:
        """The member's reservation, on a node with the labels `own`."""
        group = self._find(name)
        if group is not None:
            bundles: list[dict[str, float]] = group.bundle_specs
            if bundles == [request.bundle] * request.hosts:
                return group
            self.release(name)  # it is of an earlier role or configuration
        node = self._place(request, own) if request.hosts == 1 else None
        if node is not None:
            self._chosen[name] = node
        made: PlacementGroup = placement_group(
            [dict(request.bundle) for _ in range(request.hosts)],
            strategy="STRICT_PACK" if request.hosts == 1 else "PACK",
            name=self._prefix + name,
            lifetime="detached",
            _soft_target_node_id=node,
            bundle_label_selector=[own] * request.hosts if own else None,
        )
        return made

    def free(self) -> list[dict[str, float]]:
        """The resources of each node that no reservation has. Asks Ray, and blocks meanwhile."""
        return [dict(node.free) for node in self._nodes()[0]]

    def _place(self, request: PlacementRequest, own: dict[str, str]) -> str | None:
        """The node to ask for; None to leave it to Ray."""
        nodes, places = self._nodes()
        if len(nodes) < 2:
            return None
        return preferred(request, [node for node in nodes if own.items() <= node.labels.items()], places)

    def _nodes(self) -> tuple[list[Node], dict[str, str]]:
        """The nodes that live, and the members' nodes by name."""
        present = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]  # untyped in Ray
        taken: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        places = dict(self._chosen)
        for table in placement_group_table().values():
            for index, node in table["bundles_to_node_id"].items():
                if node and table["state"] != "REMOVED":
                    for resource, amount in table["bundles"][index].items():
                        taken[node][resource] += amount
                    places[table["name"].removeprefix(self._prefix)] = node
        nodes = []
        for node in present:
            rest = taken[node["NodeID"]]
            free = {resource: amount - rest[resource] for resource, amount in node["Resources"].items()}
            nodes.append(Node(node["NodeID"], node["Labels"], free))
        return nodes, places

    def _find(self, name: str) -> PlacementGroup | None:
        try:
            group: PlacementGroup = ray.util.get_placement_group(self._prefix + name)
        except ValueError:
            return None
        return group
