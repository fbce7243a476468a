"""A step that runs on a GPU, and its results."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvrelay.engine.kv.writes import EventWaiter, KVWrites
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.runner.special import SpecialRows
from kvrelay.engine.sampling.logprobs import PromptScores, read_prompts
from kvrelay.kernels.ops import NONFINITE


@dataclass(frozen=True, slots=True)
class Extras:
    """Results of a step beside the tokens of plain rows."""

    special: SpecialRows | None = None
    prompts: PromptScores = field(default_factory=list)
    states: Tensor | None = None
    """Hidden states on the device, as `StepOutput.states`."""
    graph: bool = False
    """Whether captured graphs were launched."""


class StreamWrites:
    """Implements `KVWrites`: all that a stream was given until now."""

    begun = True

    def __init__(self, stream: torch.cuda.Stream, waiter: EventWaiter) -> None:
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)
        self._waiter = waiter

    @property
    def ended(self) -> bool:
        ended: bool = self._event.query()
        return ended

    def follow(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def then(self, call: Callable[[], object]) -> None:
        self._waiter.then(self._event, call)


class GpuStep:
    """Implements `StepHandle`."""

    def __init__(
        self, plan: StepPlan, tokens: Tensor, extras: Extras, written: KVWrites, wait: Callable[[], object]
    ) -> None:
        """
        Args:
            wait: returns when the device has computed the step; raises `CollectiveError` if another rank is lost.
        """
        self.written = written
        self._plan = plan
        self._tokens = tokens
        self._extras = extras
        self._wait = wait

    def result(self) -> StepOutput:
        self._wait()
        plan = self._plan
        tokens = self._tokens[: plan.num_rows].tolist()
        sampled = plan.sample.tolist()
        special = self._extras.special
        refused = {} if special is None else special.refused()
        invalid = [row for row, token in enumerate(tokens) if sampled[row] and token == NONFINITE]
        return StepOutput(
            tuple([token if yields else None for token, yields in zip(tokens, sampled, strict=True)]),
            tuple([row for row in invalid if row not in refused]),
            tuple(refused.items()),
            None if special is None else special.logprobs(plan.num_rows),
            read_prompts(self._extras.prompts),
            self._extras.graph,
            self._extras.states,
        )
