"""The options of a router, and those of one router process."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """The options of a router that an operator chooses."""

    __pydantic_config__: ClassVar[dict[str, bool | str]] = {"extra": "forbid", "use_attribute_docstrings": True}

    host: str = "127.0.0.1"
    """Address that the public gRPC binds to."""

    grpc_port: int = 50051
    """Port of the public gRPC; 0 takes a free one."""

    max_requests: int = 1024
    """Calls in flight at once, running, waiting, or tokenizing; one more is refused with RESOURCE_EXHAUSTED."""

    max_queued_bytes: int = 256 * 2**20
    """Bytes that the requests in flight may hold in the router, half of it those of one client address; one more is
    refused with RESOURCE_EXHAUSTED. A request counts with its size as sent and one to three bytes per token of its
    prompt, and until it is tokenized with five times its size. At least ten times max_message_bytes."""

    max_queue: int = 512
    """Requests that may wait in the router for capacity on a decode worker; one more is refused with
    RESOURCE_EXHAUSTED."""

    backlog_share: float = 0.25
    """Largest share (0 to 1) of the prefill workers' KV memory that may hold computed prompts which wait for capacity
    on a decode worker. With 0, a prompt is sent only if it fits on a decode worker now, so decode waits for a prefill
    whenever a request ends. With a large share, finished prompts may fill prefill memory."""

    max_message_bytes: int = 4 * 2**20
    """Largest size of a request; a larger one is refused with INVALID_ARGUMENT."""

    first_token_timeout_seconds: float = 120.0
    """Time from receipt to the first token after which a request fails with DEADLINE_EXCEEDED."""

    worker_wait_seconds: float = 30.0
    """Time that a new request waits while a role has no worker that is ready: a replacement may be starting. 0 refuses
    it with UNAVAILABLE at once."""

    idle_timeout_seconds: float = 30.0
    """Time without a token after which a running stream's workers are given up."""

    max_attempts: int = 4
    """Placements of one request, the first one included."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("grpc_port", 0, 65535),
            ("max_requests", 1, 1_000_000),
            ("max_queue", 0, 1_000_000),
            ("max_queued_bytes", 10240, 2**40),
            ("backlog_share", 0.0, 1.0),
            ("max_message_bytes", 1024, 2**30),
            ("first_token_timeout_seconds", 0.1, 86400),
            ("worker_wait_seconds", 0.0, 86400),
            ("idle_timeout_seconds", 0.1, 86400),
            ("max_attempts", 1, 100),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {low} to {high}")
        if self.max_queued_bytes < 10 * self.max_message_bytes:
            least = 10 * self.max_message_bytes
            raise ValueError(
                f"max_queued_bytes is {self.max_queued_bytes}; allowed: at least {least}, ten times max_message_bytes"
            )


@dataclass(frozen=True, slots=True)
class RouterConfig(RouterOptions):
    """One router's identity and options: the JSON file of `python -m kvrelay.router --config FILE`."""

    name: str = "router-0"
    """Unique in the cluster."""

    model: str = "pico"
    """Folder of the checkpoint (the router reads its tokenizer and chat template), or a bundled model's name."""

    supervisor: str = ""
    """host:port of the supervisor, which tells the router its workers."""
