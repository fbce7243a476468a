"""Runs members as named, detached Ray actors, each in a placement group of its own.

Actors are detached, so running streams outlive the supervisor; a restarted one finds them by their names, and
`supervisor_actor.end` ends them.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.cluster.fleet.nodes import PlacementRequest
from kvrelay.cluster.fleet.replacement import Plan, ProcessEnd
from kvrelay.cluster.fleet.room import ROUTER_BYTES, fitting, lacks_memory, worker_bytes
from kvrelay.cluster.processes import processes
from kvrelay.cluster.ray.actors import CONCURRENCY, WATCH_SECONDS, RankHostActor, RouterActor, WorkerActor
from kvrelay.cluster.ray.placement_groups import UNNAMED_SECONDS, PlacementGroups
from kvrelay.router.config import RouterConfig
from kvrelay.rpc.identity import ROLES, MemberRole
from kvrelay.rpc.serve import EXIT_SECONDS, STOP_SECONDS
from kvrelay.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
KILL_SECONDS = 5.0
"""Seconds for a process on another node to send a signal there."""


class RayLauncher:
    """The supervisor's Launcher of Ray actors."""

    def __init__(self, config: ClusterConfig, token: str) -> None:
        """
        Args:
            config: that a new cluster begins with.
            token: the join token, unless `config` names a file with it.
        """
        self.config = config.model_dump_json()
        self._token = token
        self._namespace = config.ray.namespace
        self._actors: dict[str, Any] = {}
        self._adopted: set[str] = set()
        self._stopped: set[str] = set()
        """Names for which the present `run` starts nothing more."""
        self._groups = PlacementGroups(self._namespace)

    def members(self, config: str) -> dict[str, MemberRole]:
        """The members that `ClusterConfig.members` gives: roles by name."""
        return parsed(config).members()

    async def upgrade(self, present: str, config: str) -> str:
        """The configuration with the secrets of the present one, for the GPUs that there are now.

        Raises:
            ValueError: it can't be used, or differs in what can't change while the cluster runs.
        """
        following = upgraded(parsed(present), parsed(config))
        return following.with_gpus(*await asyncio.to_thread(present_gpus)).model_dump_json()

    def startable(self, config: str, role: MemberRole, others: int) -> str:
        """The reason why no further member of this role can be started; empty if one can.

        A worker needs the device of its role. A port of metrics is enough for one process on a machine only.
        """
        return parsed(config).startable(role, others)

    def lacks_room(self, config: str, present: Mapping[MemberRole, int], wanted: Mapping[MemberRole, int]) -> str:
        """The reason why workers on CPUs lack memory on this machine, or reservations lack room on Ray's nodes.

        Empty if there is room, and where Ray's autoscaler brings nodes.
        """
        options = parsed(config)
        roles = [role for role in wanted if wanted[role] > present[role]]
        if options.local:
            needs: dict[MemberRole, int] = {"router": ROUTER_BYTES}
            for role in roles:
                if role != "router" and "GPU" not in options.bundle(role):
                    needs[role] = worker_bytes(options.worker_config(role, role))
            if why := lacks_memory(present, wanted, needs):
                return why
        elif options.ray.autoscaling:
            return ""
        for role in roles:
            bundle, hosts = options.bundle(role), options.hosts(role)
            most = present[role] + fitting(bundle, self._groups.free()) // hosts
            if wanted[role] > most:
                needed = ", ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())
                where = "a node" if hosts == 1 else f"each of {hosts} hosts, nodes"
                return f"{role} is {wanted[role]}; allowed: at most {most}. Each reserves {needed} on {where} of Ray"
        return ""

    def cycled(self, config: str) -> frozenset[MemberRole]:
        """The roles that `ClusterConfig.cycled` gives."""
        return parsed(config).cycled()

    def unchanged(self, present: str, config: str) -> frozenset[MemberRole]:
        """The roles with the same options and the same resources."""
        before, after = parsed(present), parsed(config)
        return frozenset(role for role in ROLES if _started_as(before, role) == _started_as(after, role))

    async def adopt(self, name: str) -> bool:
        """Finds the running actor of this name."""
        actor = await asyncio.to_thread(self._find, name)
        if actor is None:
            return False
        self._actors[name] = actor
        self._adopted.add(name)
        return True

    async def run(self, name: str, plan: Plan, supervisor: str) -> ProcessEnd:
        """Starts the member's actor in its placement group, unless one was adopted; returns when it has ended."""
        self._stopped.discard(name)
        joining: asyncio.Task[None] | None = None
        if name in self._adopted:
            self._adopted.discard(name)
        else:
            await asyncio.to_thread(self._end, name)
            config = parsed(plan.config)
            bundle, hosts, nodes = config.bundle(plan.role), config.hosts(plan.role), config.ray
            request = PlacementRequest(plan.role, bundle, plan.roles, nodes.topology_labels, nodes.role_label, hosts)
            group = await self._groups.reserve(name, request, lambda: name not in self._stopped)
            if group is None:
                return ProcessEnd()
            self._actors[name] = self._create(name, plan, supervisor, group)
            if hosts > 1:
                agents = [self._create_host(name, plan, number, group) for number in range(1, hosts)]
                joining = asyncio.create_task(_join(name, self._actors[name], agents), name=f"hosts of {name}")
        ended = await _watch(self._actors[name])
        if joining is not None:
            joining.cancel()
        # The actor isn't ended if this task is cancelled: members outlive the supervisor.
        await asyncio.to_thread(self._end, name)
        return ended

    def waits_for(self, name: str) -> str:
        """The resources that its reservation waits for."""
        return self._groups.waits_for(name)

    async def stop(self, name: str, grace: float) -> None:
        """Gives the member `grace` seconds to finish, ends its actor, and gives its reservation back."""
        self._stopped.add(name)
        actor = self._actors.get(name)
        if actor is not None:
            try:
                await asyncio.wait_for(actor.stop.remote(grace), grace + STOP_SECONDS + EXIT_SECONDS)
            except (RayError, TimeoutError) as error:
                logger.info("killed", extra={"member": name, "reason": str(error) or "it did not stop in time"})
            ray.kill(actor)
        await asyncio.to_thread(self._groups.release, name)

    async def kill(self, name: str) -> None:
        """Ends the member's process at once, a frozen one too: Ray itself would wait for it for 5 s and longer."""
        actor = self._actors.get(name)
        if actor is not None:
            await asyncio.to_thread(_kill_process, actor)
            ray.kill(actor)

    def _find(self, name: str) -> Any | None:
        try:
            return ray.get_actor(name, self._namespace)
        except ValueError:
            return None

    def _end(self, name: str) -> None:
        """Ends the actor of this name and those of its further machines, and returns when others can take the names.

        Raises:
            RuntimeError: the name isn't free in time.
        """
        deadline = time.monotonic() + UNNAMED_SECONDS
        actors = ray.util.list_named_actors(all_namespaces=True)
        own = {each["name"] for each in actors if each["namespace"] == self._namespace}
        hosts = [each for each in own if each.startswith(_host_name(name, ""))]
        for each in (name, *hosts):
            while (actor := self._find(each)) is not None:
                ray.kill(actor)
                if time.monotonic() > deadline:
                    raise RuntimeError(f"actor {each} still has its name {UNNAMED_SECONDS:g} s after it was killed")
                time.sleep(0.05)

    def _options(self, name: str, plan: Plan, group: PlacementGroup, host: int = 0) -> dict[str, Any]:
        """Options of the actor on one of a member's machines."""
        bundle = parsed(plan.config).bundle(plan.role)
        return actor_options(self._namespace, name if host == 0 else _host_name(name, host)) | {
            "num_cpus": bundle.pop("CPU", 0),
            "num_gpus": bundle.pop("GPU", 0),
            "resources": bundle,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=host),
        }

    def _create_host(self, name: str, plan: Plan, number: int, group: PlacementGroup) -> Any:
        """The actor of a worker's further machine."""
        options = self._options(name, plan, group, number)
        path = parsed(plan.config).security.join_token_path
        return ray.remote(RankHostActor).options(**options).remote(name, number, path, self._token)

    def _create(self, name: str, plan: Plan, supervisor: str, group: PlacementGroup) -> Any:
        config, role = parsed(plan.config), plan.role
        options = self._options(name, plan, group)
        kind: type[RouterActor | WorkerActor]
        member: RouterConfig | WorkerConfig
        if role == "router":
            kind, member = RouterActor, replace(config.router_config(name), supervisor=supervisor)
        else:
            kind, member = WorkerActor, replace(config.worker_config(name, role), supervisor=supervisor)
        return ray.remote(kind).options(**options).remote(member, config.local, self._token)


