"""A scheduler with a runner that computes nothing, for the tests of the scheduler."""

import dataclasses
import random
import time
from collections import deque
from collections.abc import Sequence as Tokens

import numpy as np
from numpy.typing import NDArray

from kvrelay.costs.step import StepCost, StepFit
from kvrelay.engine.config import EngineConfig, SpeculationConfig
from kvrelay.engine.constrain.grammar import Constraint, MaskNotReadyError
from kvrelay.engine.kv.blocks import BlockPool, Hold
from kvrelay.engine.kv.layout import LayerGroup
from kvrelay.engine.kv.prefix import PrefixIndex
from kvrelay.engine.kv.sides import SidePool, side_blocks
from kvrelay.engine.plan import NOT_READY, StepPlan
from kvrelay.engine.request import FinishReason, Request, SamplingParams
from kvrelay.engine.runner.base import StepHandle
from kvrelay.engine.scheduling.progress import Progress, Reservation
from kvrelay.engine.scheduling.scheduler import SPARE_SHARE, Scheduler
from kvrelay.engine.sequence import Sequence, Status
from kvrelay.engine.speculate.speculation import Speculation
from support.guesses import HashGuesses
from support.hash_runner import HashRunner, expected_outcome, expected_tokens, hash_spec

SIZE = 8


class LateMasks:
    """A grammar, and its matchers, that allow each token; by chance a mask isn't there when it is needed."""

    def __init__(self) -> None:
        self.draw = random.Random(0)
        self.share = 0.5
        """Share of masks that are late."""
        self.owner, self.sure = self, False

    def matcher(self, tokens: Tokens[int]) -> "LateMasks":
        found = LateMasks()
        found.draw, found.owner = self.draw, self
        return found

    def push(self, token: int) -> None:
        pass

    def ready(self, *, surely: bool = False) -> bool:
        self.sure = surely
        return self.draw.random() >= self.owner.share

    def mask(self, seconds: float = 0.0) -> NDArray[np.int32]:
        if not self.sure and self.draw.random() < self.owner.share:
            raise MaskNotReadyError
        return np.full(8, -1, np.int32)

    def after(self, token: int) -> "LateMasks | None":
        return None if self.draw.random() < self.owner.share else self.owner.matcher(())


class KnownCost(StepFit):
    """A fit that says what it was told."""

    def __init__(self, known: StepCost) -> None:
        super().__init__()
        self.known = known

    def cost(self) -> StepCost:
        return self.known


