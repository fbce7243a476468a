"""Which sequences take part in a step, and with how many tokens: first those that decode, then chunks of prompts."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from operator import attrgetter

from kvrelay.costs.step import StepCost, StepWork, pairs
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.scheduling.fairness import StepShares
from kvrelay.engine.scheduling.planning import Row, continues_unseen, has_mask
from kvrelay.engine.sequence import Sequence, Status
from kvrelay.engine.speculate.speculation import Speculation

_turn = attrgetter("turn")


def ready_to_decode(running: List[Sequence], stages: int, speculation: Speculation | None) -> list[Sequence]:
    """The running sequences that lack one token and can compute it now, oldest first.

    The first of several pipeline stages can't compute a token that isn't known yet. So each plan in flight has its
    part of the sequences, and those that were planned least recently come first.
    """
    ready = [
        sequence
        for sequence in running
        if sequence.expected - sequence.reach == 1
        and (not sequence.yields or (stages == 1 and continues_unseen(sequence, sequence.expected, speculation)))
        and has_mask(sequence)
    ]
    if stages == 1:
        return ready
    ready.sort(key=_turn)
    return ready[: -(-sum([sequence.generated > 0 for sequence in running]) // stages) or 1]


class StepFilling:
    """The rows of one step while they are handed out."""

    def __init__(
        self,
        config: EngineConfig,
        running: List[Sequence],
        most_rows: int,
        cost: StepCost | None,
        shares: Mapping[int, StepShares | None],
        extend: Callable[[Sequence, int], bool],
    ) -> None:
        """
        Args:
            running: in order (`Sequence.order`); shrinks when `extend` preempts one.
            cost: of this engine's steps; None before it is known.
            shares: by rank, those of the holders of its running sequences; None if there is one holder.
            extend: takes blocks for so many tokens of a running sequence, from another one if none is free; False if
                the sequence must wait.
        """
        self.rows: list[Row] = []
        self.budget = config.max_batch_tokens
        """Tokens that may still be handed out."""
        only = next(iter(shares.values())) if len(shares) == 1 else None
        if only is not None:  # with several ranks, sequences of one have what those of another leave
            self.budget = min(self.budget, only.total)
        self._config, self._running, self._most_rows = config, running, most_rows
        self._cost, self._shares, self._extend = cost, shares, extend

    def add_decodes(self, decodes: list[Sequence]) -> None:
        """One token for each of these sequences: by turns if holders have shares, by rank first if ranks differ.

        Beside sequences of a smaller rank, others have a row as long as the step keeps `step_seconds`, and one at
        least.
        """
        running, cost, limit = self._running, self._cost, self._config.step_seconds
        least = running[0].rank if running else 0
        if running and running[-1].rank > least:
            decodes.sort(key=lambda one: (one.rank, one.turn))
        elif any(self._shares.values()):
            decodes.sort(key=_turn)
        seconds, filling, extended = 0.0 if cost is None else cost.fixed, False, False
        for sequence in decodes:
            if len(self.rows) == self._most_rows:
                break
            if cost is not None and limit and sequence.rank > least:
                if filling and seconds > limit:
                    break
                filling = True
            shares = self._shares[sequence.rank]
            # `extend` may have preempted it for one before it.
            if sequence.status is not Status.RUNNING or (shares is not None and not shares.decodes[sequence.holder]):
                continue
            if not self._covers(sequence):
                extended = True
                if not self._extend(sequence, sequence.expected):
                    continue
            self.rows.append(Row(sequence, 1))
            seconds += 0.0 if cost is None else cost.sequence + cost.context * sequence.expected
            if shares is not None:
                shares.decodes[sequence.holder] -= 1
        if extended:
            self.rows = [row for row in self.rows if row.sequence.status is Status.RUNNING]
        self.budget -= len(self.rows)

    def add_chunks(
        self, guesses: int, reserved_rank: int | None, end_of_chunk: Callable[[int, int, int], int], *, may_extend: bool
    ) -> None:
        """Shares the budget among the sequences that lack more than one token, in order.

        The step's time is bounded (`EngineConfig.step_seconds`) while others that are no less urgent decode, will do so
        when their KV has come, or are there, but for the block with which the first chunk advances at least. A chunk
        that isn't the last ends at a block's border if it reaches one, so that whole blocks can be sent.

        Args:
            guesses: guessed tokens of the step before, for the prediction of this step's time.
            reserved_rank: smallest rank of the requests whose KV is on its way; None without any.
            end_of_chunk: as `Snapshots.end_of_chunk`.
            may_extend: whether a step without rows may take another sequence's blocks for a chunk.
        """
        if len(self.rows) == len(self._running):
            return
        cost, limit, decoding = self._cost, self._config.step_seconds, self._decoding(reserved_rank)
        block_size = self._config.block_size
        work = StepWork(0, 0.0, len(self.rows), sum([row.sequence.expected for row in self.rows]), guesses)
        for sequence in tuple(self._running):
            if not self.budget or len(self.rows) == self._most_rows:
                break
            if sequence.status is not Status.RUNNING:
                continue  # `extend` has preempted it for one before it
            start, end, shares = sequence.reach, sequence.expected, self._shares[sequence.rank]
            most = self.budget if shares is None else min(self.budget, shares.chunks[sequence.holder])
            if end - start == 1 or not most:
                continue
            bounded = decoding is not None and decoding <= sequence.rank
            if limit and cost is not None and (bounded or sequence.rank > self._running[0].rank):
                within = cost.tokens_within(limit, start, work)
                most = min(most, within if work.prompt_tokens else max(within, block_size))
                if not most:
                    break
            if end - start <= most and not has_mask(sequence):
                continue
            if end - start > most:
                end = start + most
                border = end - end % block_size
                end = border if border > start else end
            end = end_of_chunk(start, end, sequence.expected)
            if not sequence.hold.cover(end) and (self.rows or not may_extend or not self._extend(sequence, end)):
                continue
            length = end - start
            self.rows.append(Row(sequence, length))
            work = work._replace(
                prompt_tokens=work.prompt_tokens + length, prompt_pairs=work.prompt_pairs + pairs(start, length)
            )
            self.budget -= length
            if shares is not None:
                shares.chunks[sequence.holder] -= length

    def _covers(self, sequence: Sequence) -> bool:
        """Whether a sequence has blocks of all groups for its next token; groups behind the first take what they lack
        if it is free."""
        blocks = len(sequence.hold.blocks) * self._config.block_size
        return sequence.expected <= blocks and sequence.hold.cover(sequence.expected)

    def _decoding(self, reserved_rank: int | None) -> int | None:
        """The smallest rank of the sequences that decode in this step, or else in the next one, and of those whose KV
        is on its way; None if there are none."""
        ranks = [row.sequence.rank for row in self.rows] or [
            one.rank for one in self._running if one.generated + one.yields and one.expected - one.reach == 1
        ]
        if reserved_rank is not None:
            ranks.append(reserved_rank)
        return min(ranks, default=None)