def present_gpus() -> tuple[float, float]:
    """GPUs of the Ray cluster that this process has joined, and of its node that has most. Asks Ray's GCS."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]  # untyped in Ray
    gpus = [float(node["Resources"].get("GPU", 0.0)) for node in nodes if node["Alive"]]
    return sum(gpus), max(gpus, default=0.0)


@cache
def parsed(config: str) -> ClusterConfig:
    """A configuration in JSON.

    Raises:
        ValueError: it isn't one.
    """
    return ClusterConfig.model_validate_json(config)


def upgraded(present: ClusterConfig, config: ClusterConfig) -> ClusterConfig:
    """The configuration that follows the present one, with its secrets, and its place where it names none.

    Raises:
        ValueError: it differs in what can't change while the cluster runs.
    """
    kept: dict[str, Any] = {}
    for section in ("ray", "heartbeat"):
        given, kept[section] = getattr(config, section), getattr(present, section)
        if given not in (type(given)(), kept[section]):
            raise ValueError(f"{section} differs from the running cluster's; it can't change while the cluster runs")
    for name in ("tls", "join_token_path", "certificates"):
        if getattr(config.security, name) not in ("", getattr(present.security, name)):
            raise ValueError(
                f"security.{name} is {getattr(config.security, name)}; it can't change while the cluster runs"
            )
    return config.model_copy(update={**kept, "security": present.security})


def _started_as(config: ClusterConfig, role: MemberRole) -> tuple[RouterConfig | WorkerConfig, dict[str, float]]:
    """The options and resources with which a member of a role is started, for an example name."""
    options = config.router_config("router-0") if role == "router" else config.worker_config("worker-0", role)
    return options, config.bundle(role)


def actor_options(namespace: str, name: str) -> dict[str, Any]:
    """Options of a cluster's actors. Ray doesn't restart a member: its replacement is a new incarnation."""
    return {
        "name": name,
        "namespace": namespace,
        "lifetime": "detached",
        "max_restarts": 0,
        "max_concurrency": CONCURRENCY,
    }


def _kill_process(actor: Any) -> None:
    """Sends SIGKILL to the process of an actor, on whichever node it is. Asks Ray's GCS."""
    entry = ray._private.state.actors(actor._actor_id.hex())  # noqa: SLF001  # Ray has no public way to the pid
    if entry["State"] != "ALIVE":
        return
    node, pid = entry["Address"]["NodeID"], int(entry["Pid"])
    if node == ray.get_runtime_context().get_node_id():
        _kill_own(pid)
        return
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    remote = ray.remote(num_cpus=0, max_retries=0)(_kill_own)
    try:
        ray.get(remote.options(scheduling_strategy=there).remote(pid), timeout=KILL_SECONDS)
    except (RayError, GetTimeoutError) as error:  # its node is lost, or has no room for a process
        logger.warning("could not send SIGKILL", extra={"pid": pid, "node": node, "reason": _why(error)})


