"""Runs members as named, detached Ray actors, each in a placement group of its own.

A placement group outlives its actor, so a replacement finds its resources still reserved. Actors are detached, so
running streams outlive the supervisor; `supervisor_actor.end` ends them.
"""

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvrelay.cluster.actors import CONCURRENCY, RouterActor, WorkerActor
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.replacement import Ended

logger = logging.getLogger(__name__)

GROUP_SECONDS = 5
STOP_SECONDS = 30.0
"""For an actor or a whole cluster to end."""


class RayLauncher:
    """The supervisor's Launcher: runs the members of the configuration as Ray actors."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._namespace = config.ray.namespace
        self._workers = {worker.name: worker for worker in config.worker_configs()}
        self._router = config.router_config()
        self._groups: dict[str, PlacementGroup] = {}
        self._actors: dict[str, Any] = {}
        self.names = (*self._workers, self._router.name)

    async def run(self, name: str, supervisor: str) -> Ended:
        """Starts the member's actor in its placement group; returns when the process has ended."""
        group = self._groups.get(name)
        if group is None:
            label = f"{self._namespace}/{name}"
            group = placement_group([self._bundle(name)], strategy="STRICT_PACK", name=label, lifetime="detached")
            self._groups[name] = group
        # Asks Ray's GCS; `group.ready()` would start a process for that.
        while not await asyncio.to_thread(group.wait, GROUP_SECONDS):
            logger.warning("waiting for resources", extra={"member": name, "resources": self._bundle(name)})
        actor = self._actors[name] = self._create(name, supervisor, group)
        try:
            ended: Ended = await actor.serve.remote()
            return ended
        except RayTaskError as error:
            logger.exception("server failed", extra={"member": name})
            return Ended(f"{type(error.cause).__name__}: {error.cause}")
        except RayError as error:
            return Ended(_why(error))
        finally:
            ray.kill(actor)
            await asyncio.to_thread(self._until_unnamed, name)

    async def stop(self, name: str, grace: float) -> None:
        """Gives the member `grace` seconds to finish, ends its actor, and gives its reservation back."""
        actor = self._actors.get(name)
        if actor is not None:
            try:
                await actor.stop.remote(grace)
            except RayError as error:
                logger.info("gone before it was stopped", extra={"member": name, "reason": str(error)})
            ray.kill(actor)
        group = self._groups.pop(name, None)
        if group is not None:
            remove_placement_group(group)

    async def kill(self, name: str) -> None:
        """Ends the member's process at once."""
        actor = self._actors.get(name)
        if actor is not None:
            ray.kill(actor)

    def _until_unnamed(self, name: str) -> None:
        """Returns when the next actor can take this name."""
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline:
            try:
                ray.get_actor(name, self._namespace)
            except ValueError:
                return
            time.sleep(0.05)
        raise RuntimeError(f"actor {name} still has its name {STOP_SECONDS:g} s after it was killed")

    def _bundle(self, name: str) -> dict[str, float]:
        worker = self._workers.get(name)
        return self._config.bundle(None if worker is None else worker.role)

    def _create(self, name: str, supervisor: str, group: PlacementGroup) -> Any:
        worker = self._workers.get(name)
        bundle = self._bundle(name)
        options = actor_options(self._namespace, name) | {
            "num_cpus": bundle.pop("CPU", 0),
            "num_gpus": bundle.pop("GPU", 0),
            "resources": bundle,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        }
        kind, config = (RouterActor, self._router) if worker is None else (WorkerActor, worker)
        return ray.remote(kind).options(**options).remote(replace(config, supervisor=supervisor), self._config.local)


def actor_options(namespace: str, name: str) -> dict[str, Any]:
    """Options common to all actors of a cluster. Ray restarts none of them: a replacement is a new incarnation."""
    return {
        "name": name,
        "namespace": namespace,
        "lifetime": "detached",
        "max_restarts": 0,
        "max_concurrency": CONCURRENCY,
    }


def _why(error: RayError) -> str:
    """Ray's reason in one line, without the actor's description and Ray's advice."""
    text = " ".join(str(error).split())
    return (text.partition("The actor is dead because ")[2] or text).partition(" Some common causes")[0]
