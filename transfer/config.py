"""The options of the KV hand-off."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvrelay.engine.config import STRICT, require


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Options of the hand-off between a prefill and a decode worker."""

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    transport: Literal["auto", "gloo", "nccl"] = "auto"
    """How bulk bytes travel; auto takes the best that both ends can do."""

    chunk_bytes: int = 8 * 2**20
    """KV bytes of one frame at most; 64 KiB to 16 MiB."""

    checksum: bool = True
    """Verify every frame (xxh3) before it touches the pool. Off only to measure its cost."""

    lease_seconds: float = 5.0
    """How long a sender keeps exported blocks without a sign of life from the receiver."""

    frame_timeout_seconds: float = 3.0
    """How long one frame may take on a link before the link is given up."""

    grant_timeout_seconds: float = 30.0
    """How long an offer may wait for room on the decode worker."""

    prefill_timeout_seconds: float = 120.0
    """How long the decode worker keeps room for a prompt that is not computed yet."""

    transfer_timeout_seconds: float = 60.0
    """How long a hand-off may take from the end of prefill to its commit."""

    max_links: int = 64
    """Links kept open at once; the one unused for longest is closed first."""

    def __post_init__(self) -> None:
        require(2**16 <= self.chunk_bytes <= 2**24, "chunk_bytes", self.chunk_bytes, "65536 to 16777216")
        for name in (
            "lease_seconds",
            "frame_timeout_seconds",
            "grant_timeout_seconds",
            "prefill_timeout_seconds",
            "transfer_timeout_seconds",
        ):
            require(0.01 <= getattr(self, name) <= 3600, name, getattr(self, name), "0.01 to 3600")
        require(1 <= self.max_links <= 4096, "max_links", self.max_links, "1 to 4096")
