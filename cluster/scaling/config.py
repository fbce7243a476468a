"""When and how far a cluster changes its workers' roles and their number by itself."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from kvrelay.machine.options import Options, require
from kvrelay.router.config import TPOT_TARGET_SECONDS, TTFT_TARGET_SECONDS

Workers = Annotated[int, Interval(ge=1, le=1024)]
BothRoles = Annotated[int, Interval(ge=0, le=2048)]
Pause = Annotated[float, Interval(ge=1, le=3600)]


@dataclass(frozen=True, slots=True)
class ScalingOptions(Options):
    """Changes that may be made to meet the targets of the class `interactive` (`router.classes`)."""

    enabled: bool = False
    """Whether the supervisor changes workers' roles, and adds and removes workers, so that the targets are met. Off, it
    only shows what it measures."""

    min_prefill: Workers = 1
    """Prefill workers that stay."""

    max_prefill: Workers = 1024
    """Prefill workers at most."""

    min_decode: Workers = 1
    """Decode workers that stay."""

    max_decode: Workers = 1024
    """Decode workers at most."""

    min_workers: BothRoles = 0
    """Prefill and decode workers together that stay; 0: none is removed."""

    max_workers: BothRoles = 0
    """Prefill and decode workers together at most; 0: none is added."""

    cooldown_seconds: Pause = 2.0
    """Time after a change has been made before the next one: it has to show its effect first."""

    reversal_seconds: Pause = 8.0
    """Time before a change in the other direction; twice as long after each such change within ten minutes."""

    calm_seconds: Annotated[float, Interval(ge=1, le=86400)] = 300.0
    """Time for which fewer workers must have been enough before one is removed."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        for kind in ("prefill", "decode", "workers"):
            low, high = getattr(self, f"min_{kind}"), getattr(self, f"max_{kind}")
            require(low <= high or not high, f"max_{kind}", high, f"at least min_{kind} ({low})")
        pause, least = self.reversal_seconds, self.cooldown_seconds
        require(pause >= least, "reversal_seconds", pause, f"at least cooldown_seconds ({least})")


@dataclass(frozen=True, slots=True)
class ScalingConfig(ScalingOptions):
    """The options of one supervisor's scaling."""

    ttft_target_seconds: Annotated[float, Interval(ge=0.001, le=3600)] = TTFT_TARGET_SECONDS
    """A request meets its target if its first token is sent within this time after its arrival."""

    tpot_target_seconds: Annotated[float, Interval(ge=0.0001, le=60)] = TPOT_TARGET_SECONDS
    """A request meets its target if the mean time between two of its tokens is at most this."""
