"""Decides which guesses a step checks, and learns from what became of them.

A proposer whose guesses cost next to nothing, a look-up, is asked first, and then as many of its guesses are checked as
pay (`choice.py`). A draft model takes time for each guess, so it is decided first how many it should make. Both end for
a while where none pays, and where guesses have lost what they may lose (`allowance.py`).
"""

from collections import deque
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NamedTuple

from kvrelay.engine.config import SpeculationConfig
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.runner.base import Runner
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.shaping import Shaping
from kvrelay.engine.speculate import choice
from kvrelay.engine.speculate.allowance import Allowance
from kvrelay.engine.speculate.base import NO_GUESS, WARM_UP, Computed, Guess, Proposer, Want
from kvrelay.engine.speculate.costs import Choosing, Clock, StepCosts, choosing_of
from kvrelay.engine.speculate.shares import Shares
from kvrelay.engine.states import StatesLayout

if TYPE_CHECKING:
    from torch import Tensor

FOLLOW = 0.1
"""Weight of one chain in the time that guesses take."""
DECIDED_STEPS = 4
"""How long a decision holds how many guesses a draft model makes, in steps."""
MEASURE_AFTER = 32
"""Steps with drafts after which there are two without: the second one shows what a step costs without."""
SHORTEST_REST = 8
LONGEST_REST = 64
"""How long a decision to make no guesses holds, in steps: twice as long each time that it is made again."""
REPEATS = 5
BOUND = 2.0
"""What takes so many times longer than expected says more about the machine than about itself."""
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


class Flight(NamedTuple):
    """What was guessed for a plan that isn't committed yet."""

    kinds: dict[int, int]
    """By handle: the kind of its guess, of `Shares`."""
    seconds: float
    """That it took to have or to choose guesses."""
    invested: float
    """Seconds that were for guesses to come: a draft model read tokens that it hadn't computed."""


RESTING = Flight({}, 0.0, 0.0)
"""A rest is to cost nothing, so its steps aren't measured."""
NO_GUESSES = Flight({}, 0.0, 0.0)
"""The last step of a rest shows what a step costs without guesses."""


