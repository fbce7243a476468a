"""Telling, while a step runs, that the first layers have written their KV: for whoever ships it meanwhile."""

from typing import Protocol, runtime_checkable

from kvrelay.engine.plan import StepPlan


class LayerWatch(Protocol):
    """Who wants to know. Called on the engine thread, inside `Runner.run`."""

    def borders(self, plan: StepPlan) -> tuple[int, ...]:
        """After how many layers of this step to tell, ascending and fewer than all; empty for not at all."""

    def passed(self, plan: StepPlan, layers: int) -> None:
        """The KV of the step's tokens in the first `layers` layers is in the pool."""


@runtime_checkable
class WatchedRunner(Protocol):
    """A runner that tells."""

    watch: LayerWatch | None
