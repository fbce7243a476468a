"""Decides what each step computes.

One rule: a sequence has `num_tokens` and `num_computed`, and each step hands out tokens so that the second catches
up with the first. A chunk of a prompt, a prefix-cache hit, a decode, a preempted sequence that starts over and one
whose KV came from another worker differ only in how far apart the two are.

    add -----> waiting ------------------> running -----> finished, cancelled, failed
                  ^     room for its KV       |    '----> handed off (with its blocks, on the first token)
                  '------ preempted ----------'
    resume --> ready  -----------------------'
               (has its KV)      a row

    waiting   in order of arrival; producers `add` and preemption, consumer `plan`. The head blocks the rest.
    ready     in order of arrival; producer `resume`, consumer `plan`. Passes waiting where that waits for room.
    running   in order of arrival; has a row of the block tables and all blocks for its tokens so far.

Blocks for all of a sequence's tokens are taken when it starts to run, the rest one by one as it decodes. Where none
is left, the youngest gives up its blocks and waits again; so the oldest always moves, and nobody starves.
"""

import itertools
from bisect import insort
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from operator import attrgetter

import numpy as np

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv.blocks import BlockPool, Hold, IntegrityError
from kvrelay.engine.kv.prefix import PrefixIndex
from kvrelay.engine.kv.tables import BlockTables
from kvrelay.engine.lifetime import now
from kvrelay.engine.limits import Limits
from kvrelay.engine.plan import RowFailure, StepOutput, StepPlan
from kvrelay.engine.progress import EngineLoad, Progress, Reservation
from kvrelay.engine.request import Request
from kvrelay.engine.sequence import Sequence, Status

__all__ = ["EngineLoad", "Progress", "Reservation", "Scheduler"]


