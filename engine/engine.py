"""The loop: plan -> run -> commit."""

from typing import Protocol

from kvrelay.engine.plan import RowFailure, StepOutput, StepPlan
from kvrelay.engine.scheduler import Progress, Scheduler


class StepRunner(Protocol):
    """What the loop needs of a runner (see `kvrelay.engine.runner`)."""

    def run(self, plan: StepPlan) -> StepOutput: ...


class Engine:
    """A scheduler and a runner. Not thread-safe: one thread owns both."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.computed_tokens = 0
        """Tokens computed since start."""

    @property
    def has_work(self) -> bool:
        """Whether a step may do something. It may find that everything waits for blocks held by others, too."""
        return self.scheduler.has_work

    def step(self) -> list[Progress]:
        """One step; [] where there is nothing to compute, or no room for any of it until a hold is released.

        Rows that the runner gives up fail by themselves; whatever else it raises comes out of here, and the engine
        is not to be used afterwards.
        """
        plan = self.scheduler.plan()
        if plan is None:
            return []
        try:
            out = self.runner.run(plan)
        except RowFailure as failure:
            return self.scheduler.fail(plan, failure)
        self.computed_tokens += plan.num_tokens
        return self.scheduler.commit(plan, out)
