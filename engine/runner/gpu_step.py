"""What a step on a GPU yields, in parts: chosen tokens, what special rows take, and hidden states.

The sampling kernel has chosen a token for each row of the step, in a graph if it is a decode step. Special rows take
more than that: torch shapes a copy of their logits, the kernel chooses again, and the tokens replace those of the first
choice. Steps without special rows do nothing of this.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.kv.writes import EventWaiter, KVWrites
from kvrelay.engine.models.fast.decoder import NO_TAPS, Taps, taps_into
from kvrelay.engine.plan import StepOutput, StepPlan, TokenLogprobs
from kvrelay.engine.sampling.logprobs import PromptScores, Scores, read_prompts
from kvrelay.engine.sampling.processors import NO_TOKEN, ban, shape
from kvrelay.engine.sampling.sampler import draws_of, early_stops
from kvrelay.kernels.ops import NONFINITE
from kvrelay.kernels.triton.sample import Choices, Workspace, sample


class SpecialRows:
    """The special rows of one step."""

    def __init__(
        self, plan: StepPlan, rows: NDArray[np.int64], logits: Tensor, choices: Choices, tokens: Tensor
    ) -> None:
        """Launches all work on the current stream.

        Args:
            rows: [S] the plan's rows that sample, in the order of the tensors; at least one is special.
            logits: float32 [S or more, V] of the model, nothing changed.
            choices: [S or more].
            tokens: int64 [S or more] what the kernel has chosen; overwritten where a row is special.
        """
        places = [place for place, row in enumerate(rows.tolist()) if plan.is_special(row)]
        self._rows = rows[places].tolist()
        draws = draws_of(plan, rows[places])
        index = torch.tensor(places).to(logits.device)
        own = logits.index_select(0, index)
        self._scored = [place for place, draw in enumerate(draws) if draw.params.logprobs is not None]
        scored = torch.tensor(self._scored, dtype=torch.int64).to(logits.device)
        raw = own.index_select(0, scored)
        shapings = [(place, draw.shaping) for place, draw in enumerate(draws) if draw.shaping is not None]
        self._failed = shape(own, shapings)
        ban(own, early_stops(draws))
        self._empty = (own.amax(-1) == -torch.inf).to("cpu", non_blocking=True)
        chosen = torch.empty(len(places), dtype=torch.int64, device=logits.device)
        sample(own, choices.select(index), Workspace.empty(len(own), own.shape[1], own.device), chosen)
        tokens.index_copy_(0, index, chosen)
        tops = [draws[place].params.logprobs or 0 for place in self._scored]
        self._scores = Scores(raw, chosen.index_select(0, scored), tops) if tops else None

    def refused(self) -> dict[int, str]:
        """The plan's rows for which their requests leave no token, and why. Once the step has ended."""
        empty = [row for row, none in zip(self._rows, self._empty.tolist(), strict=True) if none]
        return dict.fromkeys(empty, NO_TOKEN) | {self._rows[place]: why for place, why in self._failed.items()}

    def logprobs(self, num_rows: int) -> tuple[TokenLogprobs | None, ...] | None:
        """[R] as in `StepOutput`. Once the step has ended."""
        if self._scores is None:
            return None
        found: list[TokenLogprobs | None] = [None] * num_rows
        for place, scores in zip(self._scored, self._scores.read(), strict=True):
            found[self._rows[place]] = scores
        return tuple(found)


class KeptStates:
    """Hidden states that one runner's steps keep.

        launched kernel by kernel    into a tensor of the step's own
        captured                     into one tensor, which the next step overwrites: graph N | copy | graph N + 1 ...

    What graphs keep is fixed when they are captured: what this worker's own proposer needs. A step that keeps anything
    else, as one whose prompts go to a worker with a proposer, runs without graphs.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype` of the model."""
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._keep: tuple[int, ...] = ()
        self._captured: Tensor | None = None
        """Hidden states that graphs write, [T, layers, hidden]."""

    def capture(self, keep: tuple[int, ...], tokens: int) -> None:
        """Makes the tensor for graphs, which keep these layers from now on, of so many tokens at most."""
        self._keep, self._captured = keep, self.make(tokens, keep)

    def suits(self, keep: tuple[int, ...]) -> bool:
        """Whether the graphs can be used for a plan that keeps these layers."""
        return not keep or keep == self._keep

    def taps(self, tokens: int) -> Taps:
        """Taps of a graph of so many tokens."""
        return NO_TAPS if self._captured is None else taps_into(self._captured[:tokens], self._keep)

    def make(self, tokens: int, keep: tuple[int, ...]) -> Tensor | None:
        """A tensor [tokens, layers, hidden] for a step without graphs; None if it keeps nothing."""
        shape = tokens, len(keep), self._hidden_size
        return torch.empty(shape, dtype=self._dtype, device=self._device) if keep else None

    def copy(self, plan: StepPlan) -> Tensor | None:
        """Queues a copy of what the replayed step keeps; None if that is nothing."""
        return self._captured[: plan.num_tokens].clone() if plan.keep and self._captured is not None else None


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
