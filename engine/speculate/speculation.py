"""Decides how many guesses of each sequence a step checks, and makes none where guesses don't pay.

A sequence gets one guess more than were kept of its last chain, at least 1 and at most `max_tokens`: the first chain
has `max_tokens`. Whether there are guesses at all is decided for all sequences of a step together, by an `Account` for
each size class of batches: 1 sequence, 2 and 3, 4 to 7, 8 to 15, and so on. With `adaptive: false` every chain has
`max_tokens`, and there are always guesses.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvrelay.engine.config import SpeculationConfig
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.runner.base import Runner
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.shaping import Shaping
from kvrelay.engine.speculate.base import WARM_UP, Computed, Proposer, Want
from kvrelay.engine.states import StatesLayout

if TYPE_CHECKING:
    from torch import Tensor

Clock = Callable[[], float]

SHARE = 0.01
"""Plain steps that guesses may lose for each step of the engine."""
FIRST = 4.0
"""Plain steps that guesses may lose before they have won anything."""
AGAIN = 2.0
"""Balance at which guesses are tried again: enough for several steps, because caches are cold in the first one."""
MOST = 8.0
"""Largest balance: what some texts have won, others may lose."""
PLAIN_STEPS = 4
"""Steps without guesses in a row. The first one finds little in the caches, and isn't measured."""
PLAIN_EVERY = 64
"""Steps with guesses after which there are PLAIN_STEPS without."""
FOLLOW = 0.25
"""Weight of one plain step in the average of their seconds."""
WORST = 4.0
"""Plain steps that one step loses at most: what takes longer is a pause of the machine."""
PARTS = 64
"""Steps over which a loss of more than one plain step is spread: a draft model's reading of a prompt pays off over the
tokens that follow."""
ASK_AGAIN = 32
"""Tokens after which a sequence without guesses, which runs ahead of its commits, is held back to be asked again."""


class Chain(NamedTuple):
    """The drafts that a step checks of one sequence."""

    drafts: list[int]
    shapings: list[Shaping | None]
    """Shapings of the logits behind each draft; empty if nothing changes them."""

    def first(self, count: int) -> "Chain":
        return Chain(self.drafts[:count], self.shapings[:count])


NO_CHAIN = Chain([], [])


@dataclass(eq=False)
class Counts:
    """Totals of speculation since start."""

    proposed: int = 0
    """Drafts that were checked."""
    accepted: int = 0
    """Drafts that were kept."""
    steps: int = 0
    """Decode steps with drafts."""
    tokens: int = 0
    """Tokens that these steps yielded."""
    seconds: float = 0.0
    """Seconds of those of these steps whose plain time is known, guessing included."""
    plain_seconds: float = 0.0
    """Seconds that the tokens of the same steps would have taken without drafts."""


@dataclass(slots=True, eq=False)
class Account:
    """Budget of guesses in batches of about one size: what they may still lose, in plain steps (steps without guesses).

        a step                                + SHARE
        with guesses, for n sequences         + tokens / n - seconds / seconds of a plain step
        whose look-ups found nothing          - their seconds / seconds of a plain step

    There are guesses until the account is empty, and again once it holds AGAIN: some 200 steps later. Whatever becomes
    of the guesses, n decode steps lose SHARE * n + FIRST + 1 plain steps at most, where a step with guesses takes no
    longer than two plain ones; if it takes c of them, up to 1 + WORST, (MOST + 1) * (c - 2) more.
    """

    balance: float = FIRST
    """Plain steps that may be lost."""
    open: bool = True
    """Whether guesses are allowed."""
    plain: float = 0.0
    """Average seconds per token of plain steps; 0 until one was measured."""
    turn: int = 0
    """Position in a cycle of PLAIN_STEPS measured steps without guesses, followed by PLAIN_EVERY steps with guesses."""
    debt: float = 0.0
    """Plain steps that were lost and aren't in the balance yet."""

    def begin(self) -> bool:
        """Notes that a step is planned; returns whether it may have guesses."""
        place = self.turn
        if place >= PLAIN_STEPS and not (self.open and self.plain):
            return False
        self.turn = (place + 1) % (PLAIN_STEPS + PLAIN_EVERY)
        return place >= PLAIN_STEPS

    def measure(self, seconds: float) -> None:
        """Notes that a plain step took so many seconds per token."""
        self.plain += FOLLOW * (min(seconds, 2 * self.plain) - self.plain) if self.plain else seconds

    def settle(self, gain: float) -> None:
        """Notes that a step has won so many plain steps by guesses; less than 0 if it has lost."""
        at_once = max(-1.0, gain)
        self.debt += at_once - max(-WORST, gain)
        part = self.debt / PARTS
        self.debt -= part
        self.balance = min(MOST, self.balance + SHARE + at_once - part)
        self.open = self.balance >= AGAIN or (self.open and self.balance > 0)


