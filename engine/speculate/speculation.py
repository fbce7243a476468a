"""Decides how many drafts each sequence gets in a step: as many as pay.

A step of n sequences costs c(n) seconds and yields n tokens. With m more rows for drafts it costs c(n + m), and the
i-th draft of a sequence is kept with probability a**i, if each draft is kept with probability a behind kept ones. So a
step with these drafts yields n + sum a**i tokens. The drafts with the largest a**i are taken, as many as make tokens
per second the most; none, unless that is MARGIN more than without.

`a` is followed for each sequence. While a sequence gets no drafts, its `a` returns slowly to what sequences here have
on average, and that slowly to FRESH: so what changes is noticed, for a few steps in a hundred.
"""

import time
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.config import SpeculationConfig
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import Request
from kvrelay.engine.runner.base import Runner
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.shaping import Shaping
from kvrelay.engine.speculate.base import Proposer, Want
from kvrelay.engine.speculate.costs import StepCosts

Floats = NDArray[np.float64]

FRESH = 0.7
"""Share of drafts that is expected of the first sequence."""
FOLLOW = 0.1
"""Weight of one draft in its sequence's share."""
FOLLOW_ALL = 0.01
"""Weight of one draft in the engine's share."""
RETURN = 0.002
"""How far a share returns in a step without drafts."""
MARGIN = 1.03
"""By how much drafts must be expected to raise tokens per second."""
DECIDED_STEPS = 8
"""How long a decision holds, in steps, if the batch stays the same."""
WARM_UP_PASSES = 4
REPEATS = 5
BOUND = 2.0
"""A pass that takes so many times longer than expected says more about the machine than about the proposer."""
ASK_AGAIN = 32
"""Tokens after which a sequence that runs ahead of its commits, and so can't have drafts, is held back for one step."""


class Chain(NamedTuple):
    """The drafts that a step checks of one sequence."""

    drafts: list[int]
    shapings: list[Shaping | None]
    """What changes the logits behind each draft; empty if nothing does."""

    def first(self, count: int) -> "Chain":
        return Chain(self.drafts[:count], self.shapings[:count])


NO_CHAIN = Chain([], [])


class Counts:
    """What speculation did since start."""

    def __init__(self) -> None:
        self.proposed = 0
        """Drafts that were checked."""
        self.accepted = 0
        """Drafts that were kept."""
        self.steps = 0
        """Decode steps with drafts."""
        self.tokens = 0
        """Tokens that these steps yielded."""
        self.seconds = 0.0
        """Time of these steps, that of guessing included."""
        self.plain_seconds = 0.0
        """Time that their tokens would have taken without drafts, as far as is known."""


