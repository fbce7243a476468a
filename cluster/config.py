"""A whole cluster's options: one YAML file, command-line values on top, every default in one place.

The sections hold the very classes that the processes take (`EngineConfig`, `TransferConfig`, ...), so an option is
written, checked and documented once.
"""

import math
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetPydanticSchema, TypeAdapter, model_validator
from pydantic_core import CoreSchema, core_schema

from kvrelay.engine.config import Dtype, EngineConfig, require
from kvrelay.router.config import RouterConfig
from kvrelay.transfer.config import TransferConfig
from kvrelay.worker.config import WorkerConfig, WorkerRole

ROLES: tuple[WorkerRole, ...] = ("prefill", "decode", "colocated")
LOCAL = "local"
AUTO = "auto"
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_ROUTER = RouterConfig()
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _engine_overrides(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    """Schema of a mapping with any of EngineConfig's fields; `threads` is the role's own field."""
    hints = get_type_hints(EngineConfig)
    described = TypeAdapter(EngineConfig).json_schema()["properties"]
    return core_schema.typed_dict_schema(
        {
            field.name: core_schema.typed_dict_field(
                handler.generate_schema(hints[field.name]),
                required=False,
                metadata={"pydantic_js_updates": {"description": described[field.name]["description"]}},
            )
            for field in fields(EngineConfig)
            if field.name != "threads"
        },
        extra_behavior="forbid",
    )


EngineOverrides = Annotated[dict[str, Any], GetPydanticSchema(_engine_overrides)]


class Section(BaseModel):
    """A frozen part of the configuration that knows its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelSection(Section):
    """What is served."""

    path: str = "pico"
    """Folder of a Hugging Face checkpoint, or the name of a bundled model (`pico`, `pico-draft`)."""

    dtype: Dtype = "auto"
    """Of weights and KV; auto takes the checkpoint's on GPU, and on CPU the checkpoint's unless it is float16."""


class RoleSection(Section):
    """The workers of one role."""

    replicas: int = Field(default=0, ge=0, le=1024)
    """Workers. Where it isn't given: one prefill and one decode worker, or none of these with co-located ones."""

    cpus: Amount = 1.0
    """CPUs that Ray reserves for each."""

    gpus: Amount = 0.0
    """GPUs that Ray reserves for each."""

    resources: dict[str, Amount] = {}
    """Custom Ray resources that each takes; they choose the group of nodes that it runs on."""

    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of the forward pass; 0 takes engine.threads."""

    engine: EngineOverrides = {}
    """Engine options that differ from the `engine` section for this role."""


class RouterSection(Section):
    """The front door; see RouterConfig for what each process is told."""

    host: str = _ROUTER.host
    """Address that the public gRPC binds to; on a Ray cluster that was joined, 127.0.0.1 means the node's own one."""

    grpc_port: int = _ROUTER.grpc_port
    """Of the public gRPC; 0 takes a free one."""

    max_requests: int = _ROUTER.max_requests
    """Requests in flight at once; one more is refused with RESOURCE_EXHAUSTED."""

    max_queue: int = _ROUTER.max_queue
    """Requests that may wait for room on a decode worker; one more is refused with RESOURCE_EXHAUSTED."""

    backlog_share: float = _ROUTER.backlog_share
    """How much of the prefill workers' KV memory computed prompts may keep while they wait for room; 0 to 1."""

    max_message_bytes: int = _ROUTER.max_message_bytes
    """Size of a request at most."""

    first_token_timeout_seconds: float = _ROUTER.first_token_timeout_seconds
    """How long a request may take to its first token before it fails with DEADLINE_EXCEEDED."""

    idle_timeout_seconds: float = _ROUTER.idle_timeout_seconds
    """How long a running stream may stay without a token before its worker is given up."""

    max_attempts: int = _ROUTER.max_attempts
    """Placements of one request at most, the first one counted."""

    cpus: Amount = 1.0
    """CPUs that Ray reserves for it."""

    resources: dict[str, Amount] = {}
    """Custom Ray resources that it takes; they choose the group of nodes that it runs on."""

    def process_config(self, model: str, supervisor: str) -> RouterConfig:
        """What the router process is told.

        Raises:
            ValueError: an option is out of its range; the text names it, its value and the limit.
        """
        options = self.model_dump(exclude={"cpus", "resources"})
        return RouterConfig(name="router-0", model=model, supervisor=supervisor, **options)

    @model_validator(mode="after")
    def _check(self) -> "RouterSection":
        self.process_config("", "")
        return self


class RaySection(Section):
    """The Ray cluster that it runs on."""

    address: str = LOCAL
    """`local` starts one that ends with `kvrelay up`; `auto` or host:port joins a running one."""

    namespace: str = Field(default="kvrelay", min_length=1)
    """Of the named actors; two kvrelay clusters on one Ray cluster need two."""

    include_dashboard: bool = True
    """Start Ray's dashboard with a local cluster."""

    dashboard_host: str = "127.0.0.1"
    """Address that a local cluster's dashboard binds to."""

    dashboard_port: int = Field(default=0, ge=0, le=65535)
    """Of a local cluster's dashboard; 0 takes 8265 or the next free one."""

    @model_validator(mode="after")
    def _check(self) -> "RaySection":
        host, _, port = self.address.rpartition(":")
        joined = bool(host) and port.isdecimal() and 0 < int(port) < 65536
        require(joined or self.address in (LOCAL, AUTO), "address", self.address, f"{LOCAL}, {AUTO} or HOST:PORT")
        return self


class HeartbeatSection(Section):
    """When a silent member is given up; heartbeats come every 0.5 s."""

    suspect_seconds: float = Field(default=1.5, ge=0.6, le=3600)
    """Silence after which a member gets no new requests."""

    dead_seconds: float = Field(default=3.0, ge=0.6, le=3600)
    """Silence after which an incarnation is fenced for good and replaced."""

    @model_validator(mode="after")
    def _check(self) -> "HeartbeatSection":
        allowed = f"at least suspect_seconds ({self.suspect_seconds})"
        require(self.dead_seconds >= self.suspect_seconds, "dead_seconds", self.dead_seconds, allowed)
        return self


class ClusterConfig(Section):
    """Everything that `kvrelay up` is told."""

    model: ModelSection = ModelSection()
    """The checkpoint that is served."""

    engine: EngineConfig = EngineConfig()
    """Options of every worker's engine."""

    transfer: TransferConfig = TransferConfig()
    """Options of the KV hand-off."""

    router: RouterSection = RouterSection()
    """The front door."""

    prefill: RoleSection = RoleSection()
    """Workers that compute prompts and hand their KV off."""

    decode: RoleSection = RoleSection()
    """Workers that continue from handed-off KV."""

    colocated: RoleSection = RoleSection()
    """Workers that do both, without a hand-off."""

    ray: RaySection = RaySection()
    """The Ray cluster that it runs on."""

    heartbeat: HeartbeatSection = HeartbeatSection()
    """When a silent member is given up."""

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
        for role in ROLES:
            self._engine(role)
            self._check_bundle(role)
        self._check_bundle(None)
        if self.colocated.replicas == 0:
            for role in ("prefill", "decode"):
                replicas = self.role(role).replicas
                require(replicas > 0, f"{role}.replicas", replicas, "at least 1, unless colocated.replicas is")
        return self

    def _check_bundle(self, role: WorkerRole | None) -> None:
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

    def worker_configs(self, supervisor: str = "", cores: int | None = None) -> list[WorkerConfig]:
        """What each worker is told: `prefill-0`, `prefill-1`, ..., `decode-0`, ...

        Threads that nobody chose: on one machine the workers share its `cores` (default: those that this process may
        use); on a Ray cluster each takes the CPUs that are reserved for it.
        """
        workers = sum(self.role(role).replicas for role in ROLES)
        share = max(1, (cores or available_cores()) // workers)
        return [
            WorkerConfig(
                name=f"{role}-{index}",
                role=role,
                model=self.model.path,
                dtype=self.model.dtype,
                supervisor=supervisor,
                engine=self._engine(role, share if self.local else max(1, math.floor(self.role(role).cpus))),
                transfer=self.transfer,
            )
            for role in ROLES
            for index in range(self.role(role).replicas)
        ]

    def router_config(self, supervisor: str = "") -> RouterConfig:
        """What the router is told."""
        return self.router.process_config(self.model.path, supervisor)

    def bundle(self, role: WorkerRole | None) -> dict[str, float]:
        """Ray resources that one worker of this role reserves; those of the router for None."""
        section = self.router if role is None else self.role(role)
        gpus = section.gpus if isinstance(section, RoleSection) else 0.0
        amounts = {"CPU": section.cpus, "GPU": gpus, **section.resources}
        return {name: amount for name, amount in amounts.items() if amount > 0}

    def total_resources(self) -> dict[str, float]:
        """Ray resources of all workers and the router together."""
        total: dict[str, float] = {}
        for role in (*ROLES, None):
            for name, amount in self.bundle(role).items():
                total[name] = total.get(name, 0.0) + amount * (1 if role is None else self.role(role).replicas)
        return {name: amount for name, amount in total.items() if amount > 0}


def available_cores() -> int:
    """Cores that this process may use: its affinity, and no more than its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = CPU_QUOTA.read_text().partition(" ") if CPU_QUOTA.exists() else ("max", "", "")
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def schema() -> dict[str, Any]:
    """JSON schema of the configuration file."""
    return ClusterConfig.model_json_schema()
