"""What one worker process is told at start: the JSON file of `python -m kvrelay.prefill_worker --config FILE`."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from kvrelay.engine.config import STRICT, Dtype, EngineConfig, require
from kvrelay.rpc.security import SecurityConfig
from kvrelay.transfer.config import TransferConfig

WorkerRole = Literal["prefill", "decode", "colocated"]


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker's identity, model and options."""

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    name: str
    """Unique in the cluster, e.g. `prefill-0`; stays the same when the worker is replaced."""

    role: WorkerRole
    """What it does with requests."""

    model: str
    """Folder of a Hugging Face checkpoint, hf:ORG/NAME[@REVISION] for a model of the hub, or the name of a bundled one
    (`pico`, `pico-draft`)."""

    dtype: Dtype = "auto"
    """Of weights and KV; auto takes the checkpoint's on GPU, and on CPU the checkpoint's unless it is float16."""

    host: str = "127.0.0.1"
    """Address that the internal gRPC and the links bind to, and that peers dial."""

    port: int = 0
    """Of the internal gRPC; 0 takes a free one."""

    metrics_port: int | None = None
    """Port of `/metrics`; 0 takes a free one, None opens none."""

    supervisor: str = ""
    """host:port of the supervisor; empty runs without one (no peers, so only a co-located worker can serve)."""

    max_waiting: int = 1024
    """Requests that may wait here; one more is refused."""

    drain_seconds: float = 30.0
    """Time that requests are given to finish when the worker is to end."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """Options of the engine."""

    transfer: TransferConfig = field(default_factory=TransferConfig)
    """Options of the hand-off."""

    security: SecurityConfig = field(default_factory=SecurityConfig)
    """Who may call the internal gRPC, and what protects it."""

    def __post_init__(self) -> None:
        require(self.name != "" and self.name.isprintable(), "name", self.name, "a printable name")
        require(self.role in ("prefill", "decode", "colocated"), "role", self.role, "prefill, decode, colocated")
        require(0 <= self.port <= 65535, "port", self.port, "0 to 65535")
        metrics = self.metrics_port
        require(metrics is None or 0 <= metrics <= 65535, "metrics_port", metrics, "0 to 65535, or null")
        require(0 <= self.drain_seconds <= 3600, "drain_seconds", self.drain_seconds, "0 to 3600")
        full = self.transfer.encrypt == "full"
        require(not full or self.security.tls == "mutual", "transfer.encrypt", "full", "with security.tls mutual only")
        require(self.max_waiting >= 1, "max_waiting", self.max_waiting, "1 or more")
