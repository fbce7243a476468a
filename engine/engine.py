"""The loop: plan -> launch -> commit. A runner's lag says how many launched steps may wait for their commit.

With a lag of one, a step is planned while the one before it runs. A row may then compute a token that isn't known yet:
the plan names the row of the step before that yields it. What follows from that token is decided one step later. If it
ends the sequence, the sequence is in one more plan, and that row is dropped when the plan is committed. An end by
length is foreseen.

    plan N+1      num_computed | scheduled (in flight) | this step's |       tokens known, then `yields` that aren't
    commit N      in order; blocks of an ended sequence stay until no plan in flight names it
    preemption    waits until nothing is in flight: `plan` is None once, and the next one does it
    a mask        that isn't there leaves its row out of a step, or lets it compute the same token again; others go on
"""

import threading
from collections import deque
from collections.abc import Callable

from kvrelay.engine.lifetime import now
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.runner.base import Runner, StepHandle
from kvrelay.engine.scheduling.progress import OnLaunch, Progress
from kvrelay.engine.scheduling.scheduler import Scheduler


class Engine:
    """A scheduler and a runner. One thread owns both; others may use the scheduler with `lock`, also during a step."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        """
        Args:
            scheduler: made with the runner's lag.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.lock = threading.Lock()
        """Lock on the scheduler, its block pool and prefix index. No step is computed while it is held."""
        self._computed_tokens = 0
        self.prompt_tokens = 0
        """Tokens of prompts computed since start."""
        self.steps = 0
        """Steps since start."""
        self.step_seconds = 0.0
        """Seconds that these steps took together, without those in which the engine did something else."""
        self.on_step: Callable[[StepPlan, StepOutput, float], None] | None = None
        """Called with each step that was committed, and the seconds that `step` took for it."""
        self.on_launch: OnLaunch | None = None
        self._in_flight: deque[tuple[StepPlan, StepHandle, float]] = deque()
        """Plans in flight, each with its step's handle and the time when it was begun."""
        self._committed = 0.0
        """Time when the step before was committed."""
        self._continues = False
        """Whether work was left then."""

    def warm_up(self) -> None:
        """Runs everything that would make the first steps slow. Call it before there are sequences."""
        guesses = self.scheduler.speculation
        self.runner.warm_up(() if guesses is None else guesses.layers)
        if guesses is not None:
            guesses.warm_up()

    def forget_steps(self) -> None:
        """Resets the counts of steps and tokens: the steps so far computed nobody's request."""
        self._computed_tokens = self.prompt_tokens = self.steps = 0
        self.step_seconds = 0.0

    @property
    def computed_tokens(self) -> int:
        """Tokens computed since start, without drafts that were not kept."""
        guesses = self.scheduler.speculation
        return self._computed_tokens - (0 if guesses is None else guesses.counts.proposed - guesses.counts.accepted)

    @property
    def has_work(self) -> bool:
        """Whether a sequence is here or a step is in flight. All sequences may wait for blocks that others hold."""
        return self.scheduler.has_work or bool(self._in_flight)

    def step(self) -> list[Progress]:
        """Launches steps as far ahead as the lag allows, then commits the oldest and returns what it did.

        Returns:
            One Progress per row; [] if there is nothing to compute, no free blocks until a hold is released, or no mask
            until its matcher wakes the engine's thread.

        Raises:
            Whatever the runner raises; the engine must not be used afterwards. A row whose logits aren't finite raises
            nothing: its sequence fails alone.
        """
        began = now()
        while True:
            planned = now()
            with self.lock:
                plan = self.scheduler.plan()
            if plan is not None:
                handle = self.runner.launch(plan)
                self._in_flight.append((plan, handle, planned))
                if self.runner.lag and self.on_launch is not None:
                    with self.lock:
                        self.on_launch(self.scheduler.newest(), handle.written)
                if len(self._in_flight) <= self.runner.lag:
                    continue
            if not self._in_flight:
                return []
            oldest, handle, planned = self._in_flight.popleft()
            out = handle.result()
            work = oldest.work
            self._computed_tokens += oldest.num_tokens
            self.prompt_tokens += int(work.prompt_tokens)
            with self.lock:
                reports = self.scheduler.commit(oldest, out)
                ended = now()
                # Two steps overlap: a step's own time begins when the one before it has ended.
                self.scheduler.fit.add(work, ended - max(planned, self._committed))
                self.scheduler.fit.add_interval(work, ended - (self._committed if self._continues else planned))
            self._committed, self._continues = ended, self.has_work
            self.steps += 1
            self.step_seconds += ended - began
            if self.on_step is not None:
                self.on_step(oldest, out, ended - began)
            began = ended
            # No reports if all rows of the step belonged to sequences that had ended meanwhile.
            if reports:
                return reports
