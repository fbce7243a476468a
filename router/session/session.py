"""The life of one request: it is placed, followed, placed again if a worker fails it, and ended everywhere at once.

    [restore] -> wait for capacity -> place -> follow the attempt's tokens -> finish
                   ^                             | a worker is lost, or returns the request
                   +-----------------------------+ prompt + tokens so far; avoids these workers; first in the queue

An attempt that fails because a worker drains is a migration: neither the retry budget nor max_attempts limits it. One
that fails because of a lost, frozen or suspected worker, or a way to it that was not known to be broken, is outside the
budget. A request that was running on a lost worker is tried apart from others like it
(`router/session/suspects.py`), and fails if that ends a second worker.

A call that continues a request whose earlier call was lost, at this router or another one, begins with the tokens that
the client has: it ends what the earlier call still has on the workers, restores the completion, and is placed as after
a failed attempt. A call that is continued by a later one ends as ABORTED.

However the request ends (finish, stop string, error, client gone), it is cancelled on every worker that still has a
part of it. Every wait has a limit:

    what it waits for  limit                                                    error
    room for its KV    first_token_timeout, in the router's queue               RESOURCE_EXHAUSTED
    first token        first_token_timeout, from receipt                        DEADLINE_EXCEEDED; RESOURCE_EXHAUSTED if
                                                                                a worker said that it waits there
    next token         idle_timeout, from the previous token or sign (below)    none: another attempt
    a suspected worker SUSPECT_SECONDS, from the previous token                 none: another attempt
    a worker           worker_wait; after a failed attempt, idle_timeout         UNAVAILABLE
    other suspects     idle_timeout, from the failed attempt                     UNAVAILABLE
    any of these       the client's own deadline                                DEADLINE_EXCEEDED

A sign is a worker's word that the request waits there, e.g. since others needed its KV blocks, for as long as anything
comes from that worker; or that so much of the prompt is computed.
"""

import asyncio
import logging
import math
import random
from array import array
from collections.abc import Callable
from functools import partial

from kvrelay.internal.v1.worker_pb2 import Failure
from kvrelay.router.errors import (
    DeadlineExceeded,
    GivenUp,
    InternalError,
    InvalidArgument,
    QueueOverflow,
    RequestError,
    Superseded,
    TargetMissed,
    Unavailable,
)
from kvrelay.router.placing.health import Evidence
from kvrelay.router.placing.placement import NoPlace, Placement
from kvrelay.router.placing.prefixes import UNIT, extended
from kvrelay.router.placing.prospects import Prospect
from kvrelay.router.placing.queue import QueueFull
from kvrelay.router.request.validation import CheckedRequest
from kvrelay.router.session.alarm import Alarm
from kvrelay.router.session.attempt import Attempt, AttemptFailure
from kvrelay.router.session.dispatch import Dispatch
from kvrelay.router.session.needs import Needs
from kvrelay.router.session.output import Output, Piece, Sink
from kvrelay.router.session.suspects import Suspicion, shape_of
from kvrelay.router.trace import RequestTrace
from kvrelay.rpc.identity import WorkerId
from kvrelay.rpc.log import reason
from kvrelay.v1.inference_pb2 import FINISH_REASON_UNSPECIFIED, FinishReason

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.25
"""Longest wait in seconds of the last message, which has no tokens then, for the transfer's report."""

BACKOFF_SECONDS = 0.05
"""Pause before an attempt that follows a refusal; doubles with each attempt, up to LONGEST_BACKOFF_SECONDS."""
LONGEST_BACKOFF_SECONDS = 1.0

LOSS_SECONDS = 1.0
"""Longest time in seconds until the loss of a worker shows here after another worker has reported it."""

FIRST_TOKEN_SECONDS = 0.2
"""Longest wait in seconds for the first token after the loss of the decode worker that already has its KV."""

