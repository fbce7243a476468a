"""Runs members as named, detached Ray actors, each in a placement group of its own.

A placement group outlives its actor, so a replacement finds its resources still reserved. Actors are detached, so
running streams outlive the supervisor; a restarted one finds them by their names, and `supervisor_actor.end` ends them.
"""

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvrelay.cluster.actors import CONCURRENCY, WATCH_SECONDS, RouterActor, WorkerActor
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.replacement import Ended
from kvrelay.rpc.serve import EXIT_SECONDS, STOP_SECONDS

logger = logging.getLogger(__name__)

GROUP_SECONDS = 5
RETRY_SECONDS = 0.5
UNNAMED_SECONDS = 30.0
"""For Ray to give the name of a killed actor free."""


class RayLauncher:
    """The supervisor's Launcher of Ray actors."""

    def __init__(self, config: ClusterConfig, token: str) -> None:
        """`token`: the join token, unless `config` names a file with it."""
        self._config = config
        self._token = token
        self._namespace = config.ray.namespace
        self._workers = {worker.name: worker for worker in config.worker_configs()}
        self._routers = {router.name: router for router in config.router_configs()}
        self._bundles = {name: config.bundle(worker.role) for name, worker in self._workers.items()}
        self._bundles |= dict.fromkeys(self._routers, config.bundle(None))
        self._actors: dict[str, Any] = {}
        self._adopted: set[str] = set()
        self.names = tuple(self._bundles)

    async def adopt(self, name: str) -> bool:
        """Finds the running actor of this name."""
        actor = await asyncio.to_thread(self._find, name)
        if actor is None:
            return False
        self._actors[name] = actor
        self._adopted.add(name)
        return True

    async def run(self, name: str, supervisor: str) -> Ended:
        """Starts the member's actor in its placement group, unless one was adopted; returns when it has ended."""
        if name in self._adopted:
            self._adopted.discard(name)
        else:
            await asyncio.to_thread(self._end, name)
            group = await self._group(name)
            self._actors[name] = self._create(name, supervisor, group)
        ended = await _watch(self._actors[name])
        # Not if this task is cancelled: members outlive the supervisor.
        await asyncio.to_thread(self._end, name)
        return ended

    async def stop(self, name: str, grace: float) -> None:
        """Gives the member `grace` seconds to finish, ends its actor, and gives its reservation back."""
        actor = self._actors.get(name)
        if actor is not None:
            try:
                await asyncio.wait_for(actor.stop.remote(grace), grace + STOP_SECONDS + EXIT_SECONDS)
            except (RayError, TimeoutError) as error:
                logger.info("killed", extra={"member": name, "reason": str(error) or "it did not stop in time"})
            ray.kill(actor)
        group = await asyncio.to_thread(self._find_group, name)
        if group is not None:
            remove_placement_group(group)

    async def kill(self, name: str) -> None:
        """Ends the member's process at once."""
        actor = self._actors.get(name)
        if actor is not None:
            ray.kill(actor)

    async def _group(self, name: str) -> PlacementGroup:
        """The member's reservation, when it has its resources."""
        group = await asyncio.to_thread(self._find_group, name)
        if group is None:
            label = self._label(name)
            group = placement_group([self._bundles[name]], strategy="STRICT_PACK", name=label, lifetime="detached")
        # Asks Ray's GCS; `group.ready()` would start a process for that.
        while not await asyncio.to_thread(group.wait, GROUP_SECONDS):
            logger.warning("waiting for resources", extra={"member": name, "resources": self._bundles[name]})
        return group

    def _label(self, name: str) -> str:
        return f"{self._namespace}/{name}"

    def _find_group(self, name: str) -> PlacementGroup | None:
        try:
            group: PlacementGroup = ray.util.get_placement_group(self._label(name))
        except ValueError:
            return None
        return group

    def _find(self, name: str) -> Any | None:
        try:
            return ray.get_actor(name, self._namespace)
        except ValueError:
            return None

    def _end(self, name: str) -> None:
        """Ends the actor of this name, if there is one, and returns when the next one can take the name.

        Raises:
            RuntimeError: the name isn't free in time.
        """
        deadline = time.monotonic() + UNNAMED_SECONDS
        while (actor := self._find(name)) is not None:
            ray.kill(actor)
            if time.monotonic() > deadline:
                raise RuntimeError(f"actor {name} still has its name {UNNAMED_SECONDS:g} s after it was killed")
            time.sleep(0.05)

    def _create(self, name: str, supervisor: str, group: PlacementGroup) -> Any:
        worker = self._workers.get(name)
        bundle = dict(self._bundles[name])
        options = actor_options(self._namespace, name) | {
            "num_cpus": bundle.pop("CPU", 0),
            "num_gpus": bundle.pop("GPU", 0),
            "resources": bundle,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        }
        kind, config = (RouterActor, self._routers[name]) if worker is None else (WorkerActor, worker)
        member = replace(config, supervisor=supervisor)
        return ray.remote(kind).options(**options).remote(member, self._config.local, self._token)


def actor_options(namespace: str, name: str) -> dict[str, Any]:
    """Options of a cluster's actors. Ray doesn't restart a member: its replacement is a new incarnation."""
    return {
        "name": name,
        "namespace": namespace,
        "lifetime": "detached",
        "max_restarts": 0,
        "max_concurrency": CONCURRENCY,
    }


async def _watch(actor: Any) -> Ended:
    """Returns when the actor has ended."""
    while True:
        try:
            ended: Ended | None = await actor.watch.remote(WATCH_SECONDS)
        except ActorUnavailableError as error:
            # The connection is lost, or Ray's control plane is away. Heartbeats tell whether the process lives.
            logger.warning("can't be watched now", extra={"actor": repr(actor), "reason": _why(error)})
            await asyncio.sleep(RETRY_SECONDS)
        except RayTaskError as error:
            return Ended(f"{type(error.cause).__name__}: {error.cause}")
        except RayError as error:
            return Ended(_why(error))
        else:
            if ended is not None:
                return ended


def _why(error: RayError) -> str:
    """Ray's reason in one line, without the actor's description and Ray's advice."""
    text = " ".join(str(error).split())
    return (text.partition("The actor is dead because ")[2] or text).partition(" Some common causes")[0]
