"""The sections of a cluster's options that aren't the option class of another process."""

from typing import Annotated, Any, Final, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetPydanticSchema, TypeAdapter, model_validator
from pydantic_core import CoreSchema, core_schema

from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.machine.options import Automatic, Port, require

LOCAL = "local"
AUTO: Final = "auto"


GPUS_ALLOWED = "auto, or 0 to 1: each rank of a worker computes on one GPU"
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
        for name, described in json_properties(EngineConfig).items()
        if name != "threads"
    }
    return core_schema.typed_dict_schema(options, extra_behavior="forbid")


def json_properties(options: type) -> dict[str, Any]:
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
    """Folder of a Hugging Face checkpoint, GGUF file or folder with one, ORG/NAME[@REVISION] for a model of the Hugging
    Face hub (hf:ORG/NAME where a folder has that name too), `smollm2` for SmolLM2-135M-Instruct of the Python package
    index, or the name of a bundled one (`pico`, `pico-draft`)."""

    dtype: Dtype = "auto"
    """Dtype of weights and KV; auto takes the checkpoint's on GPU, and on CPU the checkpoint's unless it is float16."""

    trust_remote_code: bool = False
    """Always false: code that comes with a model is neither downloaded nor run. True is refused."""

    @model_validator(mode="after")
    def _check(self) -> "ModelSection":
        allowed = "false; kvrelay runs no code that comes with a model, only architectures that it has itself"
        require(not self.trust_remote_code, "trust_remote_code", self.trust_remote_code, allowed)
        return self


class RoleSection(Section):
    """The workers of one role."""

    replicas: int = Field(default=0, ge=0, le=1024)
    """Number of workers. Default: one prefill and one decode worker, or neither if there are co-located workers."""

    cpus: Amount = 1.0
    """CPUs that Ray reserves for each worker; on this machine's own Ray workers share the cores instead."""

    gpus: Annotated[float | Literal["auto"], Automatic(GPUS_ALLOWED, 0.0, 1.0, word=AUTO)] = AUTO
    """GPUs that Ray reserves for each rank of a worker: at most one, since a rank computes on one GPU; with a fraction,
    such as 0.5, several workers of one rank share one. auto shares out ray.gpus. With 0, and without GPUs, the worker
    computes on CPUs."""

    resources: dict[str, Amount] = {}
    """Custom Ray resources that each worker takes; they select the nodes of a Ray cluster that was joined."""

    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of the forward pass; 0 takes engine.threads."""

    engine: EngineOverrides = {}
    """Engine options that differ from the `engine` section for this role."""


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

    topology_labels: tuple[str, ...] = ("ray.io/gpu-domain", "kvrelay.io/rack", "ray.io/availability-zone")
    """Labels of Ray's nodes that are near each other if they have the same value, the nearest first. Each role's
    workers are spread over the nodes; then workers that hand KV over to each other are placed near each other."""

    role_label: str = ""
    """Label of Ray's nodes whose value is the role that each is meant for, such as kvrelay.io/role. A worker takes a
    node of another role when none of its own has been free for 60 s. Empty: it takes any node with its resources."""

    gpus: Annotated[int | Literal["auto"], Automatic("auto, or 0 or more", 0, word=AUTO)] = AUTO
    """GPUs for the workers whose `gpus` is auto: each gets one, or its part of one if there are more workers. auto: all
    that the Ray cluster has. With 0, they compute on CPUs."""

    autoscaling: bool = False
    """Whether Ray's autoscaler brings nodes: `kvrelay scale` then takes numbers that the present nodes can't hold."""

    @model_validator(mode="after")
    def _check(self) -> "RaySection":
        host, _, port = self.address.rpartition(":")
        joined = bool(host) and port.isdecimal() and 0 < int(port) < 65536
        require(joined or self.address in (LOCAL, AUTO), "address", self.address, f"{LOCAL}, {AUTO} or HOST:PORT")
        return self


class MetricsSection(Section):
    """Ports at which processes serve their metrics as Prometheus text. Routers do so at `router.http_port`, and Ray's
    agents export those of all in any case."""

    router_port: Port | None = None
    """Port of each router's metrics, besides its HTTP port; needs no API key. 0 takes a free one, null opens none."""

    worker_port: Port | None = None
    """Port of each worker's metrics; 0 takes a free one, null opens none."""

    supervisor_port: Port | None = None
    """Port of the supervisor's metrics and of `/targets`, which lists the other processes' ports; 0 takes a free one,
    null opens none."""