SUSPECT_SECONDS = 1.0
"""Longest time in seconds that a suspected worker may send a request nothing, if others can take it. It is frozen, or
its engine hangs, and will be declared dead a while later."""

MIN_SUBMIT_SECONDS = 0.001
"""Time limit of a request that expires while it is placed: 0 would mean the worker's own limit."""


class Session:
    """One checked request, until its end."""

    def __init__(
        self,
        request: CheckedRequest,
        dispatch: Dispatch,
        trace: RequestTrace,
        sink: Sink,
        deadline: float,
        *,
        refusable: bool = False,
    ) -> None:
        """
        Args:
            trace: has the request's ids and prompt length; written while the request runs.
            deadline: the client's, on the monotonic clock; infinite for none.
            refusable: whether no other part of its call has begun or waits.
        """
        self._request, self._dispatch, self._trace = request, dispatch, trace
        self._placing = dispatch.placing
        self._output, self._deadline = Output(request, trace, sink, dispatch), deadline
        self._refusable = refusable and not request.index and not request.resumes
        self._needs = Needs(request, trace, dispatch)
        self._avoid: frozenset[WorkerId] = frozenset()
        self._tried = self._avoid
        self._suspicion = Suspicion()
        self._evidence: Evidence | None = None
        """Evidence of the current attempt about its workers."""
        self._alarm = Alarm(self._wake_attempt, dispatch.clock)
        self._following: Attempt | None = None
        self._proven: Attempt | None = None
        """The attempt whose workers are known to work, and which is not on trial."""

    async def run(self) -> FinishReason:
        """Writes the whole stream, the last message included.

        Raises:
            RequestError: it ended without a completion; no worker has a part of it any more.
        """
        self._dispatch.budget.request()
        if finish_reason := await self._restore():
            await self._output.finish(Piece("", (), finish_reason))
            return finish_reason
        attempt = await self._place_first()
        self._dispatch.pacer.begin(self._request.claim.tenant)
        try:
            while not (finish_reason := await self._follow(attempt)):
                attempt = await self._retry(attempt)
            return finish_reason
        finally:
            self._dispatch.pacer.end(self._request.claim.tenant)
            self._alarm.close()
            attempt.close()
            self._learn_answer(attempt)
            self._end_evidence()
            self._needs.ended()

    def _learn_answer(self, attempt: Attempt) -> None:
        """Adds prompt and answer to the prefix index of the last worker: the next turn of the conversation begins with
        them."""
        request, known = self._request, len(self._request.chain)
        # The last token has no KV.
        answer = self._output.tokens[:-1]
        rest = len(request.prompt) - known * UNIT
        if attempt.delivered and answer and rest + len(answer) >= UNIT:
            tokens = array("I", request.tail[len(request.tail) - rest :])
            tokens.extend(answer)
            chain = extended(request.chain, tokens, request.namespace)
            self._placing.policy.answered(attempt.last_worker, chain)
            attempt.answered(chain)

    def _wake_attempt(self) -> None:
        """Wakes the waiting session, because one of its limits may have passed."""
        if self._following is not None:
            self._following.tokens.wake()

    async def _restore(self) -> FinishReason:
        """Continues an earlier call; returns how that one ended the completion, unspecified if it didn't."""
        call = self._request.client_call
        if call is not None and call.call > 1:
            self._placing.registry.fence(call)
        return await self._output.restore()

    # One attempt.

    async def _place_first(self) -> Attempt:
        """Places the request as soon as there is capacity for it.

        Raises:
            RequestError: there are no workers, the queue is full, or the time limit has passed.
        """
        queue = self._placing.queue
        asked = self._trace.asked = self._dispatch.clock()
        limit = min(self._token_limit(), self._deadline)
        workers_by = min(limit, asked + self._dispatch.config.worker_wait_seconds)
        try:
            # A stream that has begun goes before the requests that wait, as after a failed attempt.
            begun = self._trace.resumed_tokens > 0
            claim = self._request.claim
            prospect = self._prospect()
            if prospect is not None:
                limit = min(limit, claim.due - prospect.compute)
            while True:
                demand = self._needs.demand(self._avoid)
                self._needs.queued(demand)
                attempt = await queue.place(demand, limit, self._start, claim, first=begun, on_wait=self._waits)
                if attempt is not NoPlace.NO_WORKERS or not await self._workers_change(workers_by):
                    break
        except QueueFull:
            text = f"{len(queue)} requests wait for workers with capacity, the router's max_queue"
            raise self._placing.full(text, QueueOverflow) from None
        finally:
            self._trace.router_queue_seconds = self._dispatch.clock() - asked
        if not isinstance(attempt, NoPlace):
            if prospect is not None:
                self._placing.prospects.learn(prospect, self._trace.router_queue_seconds)
            return attempt
        if attempt is NoPlace.NO_CAPACITY:
            if prospect is not None and limit == claim.due - prospect.compute:
                raise self._misses(self._placing.prospects.of(demand, claim) or prospect)
            # The limit tells why the waiting ended, not the clock: a timer of uvloop may be a millisecond early.
            raise self._late() if limit == self._deadline else self._shed("for workers with capacity")
        self._check_deadline()
        raise Unavailable("no worker can take the request now: none is ready that decodes")

    def _prospect(self) -> Prospect | None:
        """The prospect of the request; None if it is served in any case.

        Raises:
            TargetMissed: it can't meet the targets of its class.
        """
        claim, dispatch = self._request.claim, self._dispatch
        if not self._refusable or not claim.service.has_targets or dispatch.config.admission != "predicted":
            return None
        prospect = dispatch.placing.prospects.of(self._needs.demand(self._avoid), claim)
        if prospect is None or prospect.alone:
            return None
        if prospect.late(claim.service, dispatch.clock() - self._trace.received):
            raise self._misses(prospect)
        return prospect

    def _start(self, placement: Placement, *, on_trial: bool = False) -> Attempt:
        trace, registry = self._trace, self._placing.registry
        trace.attempts += 1
        self._dispatch.metrics.attempted()
        self._tried |= placement.workers
        streams = [registry.stream(worker) for worker in placement.each]
        self._needs.placed(registry.degrees(placement.each))
        attempt = Attempt(
            self._request,
            trace,
            self._output.tokens,
            streams[0],
            None if placement.decode is None else streams[-1],
            self._placing.policy.take(placement, self._request.chain),
            suspect_tokens=self._suspicion.tokens_left(trace.completion_tokens),
            on_trial=on_trial,
        )
        trace.latest.why = placement.why
        self._evidence = self._placing.health.begin(placement.prefill, placement.decode)
        self._output.progress = now = self._dispatch.clock()
        first_seconds = max(MIN_SUBMIT_SECONDS, min(self._token_limit(), self._deadline) - now)
        idle_seconds = self._dispatch.config.idle_timeout_seconds
        attempt.submit(first_seconds, idle_seconds, self._needs.urgency(now), self._needs.expected_tokens())
        return attempt

    async def _follow(self, attempt: Attempt) -> FinishReason:
        """Writes the attempt's tokens as they come, up to the finish; unspecified if the attempt failed."""
        while True:
            taken = attempt.tokens.take()
            if taken.token_ids or taken.finish_reason:
                piece = self._output.add(taken)
                self._note_success(attempt, finished=bool(piece.finish_reason))
                if piece.finish_reason:
                    await self._end(attempt, piece)
                    return piece.finish_reason
                await self._output.write(piece, attempt)
            elif attempt.failure is not None:
                return FINISH_REASON_UNSPECIFIED
            elif self._in_time(attempt):
                relays = attempt is self._proven and self._output.plain
                await attempt.tokens.wait(partial(self._output.relay, attempt) if relays else None)
                # One message of a worker may have something for hundreds of sessions.
                await self._dispatch.turns.take(self._request.claim.tenant)
                if self._output.defect is not None:
                    raise self._output.defect

    def _note_success(self, attempt: Attempt, *, finished: bool) -> None:
        if attempt is self._proven and not finished:
            return
        if self._evidence is not None and attempt.delivered:
            self._evidence.delivered()
            if finished:
                self._evidence.finished()
        if finished or not self._suspicion.tokens_left(self._trace.completion_tokens):
            self._proven = attempt if attempt.delivered else None

    def _end_evidence(self) -> None:
        if self._evidence is not None:
            self._evidence.end()

    def _in_time(self, attempt: Attempt) -> bool:
        """Whether no limit of the attempt has passed; sets the alarm for the earliest one. Acts on one that has."""
        token_limit = self._token_limit(attempt)
        suspect_limit = self._suspect_limit(attempt)
        earliest = min(token_limit, suspect_limit, attempt.decide_by, self._deadline)
        if self._dispatch.clock() < earliest:
            self._following = attempt
            self._alarm.set(earliest)
            return True
        self._check_deadline()
        if earliest == token_limit and not self._output.begun:
            raise self._shed("on its workers") if attempt.waits else self._no_first_token()
        if earliest == suspect_limit:
            attempt.fail_suspected()
        elif earliest == attempt.decide_by:
            attempt.fail_handoff()
        else:
            attempt.fail_silent(f"no token for {self._dispatch.config.idle_timeout_seconds:g} s")
        return False

    def _token_limit(self, attempt: Attempt | None = None) -> float:
        """Monotonic time by which the next token must be here, or a sign that the attempt's workers have it in hand."""
        if not self._output.begun:
            return self._trace.received + self._request.first_token_seconds
        return self._latest(attempt) + self._dispatch.config.idle_timeout_seconds

    def _latest(self, attempt: Attempt | None) -> float:
        """Monotonic time of the latest token, or sign of its workers."""
        return max(self._output.progress, -math.inf if attempt is None else attempt.sign)

    def _suspect_limit(self, attempt: Attempt) -> float:
        """Monotonic time by which the next token must be here if it has to come from a suspected worker."""
        suspects = attempt.suspects
        if not suspects or not self._placing.registry.can_spare(suspects):
            return math.inf
        return self._latest(attempt) + SUSPECT_SECONDS

    # The end.

    async def _end(self, attempt: Attempt, piece: Piece) -> None:
        """Ends the request on its workers; writes the last tokens and the figures, in one message where possible."""
        attempt.stop()
        finish_reason = piece.finish_reason
        if attempt.transferring:
            await self._output.write(piece)
            piece = Piece("", (), finish_reason)
            try:
                async with asyncio.timeout(REPORT_SECONDS):
                    while attempt.transferring:
                        await attempt.tokens.wait()
            except TimeoutError:
                logger.warning("no transfer report", extra=self._trace.log_fields)
        attempt.close()
        await self._output.finish(piece)

    # Another attempt.

    async def _retry(self, failed: Attempt) -> Attempt:
        """Places the request again after a failed attempt.

        Raises:
            RequestError: another attempt is not allowed, or not possible.
        """
        failure = failed.failure
        if failure is None:
            raise InternalError(f"attempt {failed.number} ended without a finish or a failure")
        self._trace.failed(failure.reason)
        self._dispatch.metrics.attempt_failed(failure.reason)
        if failure.cause == Failure.CAUSE_TRIAL:
            failed.close()
            return await self._come_again(failure)
        excused = self._learn(failure)
        if failure.code == Failure.CODE_FENCED:
            self._dispatch.metrics.superseded()
            raise Superseded(failure.message)
        moves = failure.cause == Failure.CAUSE_DRAINING
        told = reason(failure.code, failure.message)
        why = {"reason": told, "cause": Failure.Cause.Name(failure.cause)}
        logger.warning("request moves" if moves else "attempt failed", extra=self._trace.log_fields | why)
        self._trace.delayed("moved" if moves else "failed", told)
        if failure.code == Failure.CODE_INVALID:
            # The worker's limits differ from those that the router checked.
            raise InvalidArgument(failure.message)
        if failure.code not in (Failure.CODE_RETRY, Failure.CODE_FULL):
            raise InternalError(failure.message)
        self._avoid |= failure.blamed
        self._suspicion.failed = self._dispatch.clock()
        if moves:
            failed.close()
            self._trace.migrations += 1
            return await self._place_again(failure)
        tries = failed.number - self._trace.migrations - self._trace.turned_away
        if not failure.lost:
            await asyncio.sleep(self._backoff(tries))
            if failure.cause == Failure.CAUSE_PEER_LOST:
                await failed.loss_shows(LOSS_SECONDS)
            self._check_deadline()
        await self._judge(failed)
        failed.close()
        if tries >= self._dispatch.config.max_attempts:
            raise self._given_up(failure, f"after {tries} attempts")
        excused = excused or failure.lost or failed.lost_worker or self._placing.registry.doubts(failed.workers)
        if not excused and not self._dispatch.budget.take():
            raise self._given_up(failure, "the router's retry budget is spent")
        return await self._place_again(failure)

    def _backoff(self, tries: int) -> float:
        """Seconds of the pause behind so many refused attempts, up to the earliest limit of the request."""
        left = min(self._token_limit(), self._deadline) - self._dispatch.clock()
        return min(BACKOFF_SECONDS * 2.0 ** (tries - 1), LONGEST_BACKOFF_SECONDS, max(0.0, left))

    async def _come_again(self, failure: AttemptFailure) -> Attempt:
        """Places a suspect again that has found another one on a worker.

        Raises:
            RequestError: it has waited for long enough.
        """
        self._end_evidence()
        self._trace.turned_away += 1
        logger.info("request waits for a trial", extra=self._trace.log_fields | {"reason": failure.message})
        self._trace.delayed("wait", failure.message)
        # The pause is random: two suspects that hold one worker each, and want both, would otherwise refuse each other
        # again and again.
        await asyncio.sleep(BACKOFF_SECONDS * random.uniform(0.5, 1.5))
        self._check_deadline()
        if self._dispatch.clock() >= self._suspicion.failed + self._dispatch.config.idle_timeout_seconds:
            raise self._given_up(failure, "other suspects are tried all the time")
        return await self._place_again(failure)

    def _learn(self, failure: AttemptFailure) -> bool:
        """Notes what the failure shows about the workers; returns whether it was news of ill workers or a broken way.

        The router could not have known, so the retry is outside the budget. Retries over what is known to fail are not,
        so a cluster without a working way doesn't retry without limit.
        """
        evidence, registry = self._evidence, self._placing.registry
        if evidence is None:
            return False
        if failure.cause == Failure.CAUSE_DRAINING:
            registry.drains(failure.blamed)
        elif failure.handoff:
            evidence.handoff_failed()
        elif failure.code in (Failure.CODE_RETRY, Failure.CODE_INTERNAL) and not failure.lost:
            evidence.failed(failure.reporters)
        evidence.end()
        return (failure.handoff or failure.silent) and not evidence.doubtful

    async def _judge(self, failed: Attempt) -> None:
        """Suspects the request if a worker was lost that may have been computing it.

        Raises:
            InternalError: it has ended too many workers.
        """
        await failed.first_token_shows(FIRST_TOKEN_SECONDS)
        lost = failed.lost_while_computing()
        if self._suspicion.losses:
            lost = [part for part in lost if await part.stream.ended()]
        tried = any(part.tried for part in lost)
        if not lost or not self._suspicion.lost(self._trace.completion_tokens, tried=tried):
            return
        shape = shape_of(self._request.sampling, self._trace) | {"losses": self._suspicion.losses}
        logger.error("request suspected of ending workers", extra=self._trace.log_fields | shape)
        raise InternalError(self._suspicion.verdict)

    async def _place_again(self, failure: AttemptFailure) -> Attempt:
        """Waits for workers if there are none: a replacement of the lost one may be starting."""
        now, begun = self._dispatch.clock(), self._output.begun
        limit = min(self._token_limit(), now + self._dispatch.config.idle_timeout_seconds, self._deadline)
        # A stream that has begun waits for room as long as a new request.
        room_by = min(now + self._request.first_token_seconds, self._deadline) if begun else limit

        def start(placement: Placement, *, on_trial: bool = False) -> Attempt:
            if failure.code == Failure.CODE_FULL and placement.workers <= self._tried and not begun:
                raise self._given_up(failure, "no other worker to try")
            return self._start(placement, on_trial=on_trial)

        while True:
            attempt = await self._place_on_trial(limit, partial(start, on_trial=True))
            if attempt is NoPlace.NO_CAPACITY:
                attempt = await self._placing.queue.place(
                    self._needs.demand(self._avoid), room_by, start, first=True, on_wait=self._waits
                )
            if attempt is NoPlace.NO_CAPACITY:
                self._check_deadline()
                raise self._given_up(failure, "no worker with capacity")
            if attempt is not NoPlace.NO_WORKERS:
                return attempt
            if not await self._workers_change(limit):
                self._check_deadline()
                raise self._given_up(failure, "no worker replaced the lost one")

    async def _workers_change(self, limit: float) -> bool:
        """Waits for a change of the workers; False if there is none until `limit`."""
        self._waits()
        try:
            async with asyncio.timeout(limit - self._dispatch.clock()):
                await self._placing.registry.changed()
        except TimeoutError:
            return False
        return True

    async def _place_on_trial(self, limit: float, start: Callable[[Placement], Attempt]) -> Attempt | NoPlace:
        """Places a suspect on workers without another one; NO_CAPACITY for want of such workers, or if it is none."""
        until = min(limit, self._suspicion.tried_by(self._dispatch.config.idle_timeout_seconds))
        if self._dispatch.clock() >= until or not self._suspicion.tokens_left(self._trace.completion_tokens):
            return NoPlace.NO_CAPACITY
        return await self._placing.trials.place(self._needs.demand(self._avoid, on_trial=True), until, start)

    def _check_deadline(self) -> None:
        if self._dispatch.clock() >= self._deadline:
            raise self._late()

    def _late(self) -> RequestError:
        return DeadlineExceeded("the client's deadline has passed")

    def _no_first_token(self) -> RequestError:
        limit = self._request.first_token_seconds
        return DeadlineExceeded(f"no token within the router's first_token_timeout_seconds, {limit:g}")

    def _misses(self, prospect: Prospect) -> RequestError:
        service = self._request.claim.service
        self._dispatch.metrics.refused(service.name)
        first = prospect.queue + prospect.wait + prospect.compute
        text = f"it would have its first token after {first:.2f} s and the next ones each {prospect.tpot:.3f} s"
        targets = f"{service.ttft_seconds:g} s and {service.tpot_seconds:g} s"
        return TargetMissed(f"{text}; the targets of the class {service.name} are {targets}", prospect.delay(service))

    def _shed(self, where: str) -> RequestError:
        seconds = self._request.first_token_seconds
        return self._placing.full(
            f"it waited {where} for first_token_timeout_seconds, {seconds:g}; the cluster is full"
        )

    def _given_up(self, failure: AttemptFailure, why: str) -> RequestError:
        if failure.code == Failure.CODE_FULL:
            return self._placing.full(f"the cluster is full ({why}): {failure.message}")
        return GivenUp(f"given up ({why}): {failure.message}")

    def _waits(self) -> None:
        self._trace.delayed("wait", self._placing.why_waiting(self._needs.demand(self._avoid)))
