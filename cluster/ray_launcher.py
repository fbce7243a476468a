"""Runs members as named, detached Ray actors, each in a placement group of its own.

A placement group outlives its actor: a replacement finds the resources of the one that it replaces still reserved.
Actors are detached so that running streams outlive the supervisor; `remove_all` is what ends them.
"""

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvrelay.cluster.actors import CONCURRENCY, RouterActor, SupervisorActor, WorkerActor
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.replacement import Ended

logger = logging.getLogger(__name__)

SUPERVISOR = "kvrelay-supervisor"
JOIN_ERRORS = (ConnectionError, RuntimeError, ValueError, AuthenticationError)
"""What ray.init raises when there is no cluster to join, or it is another version's, or asks for another token."""
GROUP_SECONDS = 5
DRAIN_SECONDS = 5.0
"""For what runs to finish."""
STOP_SECONDS = 30.0
"""For everything to end, drained or not."""


class RayLauncher:
    """A supervisor's Launcher: the members that the configuration asks for, as Ray actors."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._workers = {worker.name: worker for worker in config.worker_configs()}
        self._router = config.router_config()
        self._groups: dict[str, PlacementGroup] = {}
        self._actors: dict[str, Any] = {}
        self.names = (*self._workers, self._router.name)

    async def run(self, name: str, supervisor: str) -> Ended:
        """Starts the member's actor in its placement group and returns when the process has ended."""
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = self._reserve(name)
        # Asks Ray's GCS; `group.ready()` would start a process to find out.
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
        """Lets the member finish within `grace` seconds, ends its actor, and gives its reservation back."""
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
                ray.get_actor(name, self._config.ray.namespace)
            except ValueError:
                return
            time.sleep(0.05)
        raise RuntimeError(f"actor {name} still has its name {STOP_SECONDS:g} s after it was killed")

    def _bundle(self, name: str) -> dict[str, float]:
        worker = self._workers.get(name)
        return self._config.bundle(None if worker is None else worker.role)

    def _reserve(self, name: str) -> PlacementGroup:
        label = f"{self._config.ray.namespace}/{name}"
        group: PlacementGroup = placement_group(
            [self._bundle(name)], strategy="STRICT_PACK", name=label, lifetime="detached"
        )
        return group

    def _create(self, name: str, supervisor: str, group: PlacementGroup) -> Any:
        worker = self._workers.get(name)
        bundle = self._bundle(name)
        options = actor_options(self._config, name) | {
            "num_cpus": bundle.pop("CPU", 0),
            "num_gpus": bundle.pop("GPU", 0),
            "resources": bundle,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        }
        if worker is None:
            router = replace(self._router, supervisor=supervisor)
            return ray.remote(RouterActor).options(**options).remote(router, self._config.local)
        config = replace(worker, supervisor=supervisor)
        return ray.remote(WorkerActor).options(**options).remote(config, self._config.local)


def why_not_joined(error: BaseException) -> str:
    """The first line of what one of JOIN_ERRORS came from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0]


def _why(error: RayError) -> str:
    """Ray's explanation in one line, without which actor it was and without its advice."""
    text = " ".join(str(error).split())
    return (text.partition("The actor is dead because ")[2] or text).partition(" Some common causes")[0]


def actor_options(config: ClusterConfig, name: str) -> dict[str, Any]:
    """What every actor of a cluster has in common. Ray restarts none of them: a replacement is a new incarnation."""
    return {
        "name": name,
        "namespace": config.ray.namespace,
        "lifetime": "detached",
        "max_restarts": 0,
        "max_concurrency": CONCURRENCY,
    }


def create_supervisor(config: ClusterConfig) -> Any:
    """The supervisor's actor, which then creates all the others."""
    return ray.remote(SupervisorActor).options(num_cpus=0, **actor_options(config, SUPERVISOR)).remote(config)


def find_supervisor(namespace: str) -> Any | None:
    """The running supervisor's actor."""
    try:
        return ray.get_actor(SUPERVISOR, namespace)
    except ValueError:
        return None


def end(supervisor: Any) -> None:
    """Lets the supervisor end its members and itself."""
    try:
        ray.get(supervisor.stop.remote(DRAIN_SECONDS), timeout=STOP_SECONDS)
    except (RayError, GetTimeoutError) as error:
        logger.warning("the supervisor did not end by itself: %s", error)
    ray.kill(supervisor)


def remove_all(namespace: str) -> None:
    """Ends every actor of this namespace and gives every reservation back, whatever state they are in."""
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == namespace:
            try:
                ray.kill(ray.get_actor(entry["name"], namespace))
            except ValueError:
                continue  # ended by itself between the two calls
    for table in placement_group_table().values():
        if table["name"].startswith(f"{namespace}/") and table["state"] != "REMOVED":
            remove_placement_group(ray.util.get_placement_group(table["name"]))
