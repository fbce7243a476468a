"""When and how far a cluster changes its workers' roles and their number by itself."""

from dataclasses import dataclass
from typing import ClassVar

from kvrelay.engine.config import STRICT, require


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """Targets of latency, and what may be done to meet them."""

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    enabled: bool = False
    """Whether the supervisor changes workers' roles, and adds and removes workers, so that the targets are met. Off, it
    only shows what it measures."""

    ttft_target_seconds: float = 2.0
    """A request meets its target if its first token is sent within this time after its arrival."""

    tpot_target_seconds: float = 0.1
    """A request meets its target if the mean time between two of its tokens is at most this."""

    min_prefill: int = 1
    """Prefill workers that stay."""

    max_prefill: int = 1024
    """Prefill workers at most."""

    min_decode: int = 1
    """Decode workers that stay."""

    max_decode: int = 1024
    """Decode workers at most."""

    min_workers: int = 0
    """Prefill and decode workers together that stay; 0: none is removed."""

    max_workers: int = 0
    """Prefill and decode workers together at most; 0: none is added."""

    cooldown_seconds: float = 2.0
    """Time after a change has been made before the next one: it has to show its effect first."""

    reversal_seconds: float = 8.0
    """The same for a change in the other direction; twice as long after each such change within ten minutes."""

    calm_seconds: float = 300.0
    """How long fewer workers must have been enough before one is removed."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("ttft_target_seconds", 0.001, 3600),
            ("tpot_target_seconds", 0.0001, 60),
            ("min_prefill", 1, 1024),
            ("max_prefill", 1, 1024),
            ("min_decode", 1, 1024),
            ("max_decode", 1, 1024),
            ("min_workers", 0, 2048),
            ("max_workers", 0, 2048),
            ("cooldown_seconds", 1, 3600),
            ("reversal_seconds", 1, 3600),
            ("calm_seconds", 1, 86400),
        ):
            require(low <= getattr(self, name) <= high, name, getattr(self, name), f"{low} to {high}")
        for kind in ("prefill", "decode", "workers"):
            low, high = getattr(self, f"min_{kind}"), getattr(self, f"max_{kind}")
            require(low <= high or not high, f"max_{kind}", high, f"at least min_{kind} ({low})")
        require(
            self.reversal_seconds >= self.cooldown_seconds,
            "reversal_seconds",
            self.reversal_seconds,
            f"at least cooldown_seconds ({self.cooldown_seconds})",
        )
