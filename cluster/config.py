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
from typing import Annotated, Any, ClassVar, Final, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetPydanticSchema, TypeAdapter, model_validator
from pydantic_core import CoreSchema, core_schema

from kvrelay.cluster.membership import HeartbeatConfig
from kvrelay.engine.automatic import Automatic
from kvrelay.engine.config import STRICT, Dtype, EngineConfig, require
from kvrelay.router.config import RouterConfig, RouterOptions
from kvrelay.rpc.security import SecurityConfig
from kvrelay.transfer.config import TransferConfig
from kvrelay.worker.config import WorkerConfig, WorkerRole

ROLES: tuple[WorkerRole, ...] = ("prefill", "decode", "colocated")
LOCAL = "local"
AUTO: Final = "auto"
GPUS_ALLOWED = "auto, or 0 to 1: a worker computes on one GPU (no tensor parallelism yet); more replicas use more"
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _engine_overrides(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    """Schema of a mapping with any of EngineConfig's fields but `threads`, which is the role's own field."""
    hints = get_type_hints(EngineConfig, include_extras=True)
    options = {
        name: core_schema.typed_dict_field(
            handler.generate_schema(hints[name]),
            required=False,
            metadata={"pydantic_js_updates": {"description": described["description"]}},
        )
        for name, described in _json_properties(EngineConfig).items()
        if name != "threads"
    }
    return core_schema.typed_dict_schema(options, extra_behavior="forbid")


def _json_properties(options: type) -> dict[str, Any]:
    """The JSON schema of each field of an options class."""
    properties: dict[str, Any] = TypeAdapter(options).json_schema()["properties"]
    return properties


EngineOverrides = Annotated[dict[str, Any], GetPydanticSchema(_engine_overrides)]


class Section(BaseModel):
    """A frozen part of the configuration that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelSection(Section):
    """The checkpoint that is served."""

    path: str = "pico"
    """Folder of a Hugging Face checkpoint, hf:ORG/NAME[@REVISION] for a model of the hub, or the name of a bundled one
    (`pico`, `pico-draft`)."""

    dtype: Dtype = "auto"
    """Dtype of weights and KV; auto takes the checkpoint's on GPU, and on CPU the checkpoint's unless it is float16."""


class RoleSection(Section):
    """The workers of one role."""

    replicas: int = Field(default=0, ge=0, le=1024)
    """Number of workers. Default: one prefill and one decode worker, or neither if there are co-located workers."""

    cpus: Amount = 1.0
    """CPUs that Ray reserves for each worker."""

    gpus: Annotated[float | Literal["auto"], Automatic(GPUS_ALLOWED, 0.0, 1.0, word=AUTO)] = AUTO
    """GPUs that Ray reserves for each worker: at most one, since a worker computes on one GPU; with a fraction, such as
    0.5, several workers share one. auto shares out ray.gpus. With 0, and without GPUs, the worker computes on CPUs."""

    resources: dict[str, Amount] = {}
    """Custom Ray resources that each worker takes; they select the nodes that it runs on."""

    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of the forward pass; 0 takes engine.threads."""

    engine: EngineOverrides = {}
    """Engine options that differ from the `engine` section for this role."""


def _describe_inherited(schema: dict[str, Any], options: type) -> None:
    """Adds the descriptions of inherited fields; pydantic reads only the docstrings of the class itself."""
    for name, described in _json_properties(RouterOptions).items():
        schema["properties"][name]["description"] = described["description"]


@dataclass(frozen=True, slots=True)
class RouterSection(RouterOptions):
    """The front doors. On a Ray cluster that was joined, the host 127.0.0.1 means the address of the router's node."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {**STRICT, "json_schema_extra": _describe_inherited}

    replicas: int = 1
    """Number of routers, each of which places requests on all workers. Clients that know several continue a stream at
    another one if its router is lost."""

    port_step: int = 1
    """Distance between the ports of two routers: the first has grpc_port and http_port. 0 gives all of them the same:
    routers with addresses of their own, or routers on one machine, which share the ports. Each connection is then one
    router's, so more of them serve more streams."""

    cpus: Amount = 1.0
    """CPUs that Ray reserves for each router."""

    resources: dict[str, Amount] = field(default_factory=dict)
    """Custom Ray resources that each router takes; they select the nodes that it runs on."""

    def __post_init__(self) -> None:
        RouterOptions.__post_init__(self)
        require(1 <= self.replicas <= 64, "replicas", self.replicas, "1 to 64")
        require(0 <= self.port_step <= 1000, "port_step", self.port_step, "0 to 1000")
        most = 65535 - (self.replicas - 1) * self.port_step
        for name in ("grpc_port", "http_port"):
            port = getattr(self, name) or 0
            require(port <= most, name, port, f"up to {most} for {self.replicas} routers")


class RaySection(Section):
    """The Ray cluster that kvrelay runs on."""

    address: str = LOCAL
    """`local` starts one that ends with `kvrelay up`; `auto` or host:port joins a running one."""

    namespace: str = Field(default="kvrelay", min_length=1)
    """Namespace of the named actors; each kvrelay cluster on one Ray cluster needs its own."""

    include_dashboard: bool = True
    """Start Ray's dashboard with a local cluster."""

    dashboard_host: str = "127.0.0.1"
    """Address that a local cluster's dashboard binds to."""

    dashboard_port: int = Field(default=0, ge=0, le=65535)
    """Port of a local cluster's dashboard; 0 takes 8265 or the next free one."""

    gpus: Annotated[int | Literal["auto"], Automatic("auto, or 0 or more", 0, word=AUTO)] = AUTO
    """GPUs for the workers whose `gpus` is auto: each gets one, or its part of one if there are more workers. auto: all
    that the Ray cluster has. With 0, they compute on CPUs."""

    @model_validator(mode="after")
    def _check(self) -> "RaySection":
        host, _, port = self.address.rpartition(":")
        joined = bool(host) and port.isdecimal() and 0 < int(port) < 65536
        require(joined or self.address in (LOCAL, AUTO), "address", self.address, f"{LOCAL}, {AUTO} or HOST:PORT")
        return self


MetricsPort = Annotated[int | None, Field(ge=0, le=65535)]


class MetricsSection(Section):
    """Ports at which processes serve their metrics as Prometheus text. Routers do so at `router.http_port`, and Ray's
    agents export those of all in any case."""

    router_port: MetricsPort = None
    """Of each router, beside its HTTP and without a key; 0 takes a free one, null opens none."""

    worker_port: MetricsPort = None
    """Of each worker; 0 takes a free one, null opens none."""

    supervisor_port: MetricsPort = None
    """Of the supervisor, which lists the other processes' at `/targets`; 0 takes a free one, null opens none."""


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
    metrics: MetricsSection = MetricsSection()
    drain_seconds: float = Field(default=30.0, ge=0, le=3600)
    """Time that a member is given to finish its requests when it is to end."""

    @model_validator(mode="before")
    @classmethod
    def _default_replicas(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not all(isinstance(values.get(role, {}), dict) for role in ROLES):
            return values  # reported by the fields' own types
        count = 0 if values.get("colocated", {}).get("replicas") else 1
        pair = {role: {"replicas": count, **values.get(role, {})} for role in ("prefill", "decode")}
        return {**values, **pair}

    @model_validator(mode="after")
    def _check(self) -> "ClusterConfig":
        self._require_pairs()
        full = self.transfer.encrypt == "full"
        require(not full or self.security.tls == "mutual", "transfer.encrypt", "full", "with security.tls mutual only")
        self._require_resources(None)
        self._require_ports()
        for role in ROLES:
            self._engine(role)
            self._require_resources(role)
            self._require_device(role)
        workers = self._count(ROLES)
        allowed = f"auto, or at most {workers}, the number of workers: each computes on one GPU"
        require(self.ray.gpus == AUTO or self.ray.gpus <= workers, "ray.gpus", self.ray.gpus, allowed)
        return self

    def _require_pairs(self) -> None:
        """Refuses prefill workers that have nobody to hand their KV over to. Decode workers can compute prompts too."""
        prefill, decode = self.prefill.replicas, self.decode.replicas
        if self.colocated.replicas == 0:
            for role, replicas in (("prefill", prefill), ("decode", decode)):
                require(replicas > 0, f"{role}.replicas", replicas, "at least 1, unless colocated.replicas is")
        allowed = "at least 1 with prefill workers, which hand their KV over to decode workers; or prefill.replicas 0"
        require(decode > 0 or prefill == 0, "decode.replicas", decode, allowed)

    def _require_device(self, role: WorkerRole) -> None:
        section = self.role(role)
        device = self._engine(role).device
        allowed = "auto or cpu for workers without a GPU (gpus is 0)"
        require(section.gpus != 0 or device != "cuda" or not section.replicas, f"{role}.engine.device", device, allowed)

    def _require_ports(self) -> None:
        chosen = self.router.grpc_port > 0 and self.router.http_port != 0
        allowed = "1 or more, since the routers would share ports that are not chosen"
        require(not self._share_ports or chosen, "router.port_step", self.router.port_step, allowed)
        workers = sum(self.role(role).replicas for role in ROLES)
        for name, count in (("router_port", self.router.replicas), ("worker_port", workers)):
            port = getattr(self.metrics, name)
            one = not port or count < 2 or not self.local
            require(one, f"metrics.{name}", port, f"0 or null, since {count} processes on one machine would share it")

    @property
    def _share_ports(self) -> bool:
        return self.local and self.router.replicas > 1 and self.router.port_step == 0

    def _require_resources(self, role: WorkerRole | None) -> None:
        reserved = bool(self.bundle(role))
        require(reserved, f"{role or 'router'}.cpus", 0.0, "more than 0, unless gpus or resources are")

    @property
    def local(self) -> bool:
        """Whether the Ray cluster is this machine's own."""
        return self.ray.address == LOCAL

    def role(self, role: WorkerRole) -> RoleSection:
        """The section of a role's workers."""
        section: RoleSection = getattr(self, role)
        return section

    def _engine(self, role: WorkerRole, threads: int = 0) -> EngineConfig:
        section = self.role(role)
        try:
            return replace(self.engine, **section.engine, threads=section.threads or self.engine.threads or threads)
        except ValueError as error:
            raise ValueError(f"{role}.engine.{error}") from None

    def _count(self, roles: Iterable[WorkerRole]) -> int:
        """Workers of these roles."""
        return sum(self.role(role).replicas for role in roles)

    def with_gpus(self, present: float) -> "ClusterConfig":
        """This configuration on a Ray cluster with so many GPUs: `gpus` of each role is a number.

        A Ray cluster that was joined may get the GPUs that a role asks for by number later.

        Raises:
            ValueError: more GPUs are asked for than this machine has; the text says how many.
        """
        fixed = self.total_resources().get("GPU", 0.0)
        offered = math.floor(max(0.0, present - fixed)) if self.ray.gpus == AUTO else self.ray.gpus
        asked = fixed + (0 if self.ray.gpus == AUTO else self.ray.gpus)
        if self.local and asked > present:
            raise ValueError(f"gpus of all workers together are {asked:g}; allowed: at most {present:g}")
        takers = [role for role in ROLES if self.role(role).gpus == AUTO and self._engine(role).device != "cpu"]
        workers = self._count(takers)
        # Rounded down to what Ray counts in, so that the parts of one GPU fit on it.
        part = math.floor(1e4 / math.ceil(workers / offered)) / 1e4 if workers and offered else 0.0
        gpus = {role: part if role in takers else 0.0 for role in ROLES if self.role(role).gpus == AUTO}
        given = self.model_copy(
            update={role: self.role(role).model_copy(update={"gpus": amount}) for role, amount in gpus.items()}
        )
        for role in gpus:
            given._require_device(role)
        return given

    def worker_configs(self, cores: int | None = None) -> list[WorkerConfig]:
        """Each worker's options, without the supervisor's address: `prefill-0`, `prefill-1`, ..., `decode-0`, ...

        Default of `threads`: on one machine the workers share its `cores` (default: those that this process may use);
        on a Ray cluster each takes the CPUs that are reserved for it.
        """
        share = max(1, (cores or available_cores()) // self._count(ROLES))
        return [
            WorkerConfig(
                name=f"{role}-{index}",
                role=role,
                model=self.model.path,
                dtype=self.model.dtype,
                engine=self._placed(role, share if self.local else max(1, math.floor(self.role(role).cpus))),
                transfer=self.transfer,
                metrics_port=self.metrics.worker_port,
                drain_seconds=self.drain_seconds,
                security=self.security,
            )
            for role in ROLES
            for index in range(self.role(role).replicas)
        ]

    def _placed(self, role: WorkerRole, threads: int) -> EngineConfig:
        """The options of a role's engines, with the device that its workers have and their part of its memory."""
        engine, gpus = self._engine(role, threads), self.role(role).gpus
        if gpus == 0 and engine.device == "auto":
            engine = replace(engine, device="cpu")  # Ray doesn't hide the GPUs from actors that reserve none
        part = engine.memory_part
        if part == 0 and not self._on_cpus(role):
            part = 1.0 if gpus == AUTO else gpus
        elif part == 0 and self.local:
            part = 1 / self._count(filter(self._on_cpus, ROLES))
        return replace(engine, memory_part=part)

    def _on_cpus(self, role: WorkerRole) -> bool:
        """Whether a role's workers have no GPU, as far as that is known, or don't use it."""
        return self.role(role).gpus in (0, AUTO) or self._engine(role).device == "cpu"

    def router_configs(self) -> list[RouterConfig]:
        """Each router's options, without the supervisor's address: `router-0`, `router-1`, ..."""
        section = self.router
        known = {option.name for option in fields(RouterOptions)} - {"grpc_port", "http_port"}
        options = {name: getattr(section, name) for name in known}
        return [
            RouterConfig(
                **options,
                name=f"router-{index}",
                grpc_port=section.grpc_port and section.grpc_port + index * section.port_step,
                http_port=section.http_port and section.http_port + index * section.port_step,
                share_port=self._share_ports,
                metrics_port=self.metrics.router_port,
                model=self.model.path,
                drain_seconds=self.drain_seconds,
                security=self.security,
            )
            for index in range(section.replicas)
        ]

    def bundle(self, role: WorkerRole | None) -> dict[str, float]:
        """Ray resources that one worker of this role reserves; those of one router for None."""
        section = self.router if role is None else self.role(role)
        gpus = getattr(section, "gpus", 0.0)
        amounts = {"CPU": section.cpus, "GPU": 0.0 if gpus == AUTO else gpus, **section.resources}
        return {name: amount for name, amount in amounts.items() if amount > 0}

    def total_resources(self) -> dict[str, float]:
        """Ray resources of all workers and routers together."""
        total: Counter[str] = Counter()
        for role, replicas in ((None, self.router.replicas), *((role, self.role(role).replicas) for role in ROLES)):
            total.update({name: amount * replicas for name, amount in self.bundle(role).items()})
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
