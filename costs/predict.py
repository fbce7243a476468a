"""Seconds that a newcomer takes on a worker, and the seconds by which it delays the sequences that decode there.

A worker computes prompts in the order in which they come, in chunks, and each step computes a token for every sequence
that decodes too. The time of a step with both is bounded if the worker has such a bound (`WorkerCosts.step_seconds`):

    steps      | decodes | decodes + chunk | decodes + chunk | decodes |
    newcomer   |<- wait: prompts before it ->|<-- prefill -->|<- tpot ->
                                             first token ----^

Pure functions of what the worker reports; `Pace` keeps what doesn't depend on the newcomer.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvrelay.costs.handoff import KvBytes, LinkCost
from kvrelay.costs.step import StepWork
from kvrelay.costs.worker import WorkerCosts

LEAST_CHUNK = 16
"""Tokens of a prompt that a step is thought to compute however long its decodes take."""


class Predicted(NamedTuple):
    """Latencies that a request is predicted to have, in seconds."""

    ttft: float
    """From its placement to its first token."""
    tpot: float
    """Mean between two of its tokens, with the exposed part of a hand-off."""


Way = Literal["pair", "in place", "co-located", "first token"]
"""How a request is served: by a prefill worker that hands over to a decode worker; by a decode worker that computes the
prompt too; by a co-located worker; by a prefill worker, as the first token is the last."""


class Decision(NamedTuple):
    """The reason for the choice of workers."""

    way: Way
    predicted: Predicted | None = None
    """Latencies; None if the workers' costs don't decide, or aren't known."""
    exposed: float = 0.0
    """Predicted seconds of the hand-off between the first token and the decode worker's first step."""
    runner_up: str = ""
    """The second best choice in words, e.g. `pair prefill-0 decode-1`; empty if there was none."""


class WorkerLoad(NamedTuple):
    """The work that a worker has already."""

    prompt_tokens: int = 0
    """Tokens of prompts that it has yet to compute."""
    prompts: int = 0
    """Prompts that these belong to."""
    sequences: int = 0
    """Sequences that decode there, or soon will."""
    context_tokens: int = 0
    """Tokens of their contexts, all together."""
    passed_tokens: int = 0
    """Tokens of further prompts, which a newcomer passes as soon as the step that runs has ended."""


class Prefill(NamedTuple):
    """Computing of a newcomer's prompt."""

    seconds: float
    """From its first step's begin to its last one's end."""
    steps: int
    last: float
    """Tokens of the last chunk."""
    delay: float
    """Seconds by which each sequence that decodes there gets its next tokens later."""


@dataclass(frozen=True, slots=True)
class Pace:
    """A worker's speed with what it has to do already. Made once for each report; read by each placement."""

    costs: WorkerCosts
    load: WorkerLoad
    decodes: float
    """Seconds that the decodes add to each step that has a chunk."""
    step: float
    """Seconds of a step of decodes alone, as they are now; 0 without any."""
    wait: float
    """Seconds until the first chunk of a newcomer's prompt is computed."""
    most: int
    """Tokens of a prompt that a step computes beside the decodes, if its time isn't bounded."""
    bounded: bool
    """Whether it is."""

    @classmethod
    def of(cls, costs: WorkerCosts, load: WorkerLoad) -> "Pace":
        """The pace of a worker with these costs and this load."""
        step = costs.step
        alone = step.seconds(StepWork(sequences=load.sequences, context_tokens=load.context_tokens))
        decodes = alone - step.fixed
        most, bounded = max(1, costs.chunk - load.sequences), load.sequences > 0 and costs.step_seconds > 0.0
        pace = cls(costs, load, decodes, alone if load.sequences else 0.0, 0.0, most, bounded)
        if not load.prompt_tokens:
            # The step that runs is half done on average.
            wait = pace.step / 2
        else:
            each = load.prompt_tokens / max(1, load.prompts)
            tokens, steps = load.prompt_tokens, load.prompt_tokens / pace.chunk(each / 2)
            work = step.token * tokens + step.pair * tokens * (each + 1) / 2
            wait = steps * decodes + max(steps * step.fixed, steps * step.prompt_fixed + work)
        if load.passed_tokens:
            chunk = min(load.passed_tokens, pace.chunk(0))
            wait += (step.prefill(chunk, 0, chunk) + decodes) / 2
        return cls(costs, load, decodes, pace.step, wait, most, bounded)

    def chunk(self, start: float) -> int:
        """Tokens of a prompt that a step computes after the first `start` of them, beside the decodes."""
        if not self.bounded:
            return self.most
        costs, load = self.costs, self.load
        others = StepWork(sequences=load.sequences, context_tokens=load.context_tokens)
        return min(self.most, max(LEAST_CHUNK, costs.step.tokens_within(costs.step_seconds, int(start), others)))

    def prefill(self, tokens: float, cached: float) -> Prefill:
        """The computing of a prompt's `tokens` after `cached` ones whose KV is there."""
        tokens, step = tokens if tokens > 1.0 else 1.0, self.costs.step
        chunk = self.chunk(cached + tokens / 2) if self.bounded else self.most
        steps = math.ceil(tokens / chunk)
        # As `StepCost.prefill`, without its calls: each placement predicts several prompts.
        fixed = steps * step.fixed
        alone = steps * step.prompt_fixed + step.token * tokens + step.pair * tokens * (cached + (tokens + 1) / 2)
        if alone < fixed:
            alone = fixed
        delay = alone - fixed if self.load.sequences else 0.0
        return Prefill(steps * self.decodes + alone, steps, tokens - (steps - 1) * chunk, delay)

    def tpot(self, context: float) -> float:
        """Mean seconds between two tokens of a newcomer of `context` tokens: of a step of decodes with it among them,
        and of what has lengthened the latest steps."""
        return self.costs.step.fixed + self.decodes + self.added(context) + self.costs.extra

    def added(self, context: float) -> float:
        """Seconds that a newcomer of `context` tokens adds to each step of decodes."""
        return self.costs.step.sequence + self.costs.step.context * context


def exposed_seconds(kv: KvBytes, link: LinkCost, prompt: int, have: float, prefill: Prefill) -> float:
    """Seconds of a hand-off between the first token and the decode worker's first step.

    Args:
        prompt: tokens of the prompt.
        have: of them, those that the decode worker has.
        prefill: the computing of the prompt, on the worker that sends.
    """
    seconds, steps, last, _ = prefill
    have = have if have < prompt else prompt
    begun = prompt - last
    total = kv.between(have, prompt)
    exposed = kv.between(begun, prompt) if begun > have else total
    return link.exposed(total, exposed, seconds * (steps - 1) / steps)
