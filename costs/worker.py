"""What one worker says of its own costs; routers, the scaler and the planner read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvrelay.costs.handoff import KvBytes, LinkCost
from kvrelay.costs.step import StepCost


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """Costs as a worker has fitted them."""

    step: StepCost
    chunk: int = 1
    """Tokens of a full step."""
    step_seconds: float = 0.0
    """Bound on the time of a step that has chunks beside sequences that decode; 0: none."""
    decode_error: float = 0.0
    """Mean relative error of predicted steps without chunks."""
    prompt_error: float = 0.0
    """Mean relative error of predicted steps with chunks."""
    kv: KvBytes = field(default_factory=KvBytes)
    """Bytes of a sequence's cache."""
    links: Mapping[str, LinkCost] = field(default_factory=dict)
    """Hand-offs to this worker, by the sending worker's name."""
