"""What one router process is told at start."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One router's identity and options."""

    __pydantic_config__: ClassVar[dict[str, bool | str]] = {"extra": "forbid", "use_attribute_docstrings": True}

    name: str = "router-0"
    """Unique in the cluster."""

    model: str = "pico"
    """Folder of the checkpoint (its tokenizer and chat template are read here), or a bundled model's name."""

    host: str = "127.0.0.1"
    """Address that the public gRPC binds to."""

    grpc_port: int = 50051
    """Of the public gRPC; 0 takes a free one."""

    supervisor: str = ""
    """host:port of the supervisor, from which workers are learnt."""

    max_requests: int = 1024
    """Requests in flight at once; one more is refused with RESOURCE_EXHAUSTED."""

    max_queue: int = 512
    """Requests that may wait at the router for room on a decode worker; one more is refused with RESOURCE_EXHAUSTED."""

    backlog_share: float = 0.25
    """How much of the prefill workers' KV memory computed prompts may keep while they wait for room on a decode
    worker; 0 to 1. With 0 a prompt is sent only where there is room for it now, so that decode waits for the next one's
    prefill whenever a request ends; with much, prefill's memory may be full of finished prompts."""

    max_message_bytes: int = 4 * 2**20
    """Size of a request at most."""

    first_token_timeout_seconds: float = 120.0
    """How long a request may take to its first token before it fails with DEADLINE_EXCEEDED."""

    idle_timeout_seconds: float = 30.0
    """How long a running stream may stay without a token before its worker is given up."""

    max_attempts: int = 4
    """Placements of one request at most, the first one counted."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("grpc_port", 0, 65535),
            ("max_requests", 1, 1_000_000),
            ("max_queue", 0, 1_000_000),
            ("backlog_share", 0.0, 1.0),
            ("max_message_bytes", 1024, 2**30),
            ("first_token_timeout_seconds", 0.1, 86400),
            ("idle_timeout_seconds", 0.1, 86400),
            ("max_attempts", 1, 100),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {low} to {high}")
