"""A whole cluster's options: one YAML file, command-line values on top, every default in one place.

The sections are the option classes that the processes take (`EngineConfig`, `TransferConfig`, `RouterOptions`, ...),
so an option is defined, checked and documented once.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Interval
from pydantic import Field, TypeAdapter, model_validator

from kvrelay.cluster.config.sections import (
    AUTO,
    LOCAL,
    Amount,
    MetricsSection,
    ModelSection,
    RaySection,
    RoleSection,
    Section,
    json_properties,
)
from kvrelay.cluster.membership.membership import HeartbeatConfig
from kvrelay.cluster.scaling.config import ScalingConfig, ScalingOptions
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.degree import ONE
from kvrelay.machine.options import Options, require
from kvrelay.router.config import INTERACTIVE, RouterConfig, RouterOptions
from kvrelay.rpc.identity import ROLES, WORKER_ROLES, MemberRole, WorkerRole
from kvrelay.rpc.security import SecurityConfig
from kvrelay.transfer.config import TransferConfig
from kvrelay.worker.config import WorkerConfig

MEMBER = "kvrelay_member"
"""Resource of this machine's own Ray: each worker and router takes 1."""
MEMBERS = 10_000
"""Amount of MEMBER on the local Ray's node: more members than one machine can run."""
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def _describe_inherited(schema: dict[str, Any], options: type) -> None:
    """Adds the descriptions of inherited fields; pydantic reads only the docstrings of the class itself."""
    for name, described in json_properties(RouterOptions).items():
        schema["properties"][name]["description"] = described["description"]