class Speculation:
    """Guesses for the sequences of one engine. Not thread-safe: the scheduler's."""

    def __init__(self, config: SpeculationConfig, proposer: Proposer, most_rows: int, clock: Clock) -> None:
        """
        Args:
            most_rows: of a step.
            clock: seconds, by which steps and guesses are measured.
        """
        self.counts = Counts()
        self._clock = clock
        self._costs = StepCosts(most_rows, clock)
        self._allowances: dict[tuple[int, Choosing], Allowance] = {}
        """By what decides whether guesses pay: about how many sequences there are, and how their tokens are chosen.
        What single streams have won isn't for large batches to lose."""
        self._allowance = Allowance()
        """That of the steps that run."""
        self._shares = Shares(len(Choosing) * proposer.kinds)
        self._config = config
        self._proposer = proposer
        self._flights: deque[Flight] = deque()
        """Of the plans in flight, the newest last."""
        self._began: float | None = None
        """When the oldest plan in flight began to be computed; None if that isn't known."""
        self._eager: set[int] = set()
        """Handles of the sequences that should get drafts in their next step."""
        self._rests = 0
        """Steps to come without guesses."""
        self._next_rest = SHORTEST_REST
        self._unmeasured = 0
        """Steps with drafts since one without was measured."""
        self._cold = True
        """Whether the step before had a part of a prompt: then little that the next one needs is in the caches."""
        self._guessed: set[int] = set()
        """Of a proposer with passes: handles that it made guesses for in the step before."""
        self._depths: dict[int, int] = {}
        self._valid = 0
        """Of a proposer with passes: by handle, how many guesses it makes, and for how many steps more."""
        self._guessing = choice.FREE
        """What guesses of a proposer with passes take."""
        self._observed = 0.0
        """Seconds that learning from the step before took."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose inputs every step should keep, as `Proposer.layers`."""
        return self._proposer.layers

    def states(self, runner: Runner) -> StatesLayout | None:
        """The hidden states of a prompt that it guesses from, as `runner` yields them; None if it needs none."""
        if not self._proposer.layers or runner.states_shape is None:
            return None
        width = runner.states_shape.hidden_size
        return StatesLayout(self._proposer.layers, width, runner.spec.dtype, self._proposer.last_state)

    def take_states(self, sequence: Sequence, states: "Tensor") -> None:
        """A sequence has come whose KV another worker computed, and with it hidden states of its last tokens.

        Args:
            states: [n, layers, hidden] as `states` says.
        """
        start = sequence.num_computed - len(states)
        self._proposer.observe([Computed(sequence.handle, sequence.tokens, start, states)])

    def measure(self, runner: Runner) -> None:
        """Measures what steps cost. Overwrites KV blocks: call it before there are sequences."""
        self._proposer.warm_up()
        self._costs.measure(runner, self.layers)
        if self._proposer.passes:
            one, most = (
                min([self._seconds([WARM_UP._replace(most=count)]) for _ in range(REPEATS)])
                for count in (1, WARM_UP.most)
            )
            each = max(0.0, most - one) / (WARM_UP.most - 1)
            self._guessing = choice.Guessing(max(0.0, one - each), each)
            self._proposer.forget(WARM_UP.handle)

    def holds_back(self, sequence: Sequence) -> bool:
        """Whether a sequence shouldn't compute a token that isn't known yet: drafts can only follow a known one."""
        return sequence.handle in self._eager or sequence.expected % ASK_AGAIN == 0

    def rests(self) -> bool:
        """Whether the next plan has no drafts, by a decision that was made before; otherwise call `propose` for it."""
        if not self._rests:
            return False
        self._rests -= 1
        if self._rests:
            self._flights.append(RESTING)
            self._allowance.settle(0.0)
        else:
            if not self._flights:
                self._began = self._clock()
            self._flights.append(NO_GUESSES)
        return True

    def propose(self, sequences: Items[Sequence], room: int) -> list[Chain]:
        """The drafts of each sequence that computes its last token; [] if none has any.

        Args:
            room: rows for drafts.
        """
        if not sequences:
            self._flights.append(RESTING)
            return []
        began = self._clock()
        if not self._flights:
            self._began = began - self._observed
        choosing = [Choosing.of(sequence.request.sampling) for sequence in sequences]
        self._allowance = self._allowances.setdefault((len(sequences).bit_length(), max(choosing)), Allowance())
        wants = self._wants(sequences, room)
        if not wants:
            self._flights.append(Flight({}, self._clock() - began + self._observed, 0.0))
            return []
        guesses = self._proposer.propose(wants)
        found = {want.handle: guess for want, guess in zip(wants, guesses, strict=True) if guess.tokens}
        invested = self._follow(found, len(wants), self._clock() - began) if self._proposer.passes else 0.0
        if found and self._config.adaptive and not self._proposer.passes:
            found = self._chosen(sequences, found, room)
        # Without a guess, nothing is lost by running ahead.
        self._eager.difference_update([sequence.handle for sequence in sequences])
        self._eager.update(found)
        chains = [_chain(sequence, found.get(sequence.handle)) for sequence in sequences] if found else []
        kinds = {
            sequence.handle: _kind(found[sequence.handle].kind, chosen)
            for sequence, chosen in zip(sequences, choosing, strict=True)
            if sequence.handle in found
        }
        self._flights.append(Flight(kinds, self._clock() - began + self._observed, invested))
        return chains

    def settle(
        self, plan: StepPlan, kept: Items[bool], sequences: Items[Sequence], states: "Tensor | None" = None
    ) -> None:
        """A step has ended.

        Args:
            kept: [R] as `verify.kept_rows`.
            sequences: [R] of the rows.
            states: as `StepOutput.states`; the proposer's layers come first.
        """
        flight = self._flights.popleft()
        if flight is RESTING:
            if states is not None and self.layers:
                self._observe(plan, kept, sequences, states)
            self._cold, self._observed = plan.kind != "decode", 0.0
            self._began = self._clock() if self._flights and self._flights[0] is not RESTING else None
            return
        ended = self._clock()
        read = states is not None and bool(self.layers) and self._observe(plan, kept, sequences, states)
        self._account(plan, kept, sequences, flight, ended)
        # What a prompt takes to be read is spent whether guesses pay or not, so it isn't held against them.
        self._observed = 0.0 if read else self._clock() - ended

    def _account(
        self, plan: StepPlan, kept: Items[bool], sequences: Items[Sequence], flight: Flight, ended: float
    ) -> None:
        """Learns from a step that ended at `ended`; other arguments as for `settle`."""
        began, self._began = self._began, ended
        drafts = None if plan.drafts is None else plan.drafts.tolist()
        if drafts is not None:
            self._learn(drafts, kept, sequences, flight.kinds)
        cold, self._cold = self._cold, plan.kind != "decode"
        if self._cold or began is None:
            return
        seconds = ended - began
        kinds = choosing_of(plan.sampling)
        starts = plan.starts.tolist()
        context = own_context = float(sum(starts))
        if drafts is not None:
            own_context = float(sum([start for start, draft in zip(starts, drafts, strict=True) if not draft]))
            context = own_context + self._costs.shared * (context - own_context)
        own = max(seconds - flight.seconds, seconds / 10)
        if not cold:
            self._costs.observe(plan.num_rows, context, kinds, own, drafted=drafts is not None)
        if flight.invested:
            self._allowance.invest(flight.invested / own)
        guessing = flight.seconds - flight.invested
        if drafts is None:
            self._unmeasured = 0
            self._allowance.settle(-guessing / own)
            return
        self._unmeasured += 1
        if self._unmeasured == MEASURE_AFTER and self._config.adaptive:
            self._rests = 2
        count, tokens = plan.num_sequences, sum(kept)
        others = [row for row, draft in enumerate(drafts) if not draft]
        alone = self._costs.step(count, own_context, [kinds[row] for row in others], drafted=False)
        expected = self._costs.step(plan.num_rows, context, kinds, drafted=True) + guessing
        self._allowance.settle(tokens / count - min(seconds - flight.invested, BOUND * expected) / alone)
        self.counts.steps += 1
        self.counts.tokens += tokens
        self.counts.seconds += seconds
        self.counts.plain_seconds += alone * tokens / count

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._shares.forget(sequence.handle)
        self._eager.discard(sequence.handle)
        self._depths.pop(sequence.handle, None)
        self._proposer.forget(sequence.handle)
        if self._allowance.open:
            # What comes in its place may be worth guesses.
            self._rests, self._next_rest = 0, SHORTEST_REST

    def _wants(self, sequences: Items[Sequence], room: int) -> list[Want]:
        """What to ask the proposer for."""
        most, depths = self._config.max_tokens, self._depths
        if self._config.adaptive:
            if not self._allowance.open:
                self._next_rest = LONGEST_REST
                return self._rest(sequences)
            if self._proposer.passes and not self._decided(sequences, room):
                return self._rest(sequences)
        wants = []
        for sequence in sequences:
            left = sequence.request.most_tokens - sequence.num_tokens - 1
            count = min(depths.get(sequence.handle, most), room, left)
            if count > 0:
                wants.append(Want(sequence.handle, sequence.request, sequence.tokens, count))
                # What a look-up finds is chosen from.
                room -= 0 if self._config.adaptive and not self._proposer.passes else count
        return wants

    def _rest(self, sequences: Items[Sequence]) -> list[Want]:
        """No guesses for a while."""
        handles = [sequence.handle for sequence in sequences]
        self._rests = self._next_rest - 1
        self._shares.rest(handles, self._next_rest)
        self._next_rest = min(2 * self._next_rest, LONGEST_REST)
        self._guessed.clear()
        self._eager.difference_update(handles)
        return []

    def _decided(self, sequences: Items[Sequence], room: int) -> bool:
        """Whether a proposer with passes should make guesses; `_depths` says how many."""
        self._valid -= 1
        if self._valid < 0 or any(sequence.handle not in self._depths for sequence in sequences):
            self._valid = DECIDED_STEPS - 1
            candidates = [self._candidate(sequence, 0, self._config.max_tokens) for sequence in sequences]
            found = choice.counts(candidates, self._costs, room, self._guessing)
            self._depths = {sequence.handle: count for sequence, count in zip(sequences, found, strict=True)}
        return any(self._depths[sequence.handle] for sequence in sequences)

    def _chosen(self, sequences: Items[Sequence], found: dict[int, Guess], room: int) -> dict[int, Guess]:
        """As many of the guesses as pay; by handle."""
        guesses = [found.get(sequence.handle, NO_GUESS) for sequence in sequences]
        candidates = [
            self._candidate(sequence, guess.kind, len(guess.tokens))
            for sequence, guess in zip(sequences, guesses, strict=True)
        ]
        chosen = {
            sequence.handle: guess._replace(tokens=guess.tokens[:count])
            for sequence, guess, count in zip(
                sequences, guesses, choice.counts(candidates, self._costs, room, choice.FREE), strict=True
            )
            if count
        }
        if chosen:
            self._next_rest = SHORTEST_REST
        else:
            self._rest(sequences)
        return chosen

    def _candidate(self, sequence: Sequence, kind: int, count: int) -> choice.Candidate:
        choosing = Choosing.of(sequence.request.sampling)
        share = self._shares.expected(sequence.handle, _kind(kind, choosing))
        return choice.Candidate(share, count, sequence.num_tokens, choosing)

    def _follow(self, found: dict[int, Guess], wanted: int, seconds: float) -> float:
        """A proposer with passes has taken `seconds` for the guesses that were found, of as many as were wanted.

        Returns:
            Seconds that were for guesses to come.
        """
        steady = len(found) == wanted and found.keys() <= self._guessed
        self._guessed = set(found)
        self._next_rest = SHORTEST_REST
        if not found:
            return seconds
        expected = self._guessing.seconds(max([len(guess.tokens) for guess in found.values()]))
        if not steady:
            # It has read what was new to it, so the time says nothing of a pass.
            return max(0.0, seconds - expected)
        factor = 1 + FOLLOW * (min(seconds / expected, BOUND) - 1) if expected else 1.0
        self._guessing = choice.Guessing(self._guessing.start * factor, self._guessing.each * factor)
        return 0.0

    def _seconds(self, wants: list[Want]) -> float:
        """That guesses take."""
        began = self._clock()
        self._proposer.propose(wants)
        return self._clock() - began

    def _observe(self, plan: StepPlan, kept: Items[bool], sequences: Items[Sequence], states: "Tensor") -> bool:
        """Hands the hidden states of the tokens that were kept to the proposer; whether that has read prompts."""
        computed, end = [], 0
        places = zip(sequences, kept, plan.starts.tolist(), plan.lengths.tolist(), strict=True)
        for sequence, has, start, length in places:
            end += length
            if has and not (sequence.ended or sequence.handoff):
                states_here = states[end - length : end, : len(self.layers)]
                computed.append(Computed(sequence.handle, sequence.tokens, start, states_here))
        return self._proposer.observe(computed)

    def _learn(self, drafts: Items[bool], kept: Items[bool], sequences: Items[Sequence], kinds: dict[int, int]) -> None:
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
                self._shares.learn(sequence.handle, kinds[sequence.handle], right)
                if sequence.ended:
                    self._shares.forget(sequence.handle)


def _kind(guess: int, choosing: Choosing) -> int:
    """The kind of a share, by `Guess.kind` and how the tokens are chosen that guesses are compared with."""
    return len(Choosing) * guess + choosing


def _chain(sequence: Sequence, guess: Guess | None) -> Chain:
    """As many of the guessed tokens as the request's constraint allows."""
    if guess is None:
        return NO_CHAIN
    drafts = guess.tokens
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
