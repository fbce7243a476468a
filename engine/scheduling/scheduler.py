"""Decides what each step computes.

One rule: a sequence has `num_tokens` and `num_computed`, and each step hands out tokens so that the second catches
up with the first. A chunk of a prompt, a prefix-cache hit, a decode, a preempted sequence that starts over and one
whose KV came from another worker differ only in how far apart the two are.

    add -----> waiting ------------------> running -----> finished, cancelled, failed
                  ^      blocks for its KV    |    '----> handed off (with its blocks, on the first token)
                  '------ preempted ----------'
    resume --> ready  -----------------------'
               (has its KV)      a row

    waiting   in order; producers `add` and preemption, consumer `plan`. The first one blocks the rest, but not the
              requests of holders of little (`engine/scheduling/room.py`).
    ready     in order; producer `resume`, consumer `plan`. Passes waiting while that lacks blocks.
    running   in order; has a row of the block tables and all blocks for its tokens so far. If all rows are taken, those
              of holders of few have spare ones.

The order is that of `Sequence.order`: class, the request's own priority, earliest deadline, arrival.

A sequence takes the blocks for all of its tokens when it starts to run, then one by one as it decodes. If no block is
left, the newest sequence of the holder with most blocks gives up its blocks. It waits again until those that run are
expected to leave enough for it. The first one in order never gives up its blocks, so it always advances, and none
of its class starves.

Sequences of a class of greater rank get what those of smaller ranks leave. They are preempted first, also for one of a
smaller rank that lacks a row or blocks. Beside sequences of a smaller rank, they take part in a step only as far as it
keeps `step_seconds`, but for one row. So as long as the smaller ranks take all rows or all blocks, they wait; of what
is left, however little, they advance in turn.

Where sequences of several holders run, each holder has a share of the step (`engine/scheduling/fairness.py`). If it is
too small for all that the holder has, those that decode take turns, and the oldest prompt goes first.

`kvrelay.engine.engine` explains what changes when steps are planned ahead.
"""

import itertools
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvrelay.costs.step import StepCost, StepFit
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv.blocks import Hold, IntegrityError
from kvrelay.engine.kv.prefix import PrefixIndex
from kvrelay.engine.lifetime import now
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.plan import SlotCopy, StepOutput, StepPlan
from kvrelay.engine.request import Request
from kvrelay.engine.scheduling.allocator import Allocator
from kvrelay.engine.scheduling.fairness import Most, StepShares, shares_of_step
from kvrelay.engine.scheduling.limits import SequenceLimits
from kvrelay.engine.scheduling.planning import (
    BlockTables,
    add_drafts,
    build_plan,
    settled,
    side_tables_of,
    tables_of,
    with_output,
)
from kvrelay.engine.scheduling.progress import OnStart, Progress, Reservation
from kvrelay.engine.scheduling.room import LACKING_STEPS, Lacking, Use, dispensable, victim
from kvrelay.engine.scheduling.snapshots import Snapshots
from kvrelay.engine.scheduling.step import StepFilling, ready_to_decode
from kvrelay.engine.sequence import Sequence, Status
from kvrelay.engine.speculate.speculation import Speculation
from kvrelay.engine.states import StatesLayout
from kvrelay.machine.options import require

if TYPE_CHECKING:
    from torch import Tensor

IN_DOUBT = "a block that it reads was also read by a sequence whose logits are not finite"
"""Reason of a failure."""
SPARE_SHARE = 8
"""Divisor of a step's rows that yields the rows kept beside them for holders of few sequences."""


