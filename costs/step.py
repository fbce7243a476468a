"""Seconds of an engine's steps.

A step computes tokens of prompts (chunks), and one token for each sequence that decodes:

    without a chunk    fixed + sequence * sequences + context * context_tokens + guess * guesses
    with chunks        fixed' + token * prompt_tokens + pair * prompt_pairs   , at least the `fixed` above,
                       + sequence * sequences + context * context_tokens + guess * guesses

Each worker fits its own coefficients to the steps that it runs, and reports them.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from kvrelay.costs.fit import ERROR_SAMPLES, STRATUM_SAMPLES, LinearFit

GATHERED = 8
"""Number of steps of about the same work that become one sample."""
INTERVALS = 2048
"""Number of the latest steps with decodes whose mean `StepFit.extra` is, about: half a minute of a busy worker."""
LONGEST_EXTRA = 1.0
"""Seconds beyond which an interval was a pause of the process, or its sequences had been put off."""
PAUSE = 3.0
"""Multiple of the others' mean time from which a step is left out of such a sample."""


class StepWork(NamedTuple):
    """Work of one step, or means of several steps."""

    prompt_tokens: float = 0
    """Tokens of chunks of prompts."""
    prompt_pairs: float = 0.0
    """Pairs of a token of these chunks and a token at or before it, which attention visits (`pairs`)."""
    sequences: float = 0
    """Sequences that decode a token."""
    context_tokens: float = 0
    """Tokens of their contexts, all together."""
    guesses: float = 0
    """Guessed tokens that are verified."""