def _kill_own(pid: int) -> None:
    """Sends SIGKILL to an actor's process on this node; not to another one that has its pid by now."""
    process = processes.find(pid)
    if process is not None and processes.title(process).startswith("ray::"):
        processes.send(signal.SIGKILL, [process])


def _host_name(name: str, number: int | str) -> str:
    """Name of the actor on a worker's further machine; with an empty number what all of them begin with."""
    return f"{name}.host-{number}"


async def _join(name: str, actor: Any, agents: Sequence[Any]) -> None:
    """Tells the agents of a worker's other machines where rank 0 is. If one is lost, so is the worker."""
    try:
        while (address := await actor.ranks_address.remote(WATCH_SECONDS)) is None:
            pass
        await asyncio.gather(*(agent.begin.remote(address, actor) for agent in agents))
    except RayError as error:
        logger.warning("a host of a worker is lost", extra={"member": name, "reason": _why(error)})
        ray.kill(actor)


async def _watch(actor: Any) -> ProcessEnd:
    """Returns when the actor has ended."""
    while True:
        try:
            ended: ProcessEnd | None = await actor.watch.remote(WATCH_SECONDS)
        except ActorUnavailableError as error:
            # The connection is lost, or Ray's control plane is away. Heartbeats tell whether the process lives.
            logger.warning("can't be watched now", extra={"actor": repr(actor), "reason": _why(error)})
            await asyncio.sleep(RETRY_SECONDS)
        except RayTaskError as error:
            return ProcessEnd(f"{type(error.cause).__name__}: {error.cause}")
        except RayError as error:
            return ProcessEnd(_why(error))
        else:
            if ended is not None:
                return ended


def _why(error: RayError) -> str:
    """Ray's reason in one line, without the actor's description and Ray's advice."""
    text = " ".join(str(error).split())
    return (text.partition("The actor is dead because ")[2] or text).partition(" Some common causes")[0]