class Speculation:
    """Guesses for the sequences of one engine. Not thread-safe: the scheduler's."""

    def __init__(self, config: SpeculationConfig, proposer: Proposer, most_rows: int, lag: int = 0) -> None:
        """
        Args:
            most_rows: of a step.
            lag: of the runner. One that computes a step in `launch` is measured in CPU time of its thread, which other
                processes on the machine don't change.
        """
        self.counts = Counts()
        self._clock = time.monotonic if lag else time.thread_time
        self._costs = StepCosts(most_rows, self._clock)
        self._in_flight = 0
        self._began = 0.0
        """When the oldest plan in flight began to be computed."""
        self._config = config
        self._proposer = proposer
        self._shares: dict[int, float] = {}
        """By handle: the share of drafts that are kept."""
        self._share = FRESH
        self._eager: set[int] = set()
        """Handles of the sequences that should get drafts in their next step."""
        self._handles: list[int] = []
        self._decided: list[int] = []
        self._most = self._valid = 0
        """Of the newest decision: its batch, how many drafts each sequence gets and how many one gets at most, and for
        how many steps more it holds."""
        self._drafting = 0.0
        """Seconds that the proposer took for the newest plan."""
        self._pass_seconds = 0.0
        """That one more draft for the whole batch takes the proposer."""

    def measure(self, runner: Runner) -> None:
        """Measures what steps cost. Overwrites KV blocks: call it before there are sequences."""
        self._proposer.warm_up()
        self._costs.measure(runner)
        if self._proposer.passes:
            want = Want(-1, Request("warm-up", 0, (0,), 1), (0,), WARM_UP_PASSES)
            self._pass_seconds = min([self._timed([want])[1] for _ in range(REPEATS)]) / WARM_UP_PASSES
            self._proposer.forget(want.handle)

    def holds_back(self, sequence: Sequence) -> bool:
        """Whether a sequence shouldn't compute a token that isn't known yet: drafts can only follow a known one."""
        return sequence.handle in self._eager or sequence.expected % ASK_AGAIN == 0

    def propose(self, sequences: Items[Sequence], room: int) -> list[Chain]:
        """The drafts of each sequence that computes its last token; [] if none has any.

        Args:
            room: rows for drafts.
        """
        self._drafting = 0.0
        if not self._in_flight:
            self._began = self._clock()
        self._in_flight += 1
        if not sequences:
            return []
        handles = [sequence.handle for sequence in sequences]
        if handles != self._handles or not self._valid:
            self._decide(sequences, handles, room)
        self._valid -= 1
        if not self._most:
            return []
        wants = []
        for sequence, count in zip(sequences, self._decided, strict=True):
            count = min(count, room, sequence.request.most_tokens - sequence.num_tokens - 1)
            if count > 0:
                wants.append(Want(sequence.handle, sequence.request, sequence.tokens, count))
                room -= count
        if not wants:
            return []
        guesses, self._drafting = self._timed(wants)
        # While one of the prompts is read, the time says nothing of a pass.
        if self._proposer.passes and all(guesses):
            seconds = self._drafting / max(map(len, guesses))
            self._pass_seconds += FOLLOW * (min(seconds, BOUND * self._pass_seconds) - self._pass_seconds)
        found = {want.handle: guess for want, guess in zip(wants, guesses, strict=True) if guess}
        # Without a guess, nothing is lost by running ahead.
        self._eager.difference_update([want.handle for want in wants if want.handle not in found])
        return [_chain(sequence, found.get(sequence.handle, [])) for sequence in sequences] if found else []

    def _timed(self, wants: list[Want]) -> tuple[list[list[int]], float]:
        """The guesses, and the seconds that they took."""
        began = self._clock()
        guesses = self._proposer.propose(wants)
        return guesses, self._clock() - began

    def settle(self, plan: StepPlan, kept: Items[bool], sequences: Items[Sequence]) -> None:
        """A step has ended.

        Args:
            kept: [R] as `verify.kept_rows`.
            sequences: [R] of the rows.
        """
        ended = self._clock()
        seconds, self._began = ended - self._began, ended
        self._in_flight -= 1
        if plan.drafts is not None:
            self._learn(plan.drafts.tolist(), kept, sequences)
            seconds = max(seconds - self._drafting, seconds / 10)
        if plan.kind != "decode":
            return
        self._costs.observe(plan.num_rows, int(plan.starts.sum()), seconds)
        if plan.drafts is not None:
            count = plan.num_sequences
            context = np.array([float(plan.starts[~plan.drafts].sum())])
            alone = float(self._costs.seconds(np.array([float(count)]), context)[0])
            self.counts.steps += 1
            self.counts.tokens += sum(kept)
            self.counts.seconds += seconds + self._drafting
            self.counts.plain_seconds += alone * sum(kept) / count

    def _learn(self, drafts: Items[bool], kept: Items[bool], sequences: Items[Sequence]) -> None:
        counts = self.counts
        for row, draft in enumerate(drafts):
            if not draft:
                continue
            sequence, right = sequences[row], kept[row]
            counts.proposed += 1
            sequence.proposed += 1
            # Behind a draft that isn't kept, nothing can be learned.
            if kept[row - 1]:
                counts.accepted += right
                sequence.accepted += right
                self._share += FOLLOW_ALL * (right - self._share)
                if not sequence.ended:
                    share = self._shares.get(sequence.handle, self._share)
                    self._shares[sequence.handle] = share + FOLLOW * (right - share)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._shares.pop(sequence.handle, None)
        self._eager.discard(sequence.handle)
        self._proposer.forget(sequence.handle)

    def _decide(self, sequences: Items[Sequence], handles: list[int], room: int) -> None:
        """How many drafts each sequence gets in the next steps."""
        most = self._config.max_tokens
        self._handles, self._valid = handles, DECIDED_STEPS
        if not self._config.adaptive:
            self._decided, self._most = [most] * len(handles), most
        else:
            shares = np.array([self._shares.get(handle, self._share) for handle in handles])
            contexts = np.array([sequence.num_tokens for sequence in sequences], np.float64)
            self._decided = self._best(shares, contexts, most, room)
            self._most = max(self._decided)
            self._share += RETURN * RETURN * DECIDED_STEPS * (FRESH - self._share)
            for handle, count in zip(handles, self._decided, strict=True):
                if not count and handle in self._shares:
                    self._shares[handle] += RETURN * DECIDED_STEPS * (self._share - self._shares[handle])
        for handle, count in zip(handles, self._decided, strict=True):
            (self._eager.add if count else self._eager.discard)(handle)

    def _best(self, shares: Floats, contexts: Floats, depth: int, room: int) -> list[int]:
        """As many drafts of each sequence, up to `depth`, and `room` in all, as make tokens per second the most."""
        count = len(shares)
        if room < 1:
            return [0] * count
        # Level by level, so that of equal gains a draft comes after those that it follows.
        gains = (shares ** np.arange(1, depth + 1)[:, None]).reshape(-1)
        order = (-gains).argsort(kind="stable")[:room]
        owners, levels = order % count, order // count + 1
        tokens = np.concatenate(([0.0], gains[order].cumsum())) + count
        rows = np.arange(len(order) + 1, dtype=np.float64) + count
        context = np.concatenate(([0.0], contexts[owners].cumsum())) + contexts.sum()
        drafting = np.concatenate(([0.0], np.maximum.accumulate(levels))) * self._pass_seconds
        rates = tokens / (self._costs.seconds(rows, context) + drafting)
        taken = int(rates.argmax())
        if rates[taken] < MARGIN * rates[0]:
            return [0] * count
        found: list[int] = np.bincount(owners[:taken], minlength=count).tolist()
        return found


def _chain(sequence: Sequence, drafts: list[int]) -> Chain:
    """As many of the drafts as the request's constraint allows."""
    if not drafts:
        return NO_CHAIN
    if sequence.shaping is None:
        return Chain(drafts, [])
    shapings: list[Shaping | None] = []
    last: Shaping | None = sequence.shaping
    for draft in drafts:
        last = last.after(draft) if last is not None else None
        if last is None:
            break
        shapings.append(last)
    return Chain(drafts[: len(shapings)], shapings)
