"""Options of one worker process at start: the JSON file of `python -m kvrelay.prefill_worker --config FILE`."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Interval

from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.machine.options import Options, Port, require
from kvrelay.rpc.identity import WorkerRole
from kvrelay.rpc.security import SecurityConfig
from kvrelay.transfer.config import TransferConfig


@dataclass(frozen=True, slots=True)
class WorkerConfig(Options):
    """One worker's identity, model and options."""

    name: str
    """Name of the worker, unique in the cluster, e.g. `worker-0`; stays the same when the worker is replaced."""

    role: WorkerRole
    """Role of the worker, until the supervisor gives it another one."""

    model: str
    """Folder of a Hugging Face checkpoint, GGUF file or folder with one, ORG/NAME[@REVISION] for a model of the Hugging
    Face hub (hf:ORG/NAME where a folder has that name too), `smollm2` for SmolLM2-135M-Instruct of the Python package
    index, or the name of a bundled one (`pico`, `pico-draft`)."""

    dtype: Dtype = "auto"
    """Dtype of weights and KV; auto takes the checkpoint's on GPU, and on CPU the checkpoint's unless it is float16."""

    host: str = "127.0.0.1"
    """Address that the internal gRPC and the links bind to, and that peers dial."""

    port: Port = 0
    """Port of the internal gRPC; 0 takes a free one."""

    ranks_port: Port = 0
    """Port for the agents of other machines with ranks of this worker (`engine.hosts`); 0 takes a free one."""

    metrics_port: Port | None = None
    """Port of `/metrics`; 0 takes a free one, None opens none."""

    supervisor: str = ""
    """Address of the supervisor, host:port; empty runs without one (no peers, so only a co-located worker can
    serve)."""

    max_waiting: Annotated[int, Interval(ge=1)] = 1024
    """Largest number of requests that wait here; one more is refused."""

    drain_seconds: Annotated[float, Interval(ge=0, le=3600)] = 30.0
    """Seconds that requests are given to finish when the worker is to end."""

    switch_seconds: Annotated[float, Interval(ge=0, le=3600)] = 0.5
    """Seconds that requests are given to finish when the worker takes another role; then they move to other workers."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """Options of the engine."""

    transfer: TransferConfig = field(default_factory=TransferConfig)
    """Options of the hand-off."""

    security: SecurityConfig = field(default_factory=SecurityConfig)
    """Protection of the internal gRPC, and who may call it."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        require(self.name != "" and self.name.isprintable(), "name", self.name, "a printable name")
        full = self.transfer.encrypt == "full"
        require(not full or self.security.tls == "mutual", "transfer.encrypt", "full", "with security.tls mutual only")
        hosts, plain = self.engine.hosts, "as plans and sums between machines are neither encrypted nor authenticated"
        require(hosts == 1 or self.security.tls == "off", "engine.hosts", hosts, f"1 with security.tls mutual, {plain}")
        encrypt = self.transfer.encrypt
        require(hosts == 1 or encrypt == "none", "engine.hosts", hosts, f"1 with transfer.encrypt {encrypt}, {plain}")
        require(hosts == 1 or self.transfer.transport != "shm", "transfer.transport", "shm", "auto or tcp, with hosts")