class Scheduler:
    """Owns the sequences of one engine. Not thread-safe; plan and commit take turns, `lag` plans apart."""

    def __init__(
        self,
        config: EngineConfig,
        prefix: PrefixIndex,
        spec: ModelSpec,
        lag: int = 0,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = now,
    ) -> None:
        """
        Args:
            prefix: with the pool that blocks are taken from.
            spec: of the model, for the limits on requests.
            lag: plans that may be in flight when another one is made; 0 if there are states.
            speculation: guesses tokens; None guesses none.
            clock: tells the times of sequences, in seconds.
        """
        require(not (lag and any(side.is_state for side in prefix.sides)), "lag", lag, "0 for a model with states")
        self.speculation, self._clock = speculation, clock
        self.on_start: OnStart | None = None
        self.on_preempt: OnStart | None = None
        self.preemptions = 0
        """Sequences that gave up their blocks so far."""
        self.config, self._block_size = config, config.block_size
        self._pool = prefix.pool
        self.prefix = prefix
        """Prefix index with the block pool; only the engine thread uses it."""
        self._limits = SequenceLimits(config.block_size, self._pool.total, spec.max_context, spec.vocab_size)
        self._waiting: deque[Sequence] = deque()
        self._ready: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._live: dict[tuple[str, int], Sequence] = {}
        # Each row of a step needs a token.
        self._rows = min(config.max_sequences, config.max_batch_tokens)
        self._most = Most(config.max_batch_tokens, self._rows, self._rows // SPARE_SHARE)
        self._tables = BlockTables(self._rows + self._most.spare, self._limits.table_width)
        self._allocator = Allocator(prefix, self._limits, self._live, self._running, self._ready, self._waiting)
        self._handles = itertools.count()
        self._step = 0
        """Number of the next plan."""
        self.fit = StepFit()
        """Costs of steps, fitted by the engine's measurements; once known, a step's time is shared among holders, and
        bounded."""
        self._lacking: Lacking | None = None
        self._making_way = False
        """Whether the plan in flight must be committed before the next one, which preempts a sequence."""
        self._in_doubt = False
        """Whether sequences may have blocks whose content may be wrong (`Hold.doubtful`)."""
        self._guesses = 0
        """Guessed tokens in the newest plan."""
        self.coming: frozenset[tuple[int, int]] = frozenset()
        """(rank, holder) of requests that will soon ask for a reservation. Any thread may set it."""
        self._snapshots = Snapshots(prefix)
        self._lag = lag
        self._in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()

    # Sequences arrive and leave.

    def add(self, request: Request, *, handoff: bool = False, states: StatesLayout | None = None) -> Sequence:
        """Takes a request whose tokens are to be computed here.

        Args:
            handoff: the sequence leaves with its first token, and its blocks with it unless that token ends it.
            states: hidden states that leave with it, which the runner can keep; None if none do.

        Raises:
            ValueError: the request can never be served here, or is here already; names field, value and limit.
        """
        self._check(request)
        hold = self._pool.share((), f"sequence {request}")
        sequence = self._sequence(request, hold, handoff, list(request.tokens))
        sequence.states = states
        insort(self._waiting, sequence, key=_order)
        return sequence

    def reserve(self, request: Request, *, passing: bool = False) -> Reservation | None:
        """Blocks for the KV of `request.tokens`, prefix-cache hits first; None if there are too few: ask again later.

        Takes no block from a sequence here, and leaves one for each that runs. Takes none while the first waiting
        sequence lacks blocks, which has waited for longer, unless the request's holder has little; and none for more
        sequences than can soon have a row.

        Args:
            passing: whether others have asked before and wait: only a holder of little may pass them.

        Raises:
            ValueError: as `add`.
        """
        self._check(request)
        few = sum([one.holder == request.holder for one in self._live.values()]) < self._most.spare
        rank = request.urgency.rank
        if not self.free_slots(self._most.spare if request.holder and few else 0, rank):
            return None
        hold = self._allocator.reserve(request, passing=passing)
        if hold is None:
            if self._lacking is None or rank <= self._lacking.rank:
                self._lacking = Lacking(rank, self._allocator.needed(request), self._step + LACKING_STEPS)
            return None
        if self._lacking is not None and rank <= self._lacking.rank:
            self._lacking = None
        return Reservation(hold, tuple([blocks * self._block_size for blocks in hold.known()]))

    def resume(self, request: Request, first_token: int, hold: Hold, states: "Tensor | None" = None) -> Sequence:
        """Takes a request whose KV came from another worker; the sequence continues with `first_token`.

        Args:
            first_token: the completion token after `request.tokens`; it must not end the request.
            hold: has the KV of all of `request.tokens`, in final form. The sequence owns it from now on.
            states: [n, layers, hidden] hidden states of the last n of `request.tokens`, as the proposer needs them.

        Raises:
            ValueError: as `add`, or `first_token` is no token or ends the request, or `hold` is too small. The caller
                still owns `hold` then.
        """
        self._check(request)
        self._limits.check_token("first_token", first_token)
        length = len(request.tokens)
        if hold.released or len(hold.blocks) < self._limits.blocks_for(length):
            raise ValueError(f"hold of {hold.owner!r} has {len(hold.blocks)} blocks; {length} tokens need more")
        if self._limits.finish_reason(request, length + 1, first_token) is not None:
            raise ValueError(f"first_token is {first_token}; it ends request {request.key} already")
        hold.pass_to(f"sequence {request}")
        self._allocator.resumed(hold)
        sequence = self._sequence(request, hold, False, [*request.tokens, first_token])
        sequence.take_kv(length, self._clock())
        self._in_doubt |= hold.doubtful
        self._publish(sequence)
        insort(self._ready, sequence, key=_order)
        if self.speculation is not None and states is not None:
            self.speculation.take_states(sequence, states)
        return sequence

    def cancel(self, key: tuple[str, int]) -> bool:
        """Ends the sequence with this (request_id, attempt); False if there is none.

        Its blocks are free at once; if a step in flight may still write to them, when that step is committed.
        """
        sequence = self._live.get(key)
        if sequence is None:
            return False
        self._end(sequence, Status.CANCELLED, self._clock())
        return True

    def share(self, sequence: Sequence, first: int, end: int) -> Hold:
        """A further hold of blocks [first, end) of a sequence's table, so that they can be sent while it continues. Of
        a window, it has those that the token behind all of the sequence's needs."""
        owner = f"export {sequence.request}"
        hold = self._pool.share(sequence.hold.blocks[first:end], owner)
        hold.sides = tuple([side.share(first, end, sequence.num_tokens, owner) for side in sequence.hold.sides])
        return hold

    def check_integrity(self, *, idle: bool = False) -> None:
        """Recounts every block and its holds; takes O(pool). `idle`: nobody outside the engine may hold a block.

        Raises:
            IntegrityError: a block is lost, in two states, or held while all is idle; names blocks and owners.
        """
        if idle and not self._live and not self._in_flight:
            for pool in (self._pool, *[side.pool for side in self.prefix.sides]):
                pool.check_idle()
        self._pool.check_integrity()
        self.prefix.check_integrity()
        for sequence in self._live.values():
            first, hold = sequence.num_computed // self._block_size, sequence.hold
            written = [
                (self._pool, hold.blocks[first:]),
                *[(own.side.pool, own.from_block(first)) for own in hold.sides],
            ]
            if shared := [block for pool, blocks in written for block in blocks if block in pool.indexed]:
                raise IntegrityError(f"{sequence!r} may write to blocks {sorted(shared)}, which the prefix index knows")

    @property
    def has_work(self) -> bool:
        """Whether a sequence is here. `plan` may still be None: all of them may wait for blocks that others hold."""
        return bool(self._live)

    @property
    def rows_taken(self) -> bool:
        """Whether a sequence that has its KV has to wait until another one ends."""
        return len(self._running) + len(self._ready) > self._rows

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for blocks or for a row."""
        return len(self._waiting) + len(self._ready)

    @property
    def running(self) -> int:
        """Number of sequences that run."""
        return len(self._running)

    @property
    def pending_tokens(self) -> int:
        """Number of tokens that the waiting and running sequences have yet to compute."""
        return sum([len(sequence.tokens) - sequence.num_computed for sequence in self._live.values()])

    @property
    def yielding_tokens(self) -> int:
        """Tokens among `pending_tokens` that belong to sequences of classes less urgent than `interactive`."""
        live = [sequence for sequence in self._live.values() if sequence.request.urgency.yields]
        return sum([len(sequence.tokens) - sequence.num_computed for sequence in live])

    def use(self, soon_tokens: float) -> Use:
        """Blocks of the pool that the sequences take, and are expected to take. Those that lack no more than
        `soon_tokens` are expected to end soon."""
        return self._allocator.use(soon_tokens)

    def free_slots(self, spare: int = 0, rank: int | None = None) -> int:
        """How many more reservations may be granted, if there are blocks: a few more than rows, so that no row waits
        for a transfer; and `spare` ones. With a `rank`, those of greater ranks don't count: they give up their rows."""
        used = len(self._running) + len(self._ready) + self._allocator.reservations
        if rank is not None and any(one.rank > rank for one in self._live.values()):
            used = sum([one.rank <= rank for one in (*self._running, *self._ready)])
            used += self._allocator.reservations_within(rank)
        return max(0, self._rows + max(1, self._rows // 8) + spare - used)

    # One step.

    def plan(self) -> StepPlan | None:
        """The next step's work; None if there is none, too few free blocks, the step in flight must end first, or all
        that ran has given way to a reservation, which should ask again before the next call.

        Raises:
            IntegrityError: more plans are in flight than the lag allows.
        """
        if len(self._in_flight) > self._lag:
            raise IntegrityError(f"plan {self._in_flight[0][0].step} is still in flight")
        if self._in_flight and (self._making_way or self._in_doubt or not self._can_extend_all()):
            return None
        if self._in_doubt:
            self._compute_again()
        self._making_way = False
        self._make_room()
        self._admit()
        if self._in_flight and not self._can_extend_all():
            return None  # a request of a holder of little has taken the last blocks
        decodes = ready_to_decode(self._running, self.config.pipeline_parallel, self.speculation)
        cost = self.fit.cost()
        shares = self._shares(cost, decodes)
        step = StepFilling(self.config, self._running, self._rows, cost, shares, self._extend)
        step.add_decodes(decodes)
        reserved_rank = self._allocator.least_reserved_rank
        step.add_chunks(self._guesses, reserved_rank, self._snapshots.end_of_chunk, may_extend=not self._in_flight)
        rows = step.rows
        if not rows:
            return None
        keep: tuple[int, ...] = ()
        if self.speculation is not None:
            keep = self.speculation.layers
            spares = [len(side.spare) for side in self.prefix.sides if side.is_state]
            room, spare = min(step.budget, self._rows - len(rows), *spares), len(self._running)
            add_drafts(self.speculation, rows, room, partial(self.prefix.make_room, spare=spare))
            self._guesses = sum([len(row.chain.drafts) for row in rows])
        block_tables = tables_of(rows, self._tables, self._limits)
        side_tables: tuple[NDArray[np.int32], ...] = ()
        copies: tuple[SlotCopy, ...] = ()
        if self.prefix.sides:
            side_tables = side_tables_of(rows, block_tables.shape[1])
            copies = self._snapshots.plan(rows)
        plan = build_plan(
            self._step, rows, block_tables, keep, behind=bool(self._in_flight) and self.config.pipeline_parallel == 1
        )
        plan = replace(plan, side_tables=side_tables, copies=copies) if side_tables else plan
        self._step += 1
        self._in_flight.append((plan, [row.sequence for row in rows for _ in range(row.rows)]))
        return plan

    def _shares(self, cost: StepCost | None, decodes: list[Sequence]) -> dict[int, StepShares | None]:
        """The shares of the holders of running sequences in the next step, by rank."""
        running, coming = self._running, self.coming | self._allocator.reserving
        found: dict[int, StepShares | None] = {}
        ranks = {one.rank for one in running}
        for rank in ranks:
            own, deciding = running, decodes
            if len(ranks) > 1:
                own = [one for one in running if one.rank == rank]
                deciding = [one for one in decodes if one.rank == rank]
            holders = {holder for other, holder in coming if other <= rank}
            found[rank] = shares_of_step(cost, own, deciding, holders, self._most, self._step)
        return found

    def newest(self) -> list[Sequence]:
        """The sequence of each row of the newest plan, which must be in flight."""
        return list(self._in_flight[-1][1])

    def commit(self, plan: StepPlan, out: StepOutput) -> list[Progress]:
        """Applies the output of `plan`; returns one Progress per row whose sequence is here and whose draft is kept.

        If a row's logits aren't finite, its sequence fails. The cause may lie in any block that it read. So the others
        that have one of these blocks, or one computed from them, get no token: they are computed again, or fail if they
        are to be handed off, as their blocks may have been sent.

        Raises:
            IntegrityError: `plan` isn't the oldest one in flight, or `out` doesn't fit it.
        """
        if not self._in_flight or self._in_flight[0][0] is not plan:
            current = f"plan {self._in_flight[0][0].step}" if self._in_flight else "none"
            raise IntegrityError(f"plan {plan.step} came back; in flight is {current}")
        if misfit := out.misfit(plan):
            raise IntegrityError(misfit)
        rows = self._in_flight.popleft()[1]
        out, kept = settled(plan, out, rows)
        unwell: set[int] = set()
        if out.nonfinite or self._in_doubt:
            kept, unwell = self._doubt(plan, out, rows, kept)
        moment, refused = self._clock(), dict(out.refused)
        reports: list[tuple[int, Progress]] = []
        lengths, samples = plan.lengths.tolist(), plan.sample.tolist()
        for row, (sequence, token) in enumerate(zip(rows, out.tokens, strict=True)):
            sequence.scheduled -= lengths[row]
            sequence.yields -= samples[row]
            if sequence.status is not Status.RUNNING:
                if not sequence.scheduled:
                    self._leave(sequence, states=False)
                    sequence.hold.release()
            elif not kept[row]:
                continue
            elif sequence.handle in unwell:
                reports.append((row, self._fail(sequence, moment, "the model's logits are not finite")))
            elif row in refused:
                reports.append((row, self._fail(sequence, moment, refused[row])._replace(refused=True)))
            else:
                reports.append((row, self._advance(sequence, lengths[row], token, moment)))
        if self.prefix.sides:
            doubtful = [sequence.handle for sequence in rows if sequence.hold.doubtful]
            self._snapshots.settle({rows[row].handle for row in out.nonfinite}.union(doubtful))
        if self.speculation is not None:
            self.speculation.settle(plan, kept, rows, out.states)
        handed = [one for one in self._running if one.handoff and one.hold.doubtful] if self._in_doubt else ()
        failed = [self._fail(one, moment, IN_DOUBT)._replace(again=True) for one in handed]
        return with_output(plan, out, reports) + failed

    # Sequences start.

    def _admit(self) -> None:
        """Starts sequences, in order, as long as there are rows, blocks and budget for them.

        A sequence that has its KV needs a row only, so it passes those that lack blocks or budget. If all rows are
        taken, one whose holder has few takes a spare one: then rows take turns. For want of a row or of blocks,
        sequences of a greater rank are preempted.
        """
        waiting, ready = self._waiting, self._ready
        demand: Counter[int] = Counter()
        for sequence in self._running if waiting else ():
            demand[sequence.rank] += sequence.expected - sequence.reach
        blocked = False
        # The sequence for which others gave way. Nobody passes it: those who gave way might, and would give way again.
        favoured: Sequence | None = None
        while waiting or ready:
            if waiting and not blocked:
                blocked = self._waits(waiting[0].rank, demand)
            takes_kv = bool(ready) and (not waiting or blocked or ready[0].order < waiting[0].order)
            if not takes_kv and blocked:
                break
            first = ready[0] if takes_kv else waiting[0]
            if len(self._running) >= self._rows:
                # Nobody gives up a row for one that then lacks blocks.
                if not takes_kv and (first is favoured or not self._would_fit(first)):
                    blocked = True
                    continue
                if not self._make_way(first.rank):
                    break
                favoured = first
            if takes_kv:
                found: Sequence | None = ready.popleft()
            elif (found := self._allocator.next_waiting(first_only=first is favoured)) is not None:
                waiting.remove(found)
            else:
                blocked, favoured = not self._make_way(first.rank, first), first
            if found is not None:
                demand[found.rank] += len(found.tokens) - found.num_computed
                self._start(found)
        if ready and self._tables.vacant:
            self._admit_spare()

    def _waits(self, rank: int, demand: Counter[int]) -> bool:
        """Whether waiting sequences of a rank have to go on waiting: what runs fills the next step, or what is free is
        kept for a reservation of a smaller rank."""
        filled = sum([tokens for other, tokens in demand.items() if other <= rank]) >= self.config.max_batch_tokens
        return filled or (self._lacking is not None and self._lacking.rank < rank)

    def _admit_spare(self) -> None:
        """Starts ready sequences of holders of few, beyond the rows of a step."""
        rows = Counter([sequence.holder for sequence in self._running])
        for sequence in tuple(self._ready):
            if self._tables.vacant and sequence.holder and rows[sequence.holder] < self._most.spare:
                rows[sequence.holder] += 1
                self._ready.remove(sequence)
                self._start(sequence)

    def _can_extend_all(self) -> bool:
        """Whether every running sequence that needs one more block can get it without a preemption."""
        running, kept = self._running, self._allocator.kept_from_growth
        for number, side in enumerate(self.prefix.sides):
            if side.pool.available < len(running):
                lacking = sum([sequence.hold.sides[number].room() <= sequence.reach for sequence in running])
                if side.pool.available < lacking:
                    return False
        if self._pool.can_allocate((), len(running) + kept):
            return True
        wanted = [len(sequence.hold.blocks) * self._block_size <= sequence.reach for sequence in running]
        return not any(wanted) or self._pool.can_allocate((), sum(wanted) + kept)

    # What a step did.

    def _doubt(
        self, plan: StepPlan, out: StepOutput, rows: list[Sequence], kept: list[bool]
    ) -> tuple[list[bool], set[int]]:
        """Doubts all that the sequences whose logits aren't finite have read.

        Returns:
            `kept` without the rows of other sequences that have read some of it, now or before, and the handles of the
            sequences whose logits aren't finite. A token of these may come before such a draft: it counts no more.
        """
        unwell = {
            rows[row].handle
            for row in out.nonfinite
            if kept[row] and rows[row].status is Status.RUNNING and not rows[row].hold.doubtful
        }
        self._in_doubt |= bool(unwell)
        for sequence in rows:
            if sequence.handle in unwell and not sequence.hold.doubtful:
                self.prefix.doubt(sequence.hold)
        doubtful = [sequence.hold.doubtful and sequence.handle not in unwell for sequence in rows]
        for part in plan.prompt_parts:
            if doubtful[part.row]:
                sequence = rows[part.row]
                sequence.unscored = min(part.first, sequence.unscored or part.first)
        return [has and not doubts for has, doubts in zip(kept, doubtful, strict=True)], unwell

    def _compute_again(self) -> None:
        """Preempts the sequences whose blocks are in doubt. No plan is in flight."""
        for sequence in (*self._running, *self._ready):
            if sequence.hold.doubtful:
                self._preempt(sequence)
        self._in_doubt = False

    def _fail(self, sequence: Sequence, moment: float, why: str) -> Progress:
        self._end(sequence, Status.FAILED, moment)
        return Progress(sequence, sequence.num_computed, error=why)

    def _advance(self, sequence: Sequence, length: int, token: int | None, moment: float) -> Progress:
        end = sequence.num_computed + length
        sequence.advance(end)
        if end // self._block_size > sequence.hold.published:
            self._publish(sequence)
        if sequence.hold.sides:
            sequence.hold.slide(end)
        if end < len(sequence.tokens):
            return Progress(sequence, end)
        if token is None:
            raise IntegrityError(f"{sequence!r} has caught up; its row yielded no token")
        index = sequence.generated
        sequence.tokens.append(token)
        if sequence.lifetime.first_token is None:
            sequence.lifetime.first_token = moment
        finish = self._limits.finish_reason(sequence.request, len(sequence.tokens), token)
        if finish is not None:
            self._end(sequence, Status.FINISHED, moment)
        elif sequence.handoff:
            hold = sequence.hold
            hold.pass_to(f"export {sequence.request}")
            self._end(sequence, Status.HANDED_OFF, moment)
            return Progress(sequence, end, token, index, hold=hold)
        elif sequence.shaping is not None:
            sequence.shaping.push(token)
        return Progress(sequence, end, token, index, finish)

    def _publish(self, sequence: Sequence) -> None:
        self.prefix.publish(sequence.tokens, sequence.request.tenant, sequence.hold, sequence.num_computed)

    # Rows and blocks.

    def _start(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        sequence.turn = self._step
        sequence.slot = self._tables.acquire()
        if sequence.lifetime.scheduled is None:
            sequence.lifetime.scheduled = self._clock()
        insort(self._running, sequence, key=_order)
        if self.on_start is not None:
            self.on_start(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._tables.release(sequence.slot)
        sequence.slot = -1

    def _end(self, sequence: Sequence, status: Status, moment: float) -> None:
        """Removes a sequence. Its blocks are released unless they were handed off or a step may write to them."""
        if sequence.status is Status.RUNNING:
            self._stop(sequence)
        else:
            (self._ready if sequence in self._ready else self._waiting).remove(sequence)
        del self._live[sequence.request.key]
        if self.speculation is not None:
            self.speculation.forget(sequence)
        sequence.status = status
        sequence.lifetime.finished = moment
        if not sequence.scheduled:
            self._leave(sequence, states=True)
            if status is not Status.HANDED_OFF:
                sequence.hold.release()

    def _leave(self, sequence: Sequence, *, states: bool) -> None:
        """Adds all that a sequence has computed to the prefix index; the sequence computes no more. `states`: whether
        no step in flight has changed its states."""
        if sequence.status is not Status.FAILED:
            tenant = sequence.request.tenant
            self.prefix.leave(sequence.tokens, tenant, sequence.hold, sequence.num_computed, states=states)

    def _extend(self, sequence: Sequence, tokens: int) -> bool:
        """Takes blocks for so many tokens of a running sequence, from another one if none is free; False if it must
        wait. In the first group, it lacks one block at most."""

        def grow() -> bool:
            enough = tokens <= len(sequence.hold.blocks) * self._block_size
            return (enough or sequence.hold.extend(1)) and sequence.hold.cover(tokens)

        while not ((allowed := self._allocator.may_grow(sequence)) and grow()):
            if self._in_flight:
                raise IntegrityError(f"{sequence!r} needs a block while plan {self._in_flight[0][0].step} is in flight")
            loser = victim(self._running, self._ready)
            others = loser is None or loser.request.holder != sequence.request.holder
            if not allowed and others and grow():
                return True  # nobody but others would lose blocks for the reserve
            if loser is None:
                # It runs alone: exports and reservations hold the other blocks, and both end by themselves.
                return False
            self._preempt(loser)
            if loser is sequence:
                return False
        return True

    def _preempt(self, loser: Sequence) -> None:
        """Takes the blocks of a sequence that runs or is ready; it waits again. No plan is in flight."""
        if loser.status is Status.RUNNING:
            self._stop(loser)
        else:
            self._ready.remove(loser)
        self.preemptions += 1
        self._leave(loser, states=True)
        loser.hold.release()
        loser.num_computed = 0
        loser.status = Status.PREEMPTED
        insort(self._waiting, loser, key=_order)
        self._allocator.starved = self._waiting[0]
        if self.on_preempt is not None:
            self.on_preempt(loser)

    def _would_fit(self, waiting: Sequence) -> bool:
        """Whether there are sequences of greater ranks, which together have enough blocks for a waiting one."""
        less = [one for one in (*self._running, *self._ready) if one.rank > waiting.rank]
        return bool(less) and self._would_free(less, self._allocator.lacking(waiting))

    def _would_free(self, sequences: list[Sequence], count: int) -> bool:
        """Whether so many blocks would be free in addition if these sequences gave up theirs, some of which others may
        share."""
        holds = [one.hold for one in sequences]
        return sum([len(hold.blocks) for hold in holds]) >= count and self._pool.only_in(holds) >= count

    def _make_way(self, rank: int, sequence: Sequence | None = None) -> bool:
        """Preempts a running sequence of a greater rank, for one of this rank that lacks a row; or for a waiting
        sequence that lacks blocks, if all sequences of greater ranks have enough for it.

        Returns:
            False if nothing was preempted. If only a plan in flight is the reason, no other one follows before that one
            is committed.
        """
        less = [one for one in self._running if one.rank > rank]
        if sequence is not None:
            less += [one for one in self._ready if one.rank > rank]
        if not less or (sequence is not None and not self._would_fit(sequence)):
            return False
        self._making_way = bool(self._in_flight)
        if self._making_way or (loser := dispensable(less, less)) is None:
            return False
        self._preempt(loser)
        return True

    def _make_room(self) -> None:
        """Preempts sequences of greater ranks for the reservation that has found too few blocks."""
        lacking = self._lacking
        if lacking is None:
            return
        if not self._running or self._step > lacking.until:
            self._lacking = None
            return
        less = [one for one in (*self._running, *self._ready) if one.rank > lacking.rank]
        if not self._would_free(less, lacking.blocks - self._pool.available):
            return
        while less and self._pool.available < lacking.blocks:
            if self._in_flight:
                self._making_way = True
                return
            loser = dispensable(less, less)
            if loser is None:
                return
            less.remove(loser)
            self._preempt(loser)

    def _check(self, request: Request) -> None:
        self._limits.check(request)
        if request.key in self._live:
            raise ValueError(f"request_id, attempt are {request.key}; a sequence with these is here already")

    def _sequence(self, request: Request, hold: Hold, handoff: bool, tokens: list[int]) -> Sequence:
        sequence = Sequence.of(request, next(self._handles), hold, handoff, tokens, self._clock())
        self._live[request.key] = sequence
        return sequence


_order = attrgetter("order")
