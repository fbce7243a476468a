"""The supervisor's Ray actor, and what a driver does with a whole cluster: create, find and end it."""

import asyncio
import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import ray
from google.protobuf.message import DecodeError
from ray.exceptions import GetTimeoutError, RayError
from ray.experimental import internal_kv
from ray.util.placement_group import placement_group_table, remove_placement_group

from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.cluster.errors import RunError
from kvrelay.cluster.ray.actors import ServerActor, own_host
from kvrelay.cluster.ray.launcher import RayLauncher, actor_options, parsed
from kvrelay.cluster.supervisor.record import FileStore
from kvrelay.cluster.supervisor.supervisor import ALL_STOP_SECONDS, Startup, SupervisorConfig, SupervisorServer
from kvrelay.internal.v1.supervisor_pb2 import SupervisorRecord

logger = logging.getLogger(__name__)

SUPERVISOR = "kvrelay-supervisor"
KV_NAMESPACE = "kvrelay"
LOOP_SECONDS = 60.0
"""Longest time in seconds of a call on the supervisor's event loop."""
HEAD = "node:__internal_head__"
"""Ray's resource of the head node only: the members look for a restarted supervisor where it was."""


class SupervisorActor(ServerActor[SupervisorServer]):
    """The supervisor, which starts, watches and replaces all other members. Ray restarts it if its process ends."""

    stop_seconds = ALL_STOP_SECONDS

    def __init__(self, config: ClusterConfig, token: str, record: str) -> None:
        super().__init__("supervisor", "supervisor", SUPERVISOR, partial(_supervisor, config, token, record), token)

    def startup(self) -> Startup:
        """The progress of every member, when the supervisor has started, for `kvrelay up`.

        Raises:
            RuntimeError: the supervisor has ended.
            TimeoutError: its event loop doesn't turn within LOOP_SECONDS.
        """
        server, loop = self._started.result(), self._loop
        if loop is None or loop.is_closed():
            raise RuntimeError("the supervisor has ended")

        async def answer() -> Startup:
            return server.startup()

        # On the server's event loop: this thread could see half a change.
        return asyncio.run_coroutine_threadsafe(answer(), loop).result(LOOP_SECONDS)


def _supervisor(config: ClusterConfig, token: str, record: str) -> SupervisorServer:
    options = SupervisorConfig(
        **asdict(config.heartbeat),
        host=own_host(config.local),
        drain_seconds=config.drain_seconds,
        security=config.security,
        metrics_port=config.metrics.supervisor_port,
    )
    store = FileStore(Path(record)) if record else RayStore(config.ray.namespace)
    launcher = RayLauncher(config, token)
    return SupervisorServer(
        options, launcher, store, lambda text: parsed(text).scaling_config(), lambda text: parsed(text).drain_seconds
    )


class RayStore:
    """Keeps the supervisor's record in Ray's internal KV: with a fault-tolerant GCS, in Redis."""

    def __init__(self, namespace: str) -> None:
        self._key = f"{SUPERVISOR}/{namespace}".encode()

    def load(self) -> SupervisorRecord | None:
        """The record that was saved last.

        Raises:
            ValueError: there is something else in its place.
        """
        found = internal_kv._internal_kv_get(self._key, namespace=KV_NAMESPACE)
        try:
            return None if found is None else SupervisorRecord.FromString(found)
        except DecodeError as error:
            raise ValueError(
                f"{self._key.decode()} in Ray's internal KV isn't a supervisor's record: {error}"
            ) from None

    def save(self, record: SupervisorRecord) -> None:
        """Returns when Ray's GCS has the record.

        Raises:
            OSError: the GCS can't be reached.
        """
        try:
            internal_kv._internal_kv_put(self._key, record.SerializeToString(), namespace=KV_NAMESPACE)
        except (RayError, RuntimeError) as error:
            raise OSError(f"Ray's GCS: {error}") from error

    def forget(self) -> None:
        """Removes the record."""
        internal_kv._internal_kv_del(self._key, namespace=KV_NAMESPACE)


def create(config: ClusterConfig, token: str, record: str) -> Any:
    """Starts the supervisor's actor, which then starts all the others or finds them running; returns its handle.

    Args:
        token: the join token, unless `config` names a file with it.
        record: file on the head node that keeps the supervisor's record; empty keeps it in Ray's internal KV.
    """
    # All calls are queries or can be repeated, so Ray repeats calls that a restart interrupts.
    options = actor_options(config.ray.namespace, SUPERVISOR) | {"max_restarts": -1, "max_task_retries": -1}
    options["resources"] = {HEAD: 0.001}
    return ray.remote(SupervisorActor).options(num_cpus=0, **options).remote(config, token, record)


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
    except Exception as error:  # Ray raises Exception itself if one of its processes doesn't start in time
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        first_line = str(cause).strip().partition("\n")[0]
        raise RunError(f"{problem}: {first_line}") from error


def end(namespace: str, drain_seconds: float) -> None:
    """Lets the supervisor end its members and itself, then ends every actor and reservation that is left.

    Args:
        namespace: of the cluster's actors.
        drain_seconds: for running requests to finish.
    """
    supervisor = find(namespace)
    if supervisor is not None:
        try:
            ray.get(supervisor.stop.remote(drain_seconds), timeout=drain_seconds + ALL_STOP_SECONDS)
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
    RayStore(namespace).forget()
