"""One worker's report of its own costs; routers, the scaler and the planner read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvrelay.costs.handoff import KvBytes, LinkCost, typical
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
    extra: float = 0.0
    """Mean seconds from one token of a sequence to its next one beyond those of a step's decodes (`StepFit.extra`)."""
    typical_link: LinkCost = field(default_factory=LinkCost, init=False, repr=False, compare=False)
    """Stands for links that aren't known yet."""
    least_exposed: float = field(default=0.0, init=False, repr=False, compare=False)
    """Seconds that the exposed part of any hand-off takes at least."""

    def __post_init__(self) -> None:
        links = list(self.links.values())
        object.__setattr__(self, "typical_link", typical(links))
        object.__setattr__(self, "least_exposed", min([link.fixed for link in links], default=0.0))

    def link(self, sender: str) -> LinkCost:
        """The link from the worker of this name."""
        return self.links.get(sender, self.typical_link)