@dataclass(slots=True, eq=False)
class Flight:
    """Facts about a plan that isn't committed yet."""

    account: Account
    began: float
    """Time when it was planned, in seconds of the clock."""
    guessing: float = 0.0
    """Seconds that asking for guesses took."""


class Speculation:
    """Guesses for the sequences of one engine. Not thread-safe: the scheduler's."""

    def __init__(self, config: SpeculationConfig, proposer: Proposer, clock: Clock) -> None:
        """
        Args:
            clock: seconds, by which steps and guesses are measured.
        """
        self.counts = Counts()
        self._clock = clock
        self._config = config
        self.proposer = proposer
        """Finds the guesses."""
        self._accounts: defaultdict[int, Account] = defaultdict(Account)
        """Accounts by size class: the number of binary digits of the number of sequences."""
        self._flights: deque[Flight] = deque()
        """Flights of the plans that aren't committed yet, the newest last."""
        self._ended = 0.0
        """Time when the newest committed plan had ended."""
        self._before: Account | None = None
        """Account of the step before, if that was a plain decode step."""
        self._guesses = True
        """Whether the newest plan may have guesses."""
        self._vain: set[int] = set()
        """Handles of the sequences for which no guess was found when they were asked for last."""
        self._depths: dict[int, int] = {}
        """Lengths of the next chains, by handle."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose inputs every step should keep, as `Proposer.layers`."""
        return self.proposer.layers

    def states(self, runner: Runner) -> StatesLayout | None:
        """The hidden states of a prompt that the proposer guesses from, as `runner` yields them; None if it needs
        none."""
        if not self.proposer.layers or runner.states_shape is None:
            return None
        width = runner.states_shape.hidden_size
        return StatesLayout(self.proposer.layers, width, runner.spec.dtype, self.proposer.last_state)

    def take_states(self, sequence: Sequence, states: "Tensor") -> None:
        """Takes the hidden states of a sequence's last tokens, whose KV another worker computed.

        Args:
            states: [n, layers, hidden] as `states` says.
        """
        start = sequence.num_computed - len(states)
        self.proposer.observe([Computed(sequence.handle, sequence.tokens, start, states)])

    def warm_up(self) -> None:
        """Runs everything that would make the first guesses slow. Call it before there are sequences."""
        self.proposer.warm_up()
        self.proposer.forget(WARM_UP.handle)

    def holds_back(self, sequence: Sequence) -> bool:
        """Whether a sequence shouldn't compute a token that isn't known yet: drafts can only follow a known one."""
        return self._guesses and (sequence.handle not in self._vain or sequence.expected % ASK_AGAIN == 0)

    def begin(self, count: int) -> bool:
        """Notes that a step of so many sequences is planned; returns whether it may have guesses: then call `propose`
        for it.
        """
        account = self._accounts[count.bit_length()]
        self._flights.append(Flight(account, self._clock()))
        self._guesses = account.begin() or not self._config.adaptive
        return self._guesses

    def propose(self, sequences: Items[Sequence], room: int) -> list[Chain]:
        """The drafts of each sequence that computes its last token; [] if none has any.

        Args:
            room: rows for drafts.
        """
        most, wants = self._config.max_tokens, []
        for sequence in sequences:
            left = sequence.request.most_tokens - sequence.num_tokens - 1
            count = min(self._depths.get(sequence.handle, most), room, left)
            if count > 0:
                wants.append(Want(sequence.handle, sequence.request, sequence.tokens, count))
                room -= count
        guesses = self.proposer.propose(wants) if wants else []
        found = {want.handle: guess for want, guess in zip(wants, guesses, strict=True) if guess}
        # Without a guess, nothing is lost by running ahead.
        self._vain.update([sequence.handle for sequence in sequences])
        self._vain.difference_update(found)
        chains = [_chain(sequence, found.get(sequence.handle, [])) for sequence in sequences] if found else []
        flight = self._flights[-1]
        flight.guessing = self._clock() - flight.began
        return chains

    def settle(
        self, plan: StepPlan, kept: Items[bool], sequences: Items[Sequence], states: "Tensor | None" = None
    ) -> None:
        """Takes the result of a step.

        Args:
            kept: [R] as `kept_rows`.
            sequences: [R] of the rows.
            states: as `StepOutput.states`; the proposer's layers come first.
        """
        flight, last, ended = self._flights.popleft(), self._ended, self._clock()
        self._ended = ended
        if states is not None and self.layers:
            read_prompts = self._observe(plan, kept, sequences, states)
            self._ended = self._clock()
            # The time to read a prompt is spent whether guesses pay or not, so it isn't counted against them.
            ended = ended if read_prompts else self._ended
        if plan.drafts is not None:
            self._learn(plan.drafts.tolist(), kept, sequences)
        before, self._before = self._before, None
        if plan.kind == "decode":
            self._account(plan, sum(kept), flight, ended - max(flight.began, last), before)

    def _account(self, plan: StepPlan, tokens: int, flight: Flight, seconds: float, before: Account | None) -> None:
        """Updates the account by the time of a decode step; `before` is the account of the step before, if that was a
        plain one."""
        account, count = flight.account, plan.num_sequences
        alone = account.plain * count
        if plan.drafts is not None:
            self.counts.steps += 1
            self.counts.tokens += tokens
            if alone:
                self.counts.seconds += seconds
                self.counts.plain_seconds += account.plain * tokens
                account.settle(tokens / count - seconds / alone)
        elif flight.guessing:
            account.settle(-flight.guessing / alone if alone else 0.0)
        else:
            self._before = account
            account.settle(0.0)
            if before is account:
                account.measure(seconds / count)

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence, which has ended."""
        self._vain.discard(sequence.handle)
        self._depths.pop(sequence.handle, None)
        self.proposer.forget(sequence.handle)

    def _observe(self, plan: StepPlan, kept: Items[bool], sequences: Items[Sequence], states: "Tensor") -> bool:
        """Hands the hidden states of the tokens that were kept to the proposer; whether that has read prompts."""
        computed, end = [], 0
        places = zip(sequences, kept, plan.starts.tolist(), plan.lengths.tolist(), strict=True)
        for sequence, has, start, length in places:
            end += length
            if has and not (sequence.ended or sequence.handoff):
                states_here = states[end - length : end, : len(self.layers)]
                computed.append(Computed(sequence.handle, sequence.tokens, start, states_here))
        return self.proposer.observe(computed)

    def _learn(self, drafts: Items[bool], kept: Items[bool], sequences: Items[Sequence]) -> None:
        """Counts the drafts, and sets how long the next chains are."""
        accepted: dict[Sequence, int] = {}
        for sequence, draft, has in zip(sequences, drafts, kept, strict=True):
            if draft:
                sequence.proposed += 1
                sequence.accepted += has
                accepted[sequence] = accepted.get(sequence, 0) + has
        self.counts.proposed += sum(drafts)
        self.counts.accepted += sum(accepted.values())
        if self._config.adaptive:
            for sequence, count in accepted.items():
                if not sequence.ended:
                    self._depths[sequence.handle] = min(count + 1, self._config.max_tokens)


def _chain(sequence: Sequence, drafts: list[int]) -> Chain:
    """As many of the guessed tokens as the request's constraint allows."""
    shaping = sequence.shaping
    if shaping is None:
        return Chain(drafts, [])
    shapings: list[Shaping | None] = []
    for draft in drafts:
        following = shaping.after(draft)
        if following is None:
            break
        shapings.append(following)
        shaping = following
    return Chain(drafts[: len(shapings)], shapings)