class Bench:
    """A scheduler with a hash runner, and what is known of every sequence from outside."""

    def __init__(
        self,
        blocks: int,
        *,
        max_batch_tokens: int = 16,
        max_sequences: int = 4,
        max_context: int | None = None,
        prefix_cache: bool = True,
        lag: int = 0,
        drafts: int = 0,
        step_cost: tuple[float, float] | None = None,
        step_seconds: float = 0.0,
        sides: Tokens[LayerGroup] = (),
        runner: type[HashRunner] = HashRunner,
    ) -> None:
        """
        Args:
            sides: layer groups behind the first; each has just what rows and reservations may need.
            drafts: that each sequence gets in a step, at most.
            step_cost: seconds of a step, and of each of its tokens, which the scheduler knows from the start; None: it
                knows none.
            step_seconds: bound on the time of a step that has chunks beside sequences that decode; 0: none.
        """
        self.config = EngineConfig(
            block_size=SIZE,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            step_seconds=step_seconds,
        )
        self.max_context = blocks * SIZE if max_context is None else max_context
        self.pool = BlockPool(blocks)
        spares = [max_sequences if drafts and group.kind == "state" else 0 for group in sides]
        counts = [side_blocks(group, self.config) + spare for group, spare in zip(sides, spares, strict=True)]
        pools = [SidePool(group, count, SIZE, spare) for group, count, spare in zip(sides, counts, spares, strict=True)]
        self.prefix = PrefixIndex(self.pool, SIZE, b"hash", enabled=prefix_cache, sides=pools)
        # Computes as late as a device may, whatever the lag.
        found = list(zip(sides, counts, strict=True))
        self.runner = runner(blocks, spec=hash_spec(self.max_context), lag=1, sides=found)
        speculation = None
        if drafts:
            options = SpeculationConfig("ngram", max_tokens=drafts, adaptive=False)
            speculation = Speculation(options, HashGuesses(wrong_every=drafts + 2), time.thread_time)
        self.scheduler = Scheduler(self.config, self.prefix, self.runner.spec, lag, speculation)
        self.lag, self.step_cost = lag, step_cost
        if step_cost is not None:
            fixed, each = step_cost
            self.scheduler.fit = KnownCost(StepCost(fixed, each, 0.0, each, fixed, each, 0.0))
        self.flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self.sequences: list[Sequence] = []
        self.heard: dict[Sequence, list[int]] = {}
        self.exports: list[tuple[Hold, tuple[int, ...]]] = []
        self.late = LateMasks()
        self._expected: dict[Sequence, tuple[list[int], FinishReason]] = {}
        self._names = 0

    def request(self, tokens: tuple[int, ...], max_tokens: int = 1, **options: object) -> Request:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            min_tokens=options.pop("min_tokens", 0),
            stop_token_ids=frozenset(options.pop("stop", ())),
            constraint=Constraint("regex", ".*") if options.pop("late", False) else None,
        )
        if sampling.constraint is not None:
            options["grammar"] = self.late
        self._names += 1
        prompt_tokens = options.pop("prompt_tokens", len(tokens))
        return Request(f"r{self._names}", 1, tokens, prompt_tokens, sampling, **options)

    def add(self, request: Request, *, handoff: bool = False) -> Sequence:
        return self._follow(self.scheduler.add(request, handoff=handoff), [])

    def resume(self, request: Request, reservation: Reservation) -> Sequence:
        """Does what a transfer does, writes the KV that isn't there yet, and goes on behind it."""
        assert all(have % SIZE == 0 for have in reservation.have)
        have = reservation.have[0]
        assert self.runner.holds_kv_of(reservation.hold.blocks, request.tokens[:have])
        tables = reservation.hold.tables()
        self.runner.fill(tables[0], request.tokens[have:], have)
        if self.prefix.sides:
            reservation.comes_from(reservation.have)
            lacking = [
                [-1] * (first // SIZE) + table[first // SIZE :]
                for table, first in zip(tables[1:], reservation.have[1:], strict=True)
            ]
            self.runner.fill(tables[0], request.tokens, 0, lacking)
            assert self.runner.sides_hold(tables, len(request.tokens))
        token = expected_tokens(request.tokens, 1)[0]
        return self._follow(self.scheduler.resume(request, token, reservation.hold), [token])

    def step(self) -> list[Progress]:
        """Plans as far ahead as the lag allows, then lands the oldest; again if nothing came of it."""
        while True:
            while len(self.flight) <= self.lag and self.launch() is not None:
                pass
            if not self.flight:
                return []
            reports = self.land()
            if reports:
                return reports

    def launch(self) -> StepPlan | None:
        """One more plan in flight."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.flight.append((plan, self.runner.launch(plan)))
        return plan

    def land(self, nonfinite: tuple[int, ...] = ()) -> list[Progress]:
        """Computes and commits the oldest plan in flight; the rows `nonfinite` come back as not finite."""
        plan, launched = self.flight.popleft()
        out = dataclasses.replace(launched.result(), nonfinite=nonfinite)
        late = {plan.handles[row] for row, why in out.refused if why == NOT_READY}
        # What may be sent once it is computed isn't computed twice.
        assert not any(sequence.handoff for sequence in self.sequences if sequence.handle in late)
        reports = self.scheduler.commit(plan, out)
        self._hear_all(reports)
        return reports

    def seconds(self, tokens: int) -> float:
        """Cost of a step of so many tokens."""
        fixed, each = self.step_cost
        return fixed + each * tokens

    def drain(self) -> None:
        """Runs until nothing is left, in no more steps than one per token that may still come, and checks that."""
        limit = sum(
            sequence.num_tokens + sequence.request.sampling.max_tokens
            for sequence in self.sequences
            if not sequence.ended
        )
        self.late.share = 0.0
        for _ in range(limit + 1):
            while self.exports:
                self.exports.pop()[0].release()
            if not self.scheduler.has_work:
                break
            before = self.scheduler.preemptions
            # An offer for which all that ran has given way doesn't ask again.
            assert self.step() or (self.scheduler.preemptions > before and self.step())
        assert not self.scheduler.has_work
        while self.flight:
            assert self.land() == []
        self.check_over()

    def check(self) -> None:
        """Everything that must hold between any two calls."""
        self.scheduler.check_integrity()
        live = [sequence for sequence in self.sequences if not sequence.ended]
        scheduler, pool = self.scheduler, self.pool
        assert pool.free + pool.cached + pool.held == pool.total
        assert scheduler.waiting + scheduler.running == len(live)
        assert scheduler.running == sum(sequence.status is Status.RUNNING for sequence in live)
        assert scheduler.running <= self.config.max_sequences + self.config.max_sequences // SPARE_SHARE
        assert scheduler.pending_tokens == sum(sequence.num_tokens - sequence.num_computed for sequence in live)
        assert scheduler.has_work == bool(live)
        for sequence in live:
            assert sequence.num_computed < sequence.num_tokens
            assert sequence.status is not Status.PREEMPTED or sequence.scheduled == 0, "it waits for what is in flight"
            assert self.runner.holds_kv_of(sequence.hold.blocks, sequence.tokens[: sequence.num_computed])
            if sequence.num_computed and not any(side.snapshot for side in sequence.hold.sides):
                assert self.runner.sides_hold(sequence.hold.tables(), sequence.num_computed)
            for side in sequence.hold.sides:
                # The window of the next token, and the tokens of the plans in flight, or of a row whose mask was late.
                late = sequence.num_tokens - sequence.num_computed if sequence.request.grammar is not None else 0
                more = max(sequence.scheduled, min(late, self.config.max_batch_tokens))
                most = 1 if side.side.is_state else side.side.group.window + more + 2 * SIZE
                assert len(side.hold.blocks) * SIZE <= max(most, SIZE) + SIZE
        for hold, tokens in self.exports:
            assert self.runner.holds_kv_of(hold.blocks, tokens)

    def check_over(self) -> None:
        """Everything that must hold once all sequences and outside holds are gone."""
        self.check()
        assert self.pool.owners() == {}
        assert self.pool.free + self.pool.cached == self.pool.total
        for side in self.prefix.sides:
            assert side.pool.owners() == {}
        for sequence in self.sequences:
            assert sequence.ended
            times = sequence.lifetime
            assert times.finished is not None
            if sequence.status is Status.FINISHED:
                reached = [times.submitted, times.scheduled, times.first_token, times.finished]
                reached = [time for time in reached if time is not None]
                assert reached == sorted(reached)
                assert len(reached) == 4 or times.committed is not None

    def _follow(self, sequence: Sequence, heard: list[int]) -> Sequence:
        self.sequences.append(sequence)
        self.heard[sequence] = heard
        return sequence

    def _hear_all(self, reports: list[Progress]) -> None:
        last = {report.sequence: report for report in reports}
        for report in reports:
            if report.error is None:
                self._hear(report, last[report.sequence])

    def _hear(self, report: Progress, last: Progress) -> None:
        """`last` is the step's last report of the same sequence."""
        sequence = report.sequence
        if report is last:
            assert report.computed == sequence.num_computed
        else:
            # A draft that is kept and whose logits aren't finite computes nothing that counts.
            assert report.computed < last.computed or last.error is not None
        if report.token is None:
            assert report is last
            assert report.finish is report.hold is None
            return
        heard = self.heard[sequence]
        assert report.token_index == len(heard) + len(sequence.request.tokens) - sequence.request.prompt_tokens
        heard.append(report.token)
        if sequence not in self._expected:
            self._expected[sequence] = expected_outcome(sequence.request, self.max_context)
        tokens, reason = self._expected[sequence]
        assert heard == tokens[: len(heard)]
        assert report.finish == (reason if len(heard) == len(tokens) else None)
        assert report is last or report.finish is None
        assert (sequence.status is Status.FINISHED) == (last.finish is not None)
        assert (report.hold is not None) == (sequence.handoff and report.finish is None)
        if report.hold is not None:
            assert sequence.status is Status.HANDED_OFF
            self.exports.append((report.hold, sequence.request.tokens))


def spans(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """(handle, first position, one past the last) of each row."""
    rows = zip(plan.handles, plan.starts.tolist(), plan.lengths.tolist(), strict=True)
    return [(handle, start, start + length) for handle, start, length in rows]


def numbers(length: int, first: int = 0) -> tuple[int, ...]:
    """A prompt that begins like no other with another `first`."""
    return tuple((first * 7 + position) % 200 for position in range(length))


def steps_until(bench: Bench, sequence: Sequence) -> int:
    """Steps until the sequence has ended."""
    for count in range(1, 1000):
        bench.step()
        if sequence.ended:
            return count
    raise AssertionError(f"{sequence} doesn't end")
