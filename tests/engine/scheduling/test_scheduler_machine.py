"""The scheduler under any order of calls: a state machine that Hypothesis drives."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_bench import SIZE, Bench

from kvrelay.engine.request import Request, Urgency
from kvrelay.engine.scheduling.progress import Reservation
from kvrelay.engine.sequence import Sequence, Status
from support.hash_runner import STATE, expected_outcome, expected_tokens, window_of

# Beginnings are often alike, and lengths lie around the borders of blocks and chunks.
BEGINNINGS = ((), (1,) * SIZE, (1,) * (3 * SIZE), (1,) * SIZE + (2,) * SIZE)
prompts = st.builds(
    lambda beginning, rest: (beginning + rest) or (0,),
    st.sampled_from(BEGINNINGS),
    st.lists(st.integers(0, 2), max_size=3 * SIZE).map(tuple),
)


URGENCIES = st.builds(
    Urgency,
    st.sampled_from([0, 0, 10, -5]),
    st.sampled_from([0, 0, 1]),
    st.sampled_from([math.inf, math.inf, 0.5, -1.0]),
)


@st.composite
def requests(draw: st.DrawFn, bench: Bench) -> Request:
    """A request that the bench can serve: with stop tokens or not, fresh or on a later attempt."""
    tokens = draw(prompts)[: bench.max_context - 2]
    done = draw(st.integers(0, min(3, len(tokens) - 1)))
    max_tokens = done + draw(st.integers(1, 40))
    max_tokens = min(max_tokens, bench.max_context - len(tokens) + done)
    stop = draw(st.sampled_from([(), (), tuple(expected_tokens(tokens, 7)[::3])]))
    # With a constraint, the router takes no min_tokens.
    late = draw(st.booleans())
    return bench.request(
        tokens,
        max_tokens,
        min_tokens=0 if late else draw(st.sampled_from([0, done + 2])),
        stop=stop,
        prompt_tokens=len(tokens) - done,
        tenant=draw(st.sampled_from(["", "other"])),
        holder=draw(st.sampled_from([0, 1, 1, 1, 2])),
        late=late,
        urgency=draw(URGENCIES),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Does all that a prefill, a decode and a co-located worker do to a scheduler, in any order."""

    @initialize(
        blocks=st.integers(4, 16),
        max_batch_tokens=st.integers(SIZE, 40),
        max_sequences=st.sampled_from([1, 2, 3, 4, 5, 8]),
        prefix_cache=st.booleans(),
        lag=st.integers(0, 1),
        drafts=st.sampled_from([0, 1, 4]),
        step_cost=st.sampled_from([None, (0.0, 1.0), (2.0, 1.0), (1.0, 0.0)]),
        step_seconds=st.sampled_from([0.0, 3.0, 20.0]),
        sides=st.sampled_from([(), (), (window_of(20),), (STATE,), (window_of(5), STATE, window_of(40))]),
    )
    def start(self, blocks: int, **options: Any) -> None:
        if options["sides"]:
            options |= {"lag": 0}
        self.bench = Bench(blocks, **options)
        self.scheduler = self.bench.scheduler
        self.reserved: list[tuple[Request, Reservation]] = []

    @rule(data=st.data(), handoff=st.booleans())
    def add(self, data: st.DataObject, handoff: bool) -> None:
        self.bench.add(data.draw(requests(self.bench)), handoff=handoff)

    @rule(data=st.data(), handoff=st.booleans(), more=st.integers(1, SIZE))
    def go_on(self, data: st.DataObject, handoff: bool, more: int) -> None:
        """The next turn of a conversation, or another one behind a part of what was said."""
        past = [sequence for sequence in self.bench.sequences if sequence.ended]
        if past:
            self._turn(data, data.draw(st.sampled_from(past)), more, handoff=handoff)

    def _turn(self, data: st.DataObject, before: Sequence, more: int, *, handoff: bool = False) -> None:
        if before.num_tokens + more + 3 <= self.bench.max_context:
            said = before.tokens[: data.draw(st.integers(max(1, before.num_tokens - 3), before.num_tokens))]
            asked = self.bench.request((*said, *range(more)), 3, tenant=before.request.tenant)
            self.bench.add(asked, handoff=handoff)

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        request = data.draw(requests(self.bench))
        running = [sequence for sequence in self.bench.sequences if sequence.status is Status.RUNNING]
        reservation = self.scheduler.reserve(request)
        if reservation is not None:
            self.reserved.append((request, reservation))
        assert all(sequence.status is Status.RUNNING for sequence in running)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), arrives=st.booleans())
    def end_transfer(self, data: st.DataObject, arrives: bool) -> None:
        pair = data.draw(st.sampled_from(self.reserved))
        self.reserved.remove(pair)
        request, reservation = pair
        if arrives and len(expected_outcome(request, self.bench.max_context)[0]) > 1:
            self.bench.resume(request, reservation)
        else:
            reservation.release()

    @precondition(lambda self: self.bench.exports)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        hold, tokens = self.bench.exports.pop(data.draw(st.integers(0, len(self.bench.exports) - 1)))
        assert self.bench.runner.holds_kv_of(hold.blocks, tokens)
        hold.release()

    @rule(data=st.data())
    def share_what_is_computed(self, data: st.DataObject) -> None:
        """An exporter that ships finished blocks while the rest is computed, or outlives a cancel."""
        sharable = [sequence for sequence in self.bench.sequences if not sequence.ended and sequence.handoff]
        if sharable:
            sequence = data.draw(st.sampled_from(sharable))
            blocks = sequence.num_computed // SIZE
            hold = self.scheduler.share(sequence, 0, blocks)
            self.bench.exports.append((hold, tuple(sequence.tokens[: blocks * SIZE])))

    @rule(data=st.data(), launched=st.booleans(), more=st.integers(0, SIZE))
    def cancel(self, data: st.DataObject, launched: bool, more: int) -> None:
        """In the midst of a step or not; another turn may follow at once."""
        if launched and len(self.bench.flight) <= self.bench.lag:
            self.bench.launch()
        live = [sequence for sequence in self.bench.sequences if not sequence.ended]
        if live:
            sequence = data.draw(st.sampled_from(live))
            assert self.scheduler.cancel(sequence.request.key)
            assert not self.scheduler.cancel(sequence.request.key)
            # A step in flight may still write: the blocks stay until it has ended.
            assert sequence.hold.released == (sequence.scheduled == 0)
            if more:
                self._turn(data, sequence, more)

    @precondition(lambda self: len(self.bench.flight) <= self.bench.lag)
    @rule()
    def make_plan(self) -> None:
        plan = self.bench.launch()
        if plan is not None:
            assert plan.num_tokens <= self.bench.config.max_batch_tokens
            assert plan.num_rows <= self.bench.config.max_sequences

    @precondition(lambda self: self.bench.flight)
    @rule()
    def commit(self) -> None:
        self.bench.land()

    @rule(count=st.integers(1, 20))
    def run_on(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()
            self.bench.check()

    @precondition(lambda self: self.bench.flight)
    @rule(data=st.data())
    def fail_rows(self, data: st.DataObject) -> None:
        plan, _ = self.bench.flight[0]
        running = {sequence.handle for sequence in self.bench.sequences if sequence.status is Status.RUNNING}
        doubtful = {sequence.handle for sequence in self.bench.sequences if sequence.hold.doubtful}
        bad = data.draw(st.sets(st.integers(0, plan.num_rows - 1), min_size=1))
        share, self.bench.late.share = self.bench.late.share, 0.0
        reports = self.bench.land(tuple(bad))
        self.bench.late.share = share
        beside = [report.sequence for report in reports if report.again]
        failed = [report for report in reports if report.error is not None and not report.again]
        drafts = set() if plan.drafts is None else set(np.flatnonzero(plan.drafts))
        unwell = {report.sequence.handle for report in failed}
        # What a draft yields counts only if the draft is kept.
        # Of sequences that share blocks, those that had failed before the step was computed are computed again.
        assert unwell >= {plan.handles[row] for row in bad - drafts} & running - doubtful
        assert unwell <= {plan.handles[row] for row in bad}
        for report in failed:
            assert report.error == "the model's logits are not finite"
            assert report.sequence.status is Status.FAILED
        assert all(one.handoff and one.status is Status.FAILED for one in beside)

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            while self.bench.flight:
                self.bench.land()
            for _, reservation in self.reserved:
                reservation.release()
            self.bench.drain()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=12, stateful_step_count=50, deadline=None)


@pytest.mark.more
class TestSchedulerOften(SchedulerMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