class Scheduler:
    """Owns the sequences of one engine. Not thread-safe; plan and commit take turns."""

    def __init__(self, config: EngineConfig, pool: BlockPool, prefix: PrefixIndex | None, max_context: int) -> None:
        """
        Args:
            prefix: index of `pool`; None computes every prompt in full.
            max_context: prompt plus completion, in tokens, at most.
        """
        self.on_start: Callable[[Sequence], None] | None = None
        """Told of each sequence that begins to run (again, after a preemption), before the step that computes it."""
        self._config = config
        self._pool = pool
        self._prefix = prefix
        self._limits = Limits(config.block_size, pool.total, max_context)
        self._block_size = config.block_size
        self._waiting: deque[Sequence] = deque()
        self._ready: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._live: dict[tuple[str, int], Sequence] = {}
        # A row more than there are tokens in a step would be one that goes without.
        self._rows = min(config.max_sequences, config.max_batch_tokens)
        self._tables = BlockTables(self._rows, self._limits.widest)
        self._reserved: list[Hold] = []
        self._starved: Sequence | None = None
        self._handles = itertools.count()
        self._steps = itertools.count()
        self._in_flight: tuple[StepPlan, list[Sequence]] | None = None

    # Sequences come and go.

    def add(self, request: Request, *, handoff: bool = False) -> Sequence:
        """Takes a request whose tokens are to be computed here.

        Args:
            handoff: the sequence leaves with its first token; unless that ends it, its blocks leave with it.

        Raises:
            ValueError: the request can never be served here, or is here already. Names field, value and limit.
        """
        self._check(request)
        sequence = self._sequence(request, self._pool.share((), _name("sequence", request)), handoff)
        self._waiting.append(sequence)
        return sequence

    def reserve(self, request: Request) -> Reservation | None:
        """Blocks for the KV of `request.tokens`, prefix-cache hits first; None: no room now, ask again after a step.

        Never takes blocks away from a sequence here, leaves one for each that runs, and takes none while a sequence
        that is here waits for room, nor more than about what can get a row soon.

        Raises:
            ValueError: as `add`.
        """
        self._check(request)
        self._reserved = [hold for hold in self._reserved if not hold.released]
        spoken_for = len(self._running) + len(self._ready) + len(self._reserved)
        # A few more than there are rows, so that a row never waits for a transfer.
        if spoken_for >= self._rows + max(1, self._rows // 8):
            return None
        # Somebody here has waited for these blocks for longer.
        if self._waiting and self._waiting[0] is self._starved:
            return None
        hold = self._acquire(request, request.tokens, [], len(request.tokens) + 1, _name("reservation", request))
        if hold is None:
            return None
        self._reserved.append(hold)
        return Reservation(hold, hold.published * self._block_size)

    def resume(self, request: Request, first_token: int, hold: Hold) -> Sequence:
        """Takes a request whose KV came from elsewhere; the sequence goes on from `first_token`.

        Args:
            first_token: the completion token after `request.tokens`, which doesn't end the request.
            hold: has the KV of all of `request.tokens`, in final form. The sequence owns it from here on.

        Raises:
            ValueError: as `add`, or `first_token` ends the request, or `hold` is too small. `hold` stays the caller's.
        """
        self._check(request)
        length = len(request.tokens)
        if hold.released or len(hold.blocks) < self._limits.blocks_for(length):
            raise ValueError(f"hold of {hold.owner!r} has {len(hold.blocks)} blocks; {length} tokens need more")
        if self._limits.finish_reason(request, length + 1, first_token) is not None:
            raise ValueError(f"first_token is {first_token}; it ends request {request.key} already")
        hold.owner = _name("sequence", request)
        self._reserved = [other for other in self._reserved if other is not hold]
        sequence = self._sequence(request, hold, handoff=False)
        sequence.tokens.append(first_token)
        sequence.chain = hold.chain
        sequence.num_computed = sequence.furthest = length
        sequence.lifetime.committed = now()
        self._publish(sequence)
        self._ready.append(sequence)
        return sequence

    def cancel(self, key: tuple[str, int]) -> bool:
        """Ends the sequence with this (request_id, attempt); False if there is none.

        Its blocks are free at once, or, where a step in flight may still write to them, when that is committed.
        """
        sequence = self._live.get(key)
        if sequence is None:
            return False
        self._end(sequence, Status.CANCELLED, now())
        return True

    def share(self, sequence: Sequence, first: int, end: int) -> Hold:
        """A further hold of blocks [first, end) of a sequence's table, for whoever ships them while it goes on."""
        return self._pool.share(sequence.hold.blocks[first:end], _name("export", sequence.request))

    def check_integrity(self) -> None:
        """Recounts every block and its holds; takes O(pool).

        Raises:
            IntegrityError: a block is lost, or in two states; names blocks and owners.
        """
        self._pool.check_integrity()
        if self._prefix is not None:
            self._prefix.check_integrity()

    @property
    def has_work(self) -> bool:
        """Whether a sequence is here. `plan` may be None even so: all of them wait for blocks that others hold."""
        return bool(self._live)

    def load(self) -> EngineLoad:
        pool = self._pool
        pending = sum([len(sequence.tokens) - sequence.num_computed for sequence in self._live.values()])
        waiting = len(self._waiting) + len(self._ready)
        return EngineLoad(pool.total, pool.free, pool.cached, pool.held, waiting, len(self._running), pending)

    # One step.

    def plan(self) -> StepPlan | None:
        """The next step's work; None where there is none, or no room for any.

        Raises:
            IntegrityError: the plan before was neither committed nor failed.
        """
        if self._in_flight is not None:
            raise IntegrityError(f"plan {self._in_flight[0].step} is still in flight")
        self._admit()
        rows: list[Sequence] = []
        budget = self._schedule_decodes(rows, self._config.max_batch_tokens)
        self._schedule_chunks(rows, budget)
        if not rows:
            return None
        plan = self._build(rows)
        self._in_flight = plan, rows
        return plan

    def commit(self, plan: StepPlan, out: StepOutput) -> list[Progress]:
        """Takes in what the runner made of `plan`; one Progress per row whose sequence is still here.

        Raises:
            IntegrityError: `plan` isn't the one in flight, or `out` doesn't fit it.
        """
        rows = self._land(plan)
        if len(out.tokens) != len(rows):
            raise IntegrityError(f"step {plan.step} has {len(rows)} rows; its output has {len(out.tokens)}")
        moment = now()
        reports = []
        for sequence, token in zip(rows, out.tokens, strict=True):
            length, sequence.scheduled = sequence.scheduled, 0
            if sequence.status is Status.RUNNING:
                reports.append(self._advance(sequence, length, token, moment))
            else:
                sequence.hold.release()
        return reports

    def fail(self, plan: StepPlan, failure: RowFailure) -> list[Progress]:
        """Ends the sequences that the runner couldn't compute; the plan's others are as if it had never been.

        Raises:
            IntegrityError: `plan` isn't the one in flight, or `failure` names none of its rows.
        """
        rows = self._land(plan)
        failed = set(failure.handles).intersection(plan.handles)
        if not failed:
            raise IntegrityError(f"step {plan.step} failed for handles {failure.handles}; it has {plan.handles}")
        moment = now()
        reports = []
        for sequence in rows:
            sequence.scheduled = 0
            if sequence.status is not Status.RUNNING:
                sequence.hold.release()
            elif sequence.handle in failed:
                # What spoiled its logits may lie in any block that it read.
                if self._prefix is not None:
                    self._prefix.withdraw(sequence.hold)
                self._end(sequence, Status.FAILED, moment)
                reports.append(Progress(sequence, sequence.num_computed, error=failure.message))
        return reports

    # What a step computes.

    def _admit(self) -> None:
        """Starts sequences, in order of arrival, while there are rows, room and budget for them.

        One that has its KV passes those that wait for room or budget: it needs a row only.
        """
        waiting, ready = self._waiting, self._ready
        demand = sum([len(sequence.tokens) - sequence.num_computed for sequence in self._running])
        no_room = False
        while self._tables.vacant:
            hold_back = no_room or demand >= self._config.max_batch_tokens
            if waiting and not hold_back and not (ready and ready[0].handle < waiting[0].handle):
                if not self._find_room(waiting[0]):
                    self._starved = waiting[0]
                    no_room = True
                    continue
                sequence = waiting.popleft()
            elif ready:
                sequence = ready.popleft()
            else:
                break
            demand += len(sequence.tokens) - sequence.num_computed
            self._start(sequence)

    def _schedule_decodes(self, rows: list[Sequence], budget: int) -> int:
        """One token for each sequence that lacks one, oldest first. Returns what is left of the budget."""
        running = self._running
        size = self._block_size
        index = 0
        while index < len(running) and budget:
            sequence = running[index]
            index += 1
            length = len(sequence.tokens)
            if length - sequence.num_computed == 1 and (
                length <= len(sequence.hold.blocks) * size or self._make_room(sequence)
            ):
                sequence.scheduled = 1
                rows.append(sequence)
                budget -= 1
        return budget

    def _schedule_chunks(self, rows: list[Sequence], budget: int) -> None:
        """Shares the budget among the sequences that lack more than a token, oldest first.

        A chunk that isn't the last ends at a block's border if it reaches one: whole blocks can be shipped.
        """
        for sequence in self._running:
            if not budget:
                break
            start = sequence.num_computed
            end = len(sequence.tokens)
            if end - start == 1:
                continue
            if end - start > budget:
                end = start + budget
                border = end - end % self._block_size
                end = border if border > start else end
            sequence.scheduled = end - start
            rows.append(sequence)
            budget -= end - start

    def _build(self, rows: list[Sequence]) -> StepPlan:
        tables = self._tables
        size = self._block_size
        tokens: list[int] = []
        sample = []
        for sequence in rows:
            start = sequence.num_computed
            end = start + sequence.scheduled
            tokens += sequence.tokens[start:end]
            sample.append(end == len(sequence.tokens))
            tables.grow(sequence.slot, sequence.hold.blocks, (end + size - 1) // size)
        return StepPlan(
            step=next(self._steps),
            handles=tuple([sequence.handle for sequence in rows]),
            tokens=np.array(tokens, np.int32),
            starts=np.array([sequence.num_computed for sequence in rows], np.int32),
            lengths=np.array([sequence.scheduled for sequence in rows], np.int32),
            block_tables=tables.gather([sequence.slot for sequence in rows]),
            sample=np.array(sample, np.bool_),
            sampling=tuple([sequence.request.sampling for sequence in rows]),
            generated=np.array([len(sequence.tokens) - sequence.request.prompt_tokens for sequence in rows], np.int32),
        )

    # What a step did.

    def _land(self, plan: StepPlan) -> list[Sequence]:
        """The sequences of the plan in flight, which no longer is."""
        if self._in_flight is None or self._in_flight[0] is not plan:
            current = "none" if self._in_flight is None else f"plan {self._in_flight[0].step}"
            raise IntegrityError(f"plan {plan.step} came back; in flight is {current}")
        rows = self._in_flight[1]
        self._in_flight = None
        return rows

    def _advance(self, sequence: Sequence, length: int, token: int | None, moment: float) -> Progress:
        start = sequence.num_computed
        end = start + length
        sequence.num_computed = end
        if start < sequence.furthest:
            sequence.recomputed_tokens += min(end, sequence.furthest) - start
        if end > sequence.furthest:
            sequence.furthest = end
        if end // self._block_size > sequence.hold.published:
            self._publish(sequence)
        if end < len(sequence.tokens):
            return Progress(sequence, end)
        if token is None:
            raise IntegrityError(f"{sequence!r} has caught up; its row yielded no token")
        sequence.tokens.append(token)
        if sequence.lifetime.first_token is None:
            sequence.lifetime.first_token = moment
        finish = self._limits.finish_reason(sequence.request, len(sequence.tokens), token)
        if finish is not None:
            self._end(sequence, Status.FINISHED, moment)
        elif sequence.handoff:
            hold = sequence.hold
            hold.owner = _name("export", sequence.request)
            self._end(sequence, Status.HANDED_OFF, moment)
            return Progress(sequence, end, token, hold=hold)
        return Progress(sequence, end, token, finish)

    def _publish(self, sequence: Sequence) -> None:
        if self._prefix is not None:
            tenant = sequence.request.tenant
            self._prefix.publish(sequence.tokens, tenant, sequence.hold, sequence.num_computed)

    # Rows and room.

    def _start(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        sequence.slot = self._tables.acquire()
        if sequence.lifetime.scheduled is None:
            sequence.lifetime.scheduled = now()
        insort(self._running, sequence, key=_arrival)
        if self.on_start is not None:
            self.on_start(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._tables.release(sequence.slot)
        sequence.slot = -1

    def _end(self, sequence: Sequence, status: Status, moment: float) -> None:
        """The sequence leaves. Its blocks are released unless they were handed off or a step may write to them."""
        if sequence.status is Status.RUNNING:
            self._stop(sequence)
        else:
            (self._ready if sequence in self._ready else self._waiting).remove(sequence)
        del self._live[sequence.request.key]
        sequence.status = status
        sequence.lifetime.finished = moment
        if status is not Status.HANDED_OFF and not sequence.scheduled:
            sequence.hold.release()

    def _acquire(self, request: Request, tokens: Tokens[int], chain: list[bytes], room: int, owner: str) -> Hold | None:
        """Blocks for `room` tokens, all but the last of them from the prefix cache where it has them.

        None unless a block is left for each sequence that runs: what starts now shouldn't have to stop at once.
        """
        blocks = self._limits.blocks_for(room)
        prefix = self._prefix
        shared = [] if prefix is None else prefix.find(tokens, request.tenant, room - 1, chain)
        if not self._pool.room_for(shared, blocks - len(shared) + len(self._running)):
            return None
        if prefix is None:
            return self._pool.allocate(blocks, owner)
        hold = prefix.match(tokens, request.tenant, owner, room - 1, chain)
        if not hold.extend(blocks - len(shared)):
            raise IntegrityError(f"{owner!r} found no room for {blocks} blocks, {len(shared)} shared, where there was")
        return hold

    def _find_room(self, sequence: Sequence) -> bool:
        """Blocks for all tokens of a waiting sequence, cached ones first; False where there is no room."""
        owner = sequence.hold.owner
        hold = self._acquire(sequence.request, sequence.tokens, sequence.chain, len(sequence.tokens), owner)
        if hold is None:
            return False
        sequence.hold.release()
        sequence.hold = hold
        sequence.num_computed = hold.published * self._block_size
        if sequence.status is Status.WAITING:
            sequence.cached_tokens = sequence.furthest = sequence.num_computed
        return True

    def _make_room(self, sequence: Sequence) -> bool:
        """One more block for a running sequence, if need be the youngest's; False where it can't go on now."""
        while not sequence.hold.extend(1):
            if self._ready:
                victim = self._ready.pop()
            elif len(self._running) > 1:
                victim = self._running[-1]
                self._stop(victim)
            else:
                # Alone, so the rest is held by exports and reservations, which end by themselves.
                return False
            victim.hold.release()
            victim.num_computed = 0
            victim.status = Status.PREEMPTED
            insort(self._waiting, victim, key=_arrival)
            self._starved = self._waiting[0]
            if victim is sequence:
                return False
        return True

    def _check(self, request: Request) -> None:
        self._limits.check(request)
        if request.key in self._live:
            raise ValueError(f"request_id, attempt are {request.key}; a sequence with these is here already")

    def _sequence(self, request: Request, hold: Hold, handoff: bool) -> Sequence:
        sequence = Sequence(request, next(self._handles), hold, handoff, tokens=list(request.tokens))
        self._live[request.key] = sequence
        return sequence


_arrival = attrgetter("handle")


def _name(what: str, request: Request) -> str:
    """Name of a hold's owner."""
    return f"{what} {request.request_id}/{request.attempt}"
