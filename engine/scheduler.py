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

With a lag of one, a step is planned while the one before it runs. A row then may compute a token that nobody has seen:
the plan says which row of the step before yields it. What the token decides, it decides one step late: a sequence that
turns out to have ended is in one more plan, and that row is dropped when it comes back. An end by length is foreseen.

    plan N+1      num_computed | scheduled (in flight) | this step's |       tokens known, then `yields` that aren't
    commit N      in order; blocks of an ended sequence stay until no plan in flight names it
    preemption    waits until nothing is in flight: `plan` is None once, and the next one does it
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
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.progress import EngineLoad, Progress, Reservation
from kvrelay.engine.request import Request
from kvrelay.engine.sequence import Sequence, Status

__all__ = ["EngineLoad", "Progress", "Reservation", "Scheduler"]


class Scheduler:
    """Owns the sequences of one engine. Not thread-safe; plan and commit take turns, `lag` plans apart."""

    def __init__(
        self, config: EngineConfig, pool: BlockPool, prefix: PrefixIndex | None, max_context: int, lag: int = 0
    ) -> None:
        """
        Args:
            prefix: index of `pool`; None computes every prompt in full.
            max_context: prompt plus completion, in tokens, at most.
            lag: plans that may be in flight when another one is made, 0 or 1.
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
        self._lag = lag
        self._in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()

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
        if not self._seats():
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
        running, free_slots = len(self._running), self._seats()
        return EngineLoad(pool.total, pool.free, pool.cached, pool.held, waiting, running, pending, free_slots)

    def _seats(self) -> int:
        """How many more reservations may be given: a few more than rows, so that a row never waits for a transfer."""
        self._reserved = [hold for hold in self._reserved if not hold.released]
        spoken_for = len(self._running) + len(self._ready) + len(self._reserved)
        return max(0, self._rows + max(1, self._rows // 8) - spoken_for)

    # One step.

    def plan(self) -> StepPlan | None:
        """The next step's work; None where there is none, no room for any, or the step in flight must end first.

        Raises:
            IntegrityError: an earlier plan than the lag allows was neither committed nor failed.
        """
        if len(self._in_flight) > self._lag:
            raise IntegrityError(f"plan {self._in_flight[0][0].step} is still in flight")
        if self._in_flight and not self._room_to_decode():
            return None
        self._admit()
        rows: list[tuple[Sequence, int]] = []
        budget = self._schedule_decodes(rows, self._config.max_batch_tokens)
        self._schedule_chunks(rows, budget)
        if not rows:
            return None
        plan = self._build(rows)
        self._in_flight.append((plan, [sequence for sequence, _ in rows]))
        return plan

    def commit(self, plan: StepPlan, out: StepOutput) -> list[Progress]:
        """Takes in what the runner made of `plan`; one Progress per row whose sequence is still here.

        Raises:
            IntegrityError: `plan` isn't the oldest one in flight, or `out` doesn't fit it.
        """
        rows = self._land(plan)
        if len(out.tokens) != len(rows) or not all(0 <= row < len(rows) for row in out.nonfinite):
            sizes = f"{len(out.tokens)} and names rows {out.nonfinite}"
            raise IntegrityError(f"step {plan.step} has {len(rows)} rows; its output has {sizes}")
        moment = now()
        reports = []
        lengths, samples = plan.lengths.tolist(), plan.sample.tolist()
        for row, (sequence, token) in enumerate(zip(rows, out.tokens, strict=True)):
            sequence.scheduled -= lengths[row]
            sequence.yields -= samples[row]
            if sequence.status is not Status.RUNNING:
                if not sequence.scheduled:
                    sequence.hold.release()
            elif row in out.nonfinite:
                reports.append(self._fail(sequence, moment))
            else:
                reports.append(self._advance(sequence, lengths[row], token, moment))
        return reports

    # What a step computes.

    def _admit(self) -> None:
        """Starts sequences, in order of arrival, while there are rows, room and budget for them.

        One that has its KV passes those that wait for room or budget: it needs a row only.
        """
        waiting, ready = self._waiting, self._ready
        demand = sum([sequence.left for sequence in self._running])
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

    def _room_to_decode(self) -> bool:
        """Whether there is a block for every running sequence that needs one more, without taking one away."""
        running = self._running
        if self._pool.room_for((), len(running)):
            return True
        wanted = [len(sequence.hold.blocks) * self._block_size <= sequence.reach for sequence in running]
        return self._pool.room_for((), sum(wanted))

    def _schedule_decodes(self, rows: list[tuple[Sequence, int]], budget: int) -> int:
        """One token for each sequence that lacks one, oldest first. Returns what is left of the budget."""
        running = self._running
        size = self._block_size
        index = 0
        while index < len(running) and budget:
            sequence = running[index]
            index += 1
            length = len(sequence.tokens) + sequence.yields
            if length - sequence.num_computed - sequence.scheduled != 1:
                continue
            if sequence.yields and (sequence.handoff or length >= self._limits.longest(sequence.request)):
                # The token in flight is its last, whatever it is.
                continue
            if length <= len(sequence.hold.blocks) * size or self._make_room(sequence):
                rows.append((sequence, 1))
                budget -= 1
        return budget

    def _schedule_chunks(self, rows: list[tuple[Sequence, int]], budget: int) -> None:
        """Shares the budget among the sequences that lack more than a token, oldest first.

        A chunk that isn't the last ends at a block's border if it reaches one: whole blocks can be shipped.
        """
        for sequence in self._running:
            if not budget:
                break
            start = sequence.num_computed + sequence.scheduled
            end = len(sequence.tokens) + sequence.yields
            if end - start == 1:
                continue
            if end - start > budget:
                end = start + budget
                border = end - end % self._block_size
                end = border if border > start else end
            rows.append((sequence, end - start))
            budget -= end - start

    def _build(self, rows: list[tuple[Sequence, int]]) -> StepPlan:
        """The plan of these tokens of each sequence, which are in flight from here on."""
        size = self._block_size
        tokens: list[int] = []
        starts, sample, generated, feeds = [], [], [], []
        for row, (sequence, length) in enumerate(rows):
            known, expected = len(sequence.tokens), len(sequence.tokens) + sequence.yields
            start = sequence.num_computed + sequence.scheduled
            end = start + length
            tokens += sequence.tokens[start:end] if start < known else (0,)
            feeds.append(-1 if start < known else sequence.row)
            starts.append(start)
            sample.append(end == expected)
            generated.append(expected - sequence.request.prompt_tokens)
            self._tables.grow(sequence.slot, sequence.hold.blocks, (end + size - 1) // size)
            sequence.scheduled += length
            sequence.yields += end == expected
            sequence.row = row
        return StepPlan(
            step=next(self._steps),
            handles=tuple([sequence.handle for sequence, _ in rows]),
            tokens=np.array(tokens, np.int32),
            starts=np.array(starts, np.int32),
            lengths=np.array([length for _, length in rows], np.int32),
            block_tables=self._tables.gather([sequence.slot for sequence, _ in rows]),
            sample=np.array(sample, np.bool_),
            sampling=tuple([sequence.request.sampling for sequence, _ in rows]),
            generated=np.array(generated, np.int32),
            feeds=np.array(feeds, np.int32) if self._in_flight else None,
        )

    # What a step did.

    def _land(self, plan: StepPlan) -> list[Sequence]:
        """The sequences of the oldest plan in flight, which no longer is."""
        if not self._in_flight or self._in_flight[0][0] is not plan:
            current = f"plan {self._in_flight[0][0].step}" if self._in_flight else "none"
            raise IntegrityError(f"plan {plan.step} came back; in flight is {current}")
        return self._in_flight.popleft()[1]

    def _fail(self, sequence: Sequence, moment: float) -> Progress:
        # What spoiled its logits may lie in any block that it read.
        if self._prefix is not None:
            self._prefix.withdraw(sequence.hold)
        self._end(sequence, Status.FAILED, moment)
        return Progress(sequence, sequence.num_computed, error="the model's logits are not finite")

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
            if self._in_flight:
                raise IntegrityError(f"{sequence!r} needs a block while plan {self._in_flight[0][0].step} is in flight")
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