@dataclass(frozen=True, slots=True)
class RouterSection(RouterOptions):
    """The front doors. On a Ray cluster that was joined, the host 127.0.0.1 means the address of the router's node."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        **Options.__pydantic_config__,
        "json_schema_extra": _describe_inherited,
    }

    replicas: Annotated[int, Interval(ge=1, le=64)] = 1
    """Number of routers, each of which places requests on all workers. Clients that know several continue a stream at
    another one if its router is lost."""

    port_step: Annotated[int, Interval(ge=0, le=1000)] = 1
    """Distance between the ports of two routers: the first has grpc_port and http_port. 0 gives all of them the same:
    routers with addresses of their own, or routers on one machine, which share the ports. Each connection is then one
    router's, so more of them serve more streams. Routers that share ports are upgraded without a gap, even a single
    one: the next one serves before the present one leaves."""

    cpus: Amount = 1.0
    """CPUs that Ray reserves for each router, on a Ray cluster that was joined."""

    resources: dict[str, Amount] = field(default_factory=dict)
    """Custom Ray resources that each router takes; they select the nodes of a Ray cluster that was joined."""


class ClusterConfig(Section):
    """Everything that `kvrelay up` needs, by section."""

    model: ModelSection = ModelSection()
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterSection = RouterSection()
    prefill: RoleSection = RoleSection()
    """Workers that compute prompts and send their KV to decode workers."""
    decode: RoleSection = RoleSection()
    """Workers that receive KV and generate tokens."""
    colocated: RoleSection = RoleSection()
    """Workers that do both, without a hand-off."""
    ray: RaySection = RaySection()
    security: SecurityConfig = SecurityConfig()
    heartbeat: HeartbeatConfig = HeartbeatConfig()
    scaling: ScalingOptions = ScalingOptions()
    """Changes that the cluster makes by itself to meet the targets of the class `interactive` (`router.classes`)."""
    metrics: MetricsSection = MetricsSection()
    drain_seconds: float = Field(default=30.0, ge=0, le=3600)
    """Time that a member is given to finish its requests when it is to end."""
    switch_seconds: float = Field(default=0.5, ge=0, le=3600)
    """Time that a worker's requests are given to finish when it takes another role; then they move to other workers."""

    @model_validator(mode="before")
    @classmethod
    def _default_replicas(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not all(isinstance(values.get(role, {}), dict) for role in WORKER_ROLES):
            return values  # reported by the fields' own types
        count = 0 if values.get("colocated", {}).get("replicas") else 1
        pair = {role: {"replicas": count, **values.get(role, {})} for role in ("prefill", "decode")}
        return {**values, **pair}

    @model_validator(mode="before")
    @classmethod
    def _refuse_moved_targets(cls, values: Any) -> Any:
        scaling = values.get("scaling") if isinstance(values, dict) else None
        for name in ("ttft_target_seconds", "tpot_target_seconds"):
            if isinstance(scaling, dict) and name in scaling:
                require(False, f"scaling.{name}", scaling[name], f"router.classes.interactive.{name} in its place")
        return values

    @model_validator(mode="after")
    def _check(self) -> "ClusterConfig":
        self._require_pairs()
        full = self.transfer.encrypt == "full"
        require(not full or self.security.tls == "mutual", "transfer.encrypt", "full", "with security.tls mutual only")
        for member in ROLES:
            reserved = bool(self.bundle(member))
            require(reserved, f"{member}.cpus", 0.0, "more than 0, unless gpus or resources are")
        self._require_ports()
        for role in WORKER_ROLES:
            self.require_device(role)
        ranks = self._ranks(WORKER_ROLES)
        allowed = f"auto, or at most {ranks}, the number of workers' ranks: each computes on one GPU"
        require(self.ray.gpus == AUTO or self.ray.gpus <= ranks, "ray.gpus", self.ray.gpus, allowed)
        return self

    def _require_pairs(self) -> None:
        """Refuses prefill workers that have nobody to hand their KV over to. Decode workers can compute prompts too."""
        prefill, decode = self.prefill.replicas, self.decode.replicas
        if self.colocated.replicas == 0:
            for role, replicas in (("prefill", prefill), ("decode", decode)):
                require(replicas > 0, f"{role}.replicas", replicas, "at least 1, unless colocated.replicas is")
        allowed = "at least 1 with prefill workers, which hand their KV over to decode workers; or prefill.replicas 0"
        require(decode > 0 or prefill == 0, "decode.replicas", decode, allowed)

    def require_device(self, role: WorkerRole, replicas: int | None = None) -> None:
        """Refuses workers that are to compute on a GPU and have none; `replicas`: of the role, if they are others."""
        section, engine = self.role(role), self.engine_of(role)
        device = engine.device
        if engine.degree != ONE:
            whole = section.gpus in (0, 1, AUTO)
            require(
                whole, f"{role}.gpus", section.gpus, f"auto, 0 or 1 for each of a worker's {engine.degree.ranks} ranks"
            )
        workers = section.replicas if replicas is None else replicas
        allowed = "auto or cpu for workers without a GPU (gpus is 0)"
        require(section.gpus != 0 or device != "cuda" or not workers, f"{role}.engine.device", device, allowed)

    def _require_ports(self) -> None:
        chosen = self.router.grpc_port > 0 and self.router.http_port != 0
        allowed = "1 or more, since the routers would share ports that are not chosen"
        shared = self.share_ports and self.router.replicas > 1
        require(not shared or chosen, "router.port_step", self.router.port_step, allowed)
        self._require_router_ports(self.router.replicas)
        self._require_metrics_port("worker_port", sum(self.role(role).replicas for role in WORKER_ROLES))

    def _require_router_ports(self, count: int) -> None:
        """Refuses ports that so many routers can't have beside each other."""
        self._require_metrics_port("router_port", count)
        step, grpc_port, http_port = self.router.port_step, self.router.grpc_port, self.router.http_port or 0
        last, apart = (count - 1) * step, abs(http_port - grpc_port)
        for name, port in (("grpc_port", grpc_port), ("http_port", http_port)):
            require(port + last <= 65535, f"router.{name}", port, f"up to {65535 - last} for {count} routers")
        twice = self.local and grpc_port and http_port and 0 < apart <= last and apart % step == 0
        ranges = f"{grpc_port} to {grpc_port + last} for gRPC and {http_port} to {http_port + last} for HTTP"
        require(not twice, "router.http_port", http_port, f"another one: {count} routers would have the ports {ranges}")

    def _require_metrics_port(self, name: str, count: int) -> None:
        """Refuses one metrics port for several processes on one machine."""
        port = getattr(self.metrics, name)
        one = not port or count < 2 or not self.local
        require(one, f"metrics.{name}", port, f"0 or null, since {count} processes on one machine would share it")

    @property
    def share_ports(self) -> bool:
        """Whether routers on this machine serve the same ports."""
        return self.local and self.router.port_step == 0 and self.router.grpc_port > 0

    @property
    def local(self) -> bool:
        """Whether the Ray cluster is this machine's own."""
        return self.ray.address == LOCAL

    def role(self, role: WorkerRole) -> RoleSection:
        """The section of a role's workers."""
        section: RoleSection = getattr(self, role)
        return section

    def engine_of(self, role: WorkerRole, threads: int = 0) -> EngineConfig:
        """The options of a role's engines; `threads`: where no option says them."""
        section = self.role(role)
        try:
            return replace(self.engine, **section.engine, threads=section.threads or self.engine.threads or threads)
        except ValueError as error:
            raise ValueError(f"{role}.engine.{error}") from None

    def _ranks(self, roles: Iterable[WorkerRole]) -> int:
        """Ranks of the workers of these roles: each worker's processes that compute."""
        return sum(self.role(role).replicas * self.engine_of(role).degree.ranks for role in roles)

    def with_gpus(self, present: float, largest: float = 0.0) -> "ClusterConfig":
        """This configuration on a Ray cluster with so many GPUs: `gpus` of each role is a number.

        A joined Ray cluster may lack GPUs that a role asks for by number: nodes with them may come later. Where a
        worker's ranks need more GPUs than any node has and no option says `hosts`, they are divided over as few nodes
        as hold them.

        Args:
            largest: GPUs of the node that has most of them; 0 divides no worker.

        Raises:
            ValueError: more GPUs are asked for than this machine has; the text says how many.
        """
        fixed = self.total_resources().get("GPU", 0.0)
        offered = math.floor(max(0.0, present - fixed)) if self.ray.gpus == AUTO else self.ray.gpus
        asked = fixed + (0 if self.ray.gpus == AUTO else self.ray.gpus)
        if self.local and asked > present:
            raise ValueError(f"gpus of all workers together are {asked:g}; allowed: at most {present:g}")
        takers = [
            role for role in WORKER_ROLES if self.role(role).gpus == AUTO and self.engine_of(role).device != "cpu"
        ]
        workers = self._ranks(takers)
        # Rounded down to Ray's unit of 1e-4, so that the parts of one GPU fit on it.
        part = math.floor(1e4 / math.ceil(workers / offered)) / 1e4 if workers and offered else 0.0
        given = [
            self.role(role).gpus for role in WORKER_ROLES if self.role(role).replicas and self.role(role).gpus != AUTO
        ]
        # Workers that are added to a role later have the part of the others.
        usual = part if workers else max(given, default=0.0)
        gpus = {role: usual if role in takers else 0.0 for role in WORKER_ROLES if self.role(role).gpus == AUTO}
        fitted = self.model_copy(
            update={role: self.role(role).model_copy(update={"gpus": amount}) for role, amount in gpus.items()}
        )
        for role in gpus:
            fitted.require_device(role)
        return fitted.model_copy(update=fitted.divided(largest))

    def divided(self, largest: float) -> dict[str, RoleSection]:
        """The sections of roles whose workers take several hosts because no node has the GPUs of all their ranks."""
        found: dict[str, RoleSection] = {}
        plain = self.security.tls == "off" and self.transfer.encrypt == "none" and self.transfer.transport != "shm"
        if self.local or self.ray.autoscaling or not plain or self.engine.hosts > 1:
            return found
        for role in WORKER_ROLES:
            section, ranks = self.role(role), self.engine_of(role).degree.ranks
            gpus = 0.0 if section.gpus == AUTO else float(section.gpus)
            if gpus * ranks <= largest or "hosts" in section.engine:
                continue
            fitting = (hosts for hosts in range(2, ranks + 1) if ranks % hosts == 0 and gpus * ranks / hosts <= largest)
            if (hosts := next(fitting, 1)) > 1:
                found[role] = section.model_copy(update={"engine": {**section.engine, "hosts": hosts}})
        return found

    def members(self) -> dict[str, MemberRole]:
        """The members that a cluster begins with: `worker-0`, `worker-1`, ..., `router-0`, ... A worker's name is not
        tied to its role."""
        roles = [role for role in WORKER_ROLES for _ in range(self.role(role).replicas)]
        workers: dict[str, MemberRole] = {f"worker-{index}": role for index, role in enumerate(roles)}
        return workers | {f"router-{index}": "router" for index in range(self.router.replicas)}

    def startable(self, role: MemberRole, others: int) -> str:
        """The reason why no further member of this role can be started; empty if it can.

        Args:
            others: routers, or workers of all roles, that there are already.
        """
        try:
            if role == "router":
                self._require_router_ports(others + 1)
            else:
                self._require_metrics_port("worker_port", others + 1)
                self.require_device(role, replicas=1)
        except ValueError as error:
            return str(error)
        return ""

    def cycled(self) -> frozenset[MemberRole]:
        """The roles whose members must end before their successors start: those with a port of their own.

        On a joined Ray cluster workers aren't among them: a successor may get a machine of its own.
        """
        own: list[MemberRole] = [*WORKER_ROLES] if self.local and self.metrics.worker_port else []
        if not self.share_ports or self.metrics.router_port:
            own.append("router")
        return frozenset(own)

    def worker_config(self, name: str, role: WorkerRole) -> WorkerConfig:
        """A worker's options, without the supervisor's address.

        Default of `threads`: on one machine the workers that the cluster begins with share the cores; on a Ray cluster
        each takes the CPUs that are reserved for it.
        """
        ranks = self.engine_of(role).degree.ranks
        share = max(1, available_cores() * ranks // self._ranks(WORKER_ROLES))
        return WorkerConfig(
            name=name,
            role=role,
            model=self.model.path,
            dtype=self.model.dtype,
            engine=self._placed(role, share if self.local else max(1, math.floor(self.role(role).cpus))),
            transfer=self.transfer,
            metrics_port=self.metrics.worker_port,
            drain_seconds=self.drain_seconds,
            switch_seconds=self.switch_seconds,
            security=self.security,
        )

    def _placed(self, role: WorkerRole, threads: int) -> EngineConfig:
        """The options of a role's engines, with the device that its workers have and their part of its memory.

        The workers that the cluster begins with share a machine's memory; one that is added later takes as much, if so
        much is free.
        """
        engine, gpus = self.engine_of(role, threads), self.role(role).gpus
        if gpus == 0 and engine.device == "auto":
            engine = replace(engine, device="cpu")  # Ray doesn't hide the GPUs from actors that reserve none
        part = engine.memory_part
        if part == 0 and not self._on_cpus(role):
            part = 1.0 if gpus == AUTO else gpus
        elif part == 0 and self.local:
            part = engine.degree.ranks / max(1, self._ranks(filter(self._on_cpus, WORKER_ROLES)))
        return replace(engine, memory_part=part)

    def _on_cpus(self, role: WorkerRole) -> bool:
        """Whether a role's workers have no GPU, as far as that is known, or don't use it."""
        return self.role(role).gpus in (0, AUTO) or self.engine_of(role).device == "cpu"

    def router_config(self, name: str) -> RouterConfig:
        """A router's options, without the supervisor's address. The ports of `router-1` are one `port_step` higher."""
        section = self.router
        known = {option.name for option in fields(RouterOptions)} - {"grpc_port", "http_port"}
        options = {option: getattr(section, option) for option in known}
        distance = int(name.rpartition("-")[2]) * section.port_step
        return RouterConfig(
            **options,
            name=name,
            grpc_port=section.grpc_port and section.grpc_port + distance,
            http_port=section.http_port and section.http_port + distance,
            share_port=self.share_ports,
            metrics_port=self.metrics.router_port,
            model=self.model.path,
            drain_seconds=self.drain_seconds,
            security=self.security,
        )

    def router_configs(self) -> list[RouterConfig]:
        """The options of each router that the cluster begins with, as `router_config`."""
        return [self.router_config(name) for name, role in self.members().items() if role == "router"]

    def scaling_config(self) -> ScalingConfig:
        """The options of the supervisor's scaling."""
        targets = self.router.services()[INTERACTIVE]
        return ScalingConfig(
            **{option.name: getattr(self.scaling, option.name) for option in fields(ScalingOptions)},
            ttft_target_seconds=targets.ttft_seconds,
            tpot_target_seconds=targets.tpot_seconds,
        )

    def bundle(self, role: MemberRole) -> dict[str, float]:
        """Ray resources that one member of this role reserves on each of its `hosts`.

        On this machine's own Ray only GPUs limit the number of members: cores are shared, so that a member can be added
        or replaced by a new one at any time.
        """
        section = self._section(role)
        gpus = getattr(section, "gpus", 0.0)
        ranks = 1 if role == "router" else self.engine_of(role).degree.ranks // self.hosts(role)
        amounts = {MEMBER: 1.0} if self.local else {"CPU": section.cpus, **section.resources}
        amounts["GPU"] = 0.0 if gpus == AUTO else gpus * ranks
        return {name: amount for name, amount in amounts.items() if amount > 0}

    def hosts(self, role: MemberRole) -> int:
        """Machines of one member of this role, each with its own reservation."""
        return 1 if role == "router" else self.engine_of(role).hosts

    def _section(self, role: MemberRole) -> RoleSection | RouterSection:
        return self.router if role == "router" else self.role(role)

    def total_resources(self) -> dict[str, float]:
        """Ray resources of all workers and routers together."""
        total: Counter[str] = Counter()
        for role in ROLES:
            count = self._section(role).replicas * self.hosts(role)
            total.update({name: amount * count for name, amount in self.bundle(role).items()})
        return dict(+total)


def available_cores() -> int:
    """Cores that this process may use: those of its affinity, at most its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = CPU_QUOTA.read_text().partition(" ") if CPU_QUOTA.exists() else ("max", "", "")
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def schema() -> dict[str, Any]:
    """JSON schema of the configuration file."""
    document = ClusterConfig.model_json_schema()
    # Pydantic shows the defaults of dataclasses as Python has them, and a file says `auto`.
    for name, default in TypeAdapter(EngineConfig).dump_python(EngineConfig(), mode="json").items():
        document["$defs"]["EngineConfig"]["properties"][name]["default"] = default
    return document
