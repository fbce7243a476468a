"""The supervisor's Ray actor, and what a driver does with a whole cluster: create, find and end it."""

import logging
from functools import partial
from typing import Any

import ray
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError
from ray.util.placement_group import placement_group_table, remove_placement_group

from kvrelay.cluster.actors import ServerActor, own_host
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.errors import RunError
from kvrelay.cluster.ray_launcher import STOP_SECONDS, RayLauncher, actor_options
from kvrelay.cluster.supervisor import Startup, SupervisorConfig, SupervisorServer

logger = logging.getLogger(__name__)

SUPERVISOR = "kvrelay-supervisor"
DRAIN_SECONDS = 5.0
"""For running requests to finish when the cluster ends."""


class SupervisorActor(ServerActor[SupervisorServer]):
    """The supervisor, which starts, watches and replaces all other members."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__("supervisor", "supervisor", SUPERVISOR, partial(_supervisor, config))

    def startup(self) -> Startup:
        """How far every member is, for `kvrelay up`."""
        return self._started.result().startup()


def _supervisor(config: ClusterConfig) -> SupervisorServer:
    heartbeat = config.heartbeat
    options = SupervisorConfig(heartbeat.suspect_seconds, heartbeat.dead_seconds, host=own_host(config.local))
    return SupervisorServer(options, RayLauncher(config))


def create(config: ClusterConfig) -> Any:
    """Starts the supervisor's actor, which then starts all the others; returns its handle."""
    options = actor_options(config.ray.namespace, SUPERVISOR)
    return ray.remote(SupervisorActor).options(num_cpus=0, **options).remote(config)


def find(namespace: str) -> Any | None:
    """The handle of the running supervisor's actor."""
    try:
        return ray.get_actor(SUPERVISOR, namespace)
    except ValueError:
        return None


def connect(problem: str, **options: Any) -> Any:
    """Makes this process a driver of a Ray cluster; `options` are ray.init's, whose context it returns.

    Raises:
        RunError: Ray can't be started or joined; `problem`, then the first line of the root cause.
    """
    try:
        return ray.init(log_to_driver=False, configure_logging=False, **options)
    except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        first_line = str(cause).strip().partition("\n")[0]
        raise RunError(f"{problem}: {first_line}") from error


def end(namespace: str) -> None:
    """Lets the supervisor end its members and itself, then ends every actor and reservation that is left."""
    supervisor = find(namespace)
    if supervisor is not None:
        try:
            ray.get(supervisor.stop.remote(DRAIN_SECONDS), timeout=STOP_SECONDS)
        except (RayError, GetTimeoutError) as error:
            logger.warning("the supervisor did not end by itself: %s", error)
        ray.kill(supervisor)
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == namespace:
            try:
                ray.kill(ray.get_actor(entry["name"], namespace))
            except ValueError:
                continue  # ended by itself between the two calls
    for table in placement_group_table().values():
        if table["name"].startswith(f"{namespace}/") and table["state"] != "REMOVED":
            remove_placement_group(ray.util.get_placement_group(table["name"]))