def pairs(start: float, tokens: float) -> float:
    """Pairs that attention visits for `tokens` tokens after the first `start` of a prompt."""
    return tokens * (start + (tokens + 1) / 2)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients of a worker's steps, in seconds; none negative."""

    fixed: float = 0.0
    """Any step."""
    sequence: float = 0.0
    context: float = 0.0
    """One token of context of a sequence that decodes."""
    guess: float = 0.0
    prompt_fixed: float = 0.0
    """A step with a chunk; it costs at least `fixed`."""
    token: float = 0.0
    pair: float = 0.0
    largest: float = field(default=2.0**31, kw_only=True, compare=False)
    """Tokens of the largest chunk that the measured ones allow to estimate: up to twice as many as the largest of them.
    Known to the worker alone."""

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step with this work."""
        fixed = self.fixed
        if work.prompt_tokens:
            prompts = self.prompt_fixed + self.token * work.prompt_tokens + self.pair * work.prompt_pairs
            fixed = max(fixed, prompts)
        return fixed + self.sequence * work.sequences + self.context * work.context_tokens + self.guess * work.guesses

    def prefill(self, tokens: float, cached: float, chunk: float) -> float:
        """Seconds of a prompt that is alone.

        Args:
            tokens: tokens to compute.
            cached: tokens before them, whose KV is there.
            chunk: tokens of a full step.
        """
        if tokens <= 0:
            return 0.0
        steps = math.ceil(tokens / max(1.0, chunk))
        work = self.token * tokens + self.pair * pairs(cached, tokens)
        return max(steps * self.fixed, steps * self.prompt_fixed + work)

    def tokens_within(self, seconds: float, start: int, others: StepWork = StepWork()) -> int:  # noqa: B008  # frozen
        """Largest chunk after the first `start` tokens of a prompt with which a step takes at most `seconds`, and has
        at most `largest` tokens of prompts.

        Args:
            others: work that the step has already.

        Returns:
            0 if not even one token fits.
        """
        most = max(0.0, self.largest - others.prompt_tokens)
        left = seconds - self.seconds(others)
        if not others.prompt_tokens:
            left = seconds - (self.seconds(others) - self.fixed) - self.prompt_fixed
            if seconds < self.seconds(others):
                return 0
        # pair / 2 * n^2 + (token + pair * (start + 1/2)) * n = left
        slope, half = self.token + self.pair * (start + 0.5), self.pair / 2
        if left <= 0.0:
            return 0
        if half * left <= 1e-12 * slope * slope:
            return int(min(most, left / slope)) if slope > 0.0 else int(most)
        root = (math.sqrt(slope * slope + 4 * half * left) - slope) / (2 * half)
        return int(min(most, root))


class StepFit:
    """Fits a StepCost to the steps of one engine. Not thread-safe.

    Solving takes longer than a short step, so the first steps of a size are taken one by one, and later ones GATHERED
    at a time, as one sample of their means.
    """

    def __init__(self) -> None:
        self._decode, self._prompt = LinearFit(4), LinearFit(3)
        self._seen: Counter[int] = Counter()
        """Number of steps of each stratum."""
        self._gathered: defaultdict[int, list[tuple[StepWork, float]]] = defaultdict(list)
        """Steps of each stratum that aren't in the fit yet."""
        self._cost: StepCost | None = None
        self._stale = False
        """Whether the fit has samples that `_cost` may not know."""
        self.decode_error = 0.0
        """Mean relative error of predictions of the latest steps without chunks."""
        self.prompt_error = 0.0
        """Mean relative error of predictions of the latest steps with chunks."""
        self._predicted_decodes = self._predicted_prompts = 0
        self.extra = 0.0
        """Seconds from one token of a sequence to its next one beyond those of the decodes in the step: chunks of
        prompts in it, and the time between two steps. A mean over the latest steps with decodes."""
        self._intervals = 0

    def add(self, work: StepWork, seconds: float) -> None:
        """Takes a step that took `seconds`; one that took no time is left out."""
        if seconds <= 0.0:
            return
        if (cost := self.cost()) is not None:
            error = min(1.0, abs(cost.seconds(work) - seconds) / seconds)
            if work.prompt_tokens:
                self._predicted_prompts += 1
                self.prompt_error += (error - self.prompt_error) / min(self._predicted_prompts, ERROR_SAMPLES)
            else:
                self._predicted_decodes += 1
                self.decode_error += (error - self.decode_error) / min(self._predicted_decodes, ERROR_SAMPLES)
        each = int(work.context_tokens // max(1, work.sequences))
        stratum = 64 * int(work.sequences).bit_length() + each.bit_length()
        if work.prompt_tokens:
            # Long prompts are told from short ones with chunks of the same size.
            depth = int(work.prompt_pairs / work.prompt_tokens).bit_length()
            stratum = -64 * int(work.prompt_tokens).bit_length() - depth
        self._seen[stratum] += 1
        if self._seen[stratum] <= STRATUM_SAMPLES:
            self._take(work, seconds, stratum, 1)
            return
        gathered = self._gathered[stratum]
        gathered.append((work, seconds))
        if len(gathered) == GATHERED:
            del self._gathered[stratum]
            self._take_mean(gathered, stratum)

    def add_interval(self, work: StepWork, seconds: float) -> None:
        """Takes the time from the end of the step before a step with this work to its own end: the time between two
        tokens of the sequences that decode in it."""
        if work.sequences and (cost := self.cost()) is not None:
            extra = min(LONGEST_EXTRA, seconds - cost.seconds(work._replace(prompt_tokens=0, prompt_pairs=0.0)))
            self._intervals += 1
            self.extra += (extra - self.extra) / min(self._intervals, INTERVALS)

    def _take_mean(self, steps: list[tuple[StepWork, float]], stratum: int) -> None:
        """Takes steps of one stratum. One that took far longer than the others was a pause of the process."""
        slowest = max(steps, key=itemgetter(1))
        others = (sum([seconds for _, seconds in steps]) - slowest[1]) / (len(steps) - 1)
        if slowest[1] > PAUSE * others:
            steps.remove(slowest)
        count = len(steps)
        means = [sum(column) / count for column in zip(*[work for work, _ in steps], strict=True)]
        self._take(StepWork(*means), sum([seconds for _, seconds in steps]) / count, stratum, count)

    def _take(self, work: StepWork, seconds: float, stratum: int, count: int) -> None:
        self._stale = True
        if not work.prompt_tokens:
            decodes = 1.0, float(work.sequences), float(work.context_tokens), float(work.guesses)
            self._decode.add(decodes, seconds, stratum, count=count)
            return
        others = 0.0
        if work.sequences and (known := self._decode.coefficients) is not None:
            _, sequence, context, guess = known
            others = sequence * work.sequences + context * work.context_tokens + guess * work.guesses
        # What other sequences are thought to take is never nearly all of a step with a chunk.
        rest = max(seconds - others, 0.1 * seconds)
        features = 1.0, float(work.prompt_tokens), work.prompt_pairs
        self._prompt.add(features, rest, stratum, of=seconds, count=count)

    @property
    def latest(self) -> StepCost | None:
        """The coefficients as `cost` has returned them last, which `add` calls. Any thread may read it."""
        return self._cost

    def cost(self) -> StepCost | None:
        """The coefficients; None before the first step. A kind of steps that wasn't seen yet costs what the other one
        says of it."""
        if self._stale:
            self._stale = False
            self._cost = self._solved()
        return self._cost

    def _solved(self) -> StepCost | None:
        decode, prompt = self._decode.coefficients, self._prompt.coefficients
        # A stratum's number has the bits of the largest number of tokens in it, or of sequences.
        strata = self._prompt.strata or self._decode.strata
        largest = 2 ** max((abs(stratum) // 64 for stratum in strata), default=0)
        if decode is not None:
            return StepCost(*decode, *(prompt if prompt is not None else (decode[0], decode[1], 0.0)), largest=largest)
        if prompt is not None:
            return StepCost(prompt[0], prompt[1], 0.0, prompt[1], *prompt, largest=largest)
        return None

    def state(self) -> dict[str, list[list[float]]]:
        """The fit's sums, to be kept in a file and given to `restore`."""
        return {"decode": self._decode.state(), "prompt": self._prompt.state()}

    def restore(self, state: dict[str, Sequence[Sequence[float]]]) -> None:
        """Begins with the sums of an earlier fit.

        Raises:
            ValueError: they aren't of a StepFit.
        """
        if set(state) != {"decode", "prompt"}:
            raise ValueError(f"state has {sorted(state)}; allowed: decode, prompt")
        self._decode.restore(state["decode"])
        self._prompt.restore(state["prompt"])
        self._cost = self._solved()
