"""The loop: plan -> run -> commit, or, on a runner that is asynchronous, plan N + 1 -> launch it -> commit N."""

from typing import Protocol, runtime_checkable

from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.scheduler import Progress, Scheduler


class StepRunner(Protocol):
    """What the loop needs of a runner (see `kvrelay.engine.runner`)."""

    def run(self, plan: StepPlan) -> StepOutput: ...


class Launched(Protocol):
    """A step that is under way."""

    def result(self) -> StepOutput:
        """Waits until the step is done."""
        ...


@runtime_checkable
class AsyncRunner(Protocol):
    """A runner whose steps go on by themselves, one after another, so that the next is planned meanwhile."""

    def launch(self, plan: StepPlan) -> Launched:
        """Starts a step, behind the one launched before it, whose tokens `plan.feeds` may ask for."""
        ...


class Engine:
    """A scheduler and a runner. Not thread-safe: one thread owns both."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner | AsyncRunner) -> None:
        """
        Args:
            scheduler: with a lag of 1 for an `AsyncRunner`, of 0 for any other.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.computed_tokens = 0
        """Tokens computed since start."""
        self._launched: tuple[StepPlan, Launched] | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step may do something. It may find that everything waits for blocks held by others, too."""
        return self.scheduler.has_work or self._launched is not None

    def step(self) -> list[Progress]:
        """One step; [] where there is nothing to compute, or no room for any of it until a hold is released.

        Rows whose logits aren't finite fail by themselves; whatever the runner raises comes out of here, and the
        engine is not to be used afterwards.
        """
        if isinstance(self.runner, AsyncRunner):
            return self._step_ahead(self.runner)
        plan = self.scheduler.plan()
        return [] if plan is None else self._commit(plan, self.runner.run(plan))

    def _step_ahead(self, runner: AsyncRunner) -> list[Progress]:
        """Keeps one step under way while another is planned, and reports on the older one."""
        while True:
            plan = self.scheduler.plan()
            launched, self._launched = self._launched, None if plan is None else (plan, runner.launch(plan))
            if launched is not None:
                done, pending = launched
                reports = self._commit(done, pending.result())
                if reports:
                    return reports
            elif plan is None:
                return []

    def _commit(self, plan: StepPlan, out: StepOutput) -> list[Progress]:
        self.computed_tokens += plan.num_tokens
        return self.scheduler.commit(plan, out)
