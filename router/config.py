"""The options of a router, and what one router process is given at start."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """What an operator chooses of a router."""

    __pydantic_config__: ClassVar[dict[str, bool | str]] = {"extra": "forbid", "use_attribute_docstrings": True}

    host: str = "127.0.0.1"
    """Address that the public gRPC binds to."""

    grpc_port: int = 50051
    """Port of the public gRPC; 0 takes a free one."""

    max_requests: int = 1024
    """Requests in flight at once; one more is refused with RESOURCE_EXHAUSTED."""

    max_queue: int = 512
    """Requests that may wait at the router for free KV blocks on a decode worker; one more is refused with
    RESOURCE_EXHAUSTED."""

    backlog_share: float = 0.25
    """Share of the prefill workers' KV memory, 0 to 1, that computed prompts may keep while they wait for a decode
    worker. With 0 a prompt is sent only when decode can take it now, so decode waits for the next prefill
    whenever a request ends; with a large share, finished prompts may fill prefill's memory."""

    max_message_bytes: int = 4 * 2**20
    """Largest size of a request."""

    first_token_timeout_seconds: float = 120.0
    """How long a request may take to its first token before it fails with DEADLINE_EXCEEDED."""

    idle_timeout_seconds: float = 30.0
    """How long a running stream may stay without a token before its worker is given up."""

    max_attempts: int = 4
    """Most placements of one request, the first one counted."""

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


@dataclass(frozen=True, slots=True)
class RouterConfig(RouterOptions):
    """One router's identity and options: the JSON file of `python -m kvrelay.router --config FILE`."""

    name: str = "router-0"
    """Unique in the cluster."""

    model: str = "pico"
    """Folder of the checkpoint (its tokenizer and chat template are read here), or a bundled model's name."""

    supervisor: str = ""
    """host:port of the supervisor, which sends the list of workers."""
