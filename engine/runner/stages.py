"""The runner of a rank of one of several pipeline stages, on the CPU.

The first stage has the embedding and, behind the last layer, the last norm and the head: rank 0 is one of its ranks, and
has what shapes logits. Hidden states of a step go from stage to stage, and those that yield something back to the
first one. While later stages compute a step, the first one computes the next: another chunk of a prompt, or other
sequences.

    stage 0    step 0   | step 1   | head of 0, step 2 | head of 1 ...
    stage 1               step 0   | step 1            | step 2
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.kv.writes import WRITTEN, KVWrites
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.ranks.collective import Ring
from kvrelay.engine.runner.base import FinishedStep, StepHandle
from kvrelay.engine.runner.cpu import CpuRunner


class StageStep:
    """A step that has left the first stage; implements `StepHandle`."""

    written: KVWrites = WRITTEN
    """KV writes of this stage."""

    def __init__(self, finish: Callable[[], StepOutput]) -> None:
        self.result = finish


class StageRunner(CpuRunner):
    """Implements `Runner` for a rank of a stage. Only ranks of the first stage return the step's output."""

    def __init__(self, *given: Any, ring: Ring) -> None:
        """
        Args:
            given: as for `CpuRunner`.
            ring: of all stages, `Place.stages`.
        """
        super().__init__(*given)
        self.lag = self.model.place.degree.pipeline - 1
        self._ring = ring

    states_shape = None
    """Nothing is kept, because the stages have the inputs of their own layers only."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """See `Runner.launch`. Computes the step in this stage, and sends the result to the next one.

        Raises:
            CollectiveError: another stage is lost.
        """
        self._set_threads()
        place = self.model.place
        with torch.inference_mode():
            given = None if place.stage == 0 else self._receive(plan.num_tokens)
            hidden = self.forward(plan, hidden=given)
            if place.is_last:
                hidden = hidden[wanted(plan)]
            self._ring.send(hidden)
        if place.stage:
            return FinishedStep(StepOutput((None,) * plan.num_rows))
        return StageStep(partial(self._finish, plan))

    def _receive(self, rows: int) -> Tensor:
        hidden = torch.empty(rows, self.model.config.hidden_size, dtype=self.parts.activations)
        self._ring.receive(hidden)
        return hidden

    @torch.inference_mode()
    def _finish(self, plan: StepPlan) -> StepOutput:
        """The step's output, when the last stage has ended it."""
        rows = wanted(plan)
        # Where nothing is read, nothing is written: then this takes no memory.
        hidden = torch.empty(plan.num_tokens, self.model.config.hidden_size, dtype=self.parts.activations)
        hidden[rows] = self._receive(len(rows))
        return self.finish(plan, hidden)


def wanted(plan: StepPlan) -> Tensor:
    """int64 [N] the plan's tokens, ascending, whose hidden states behind the last layer yield something."""
    ends = plan.lengths.cumsum()
    parts = [ends[plan.sample] - 1]
    for part in plan.prompt_parts:
        first = ends[part.row] - plan.lengths[part.row] + part.begin
        parts.append(np.arange(first, first + len(part.targets)))
    return torch.from_numpy(np.unique(np.concatenate(parts)).astype(np.int64))
