"""The life of one request: placed, followed, placed anew where a worker fails it, ended everywhere at once.

    wait for room -> place -> follow the attempt's tokens -> finish
      ^                             | a worker lost, or gives the request back
      +-----------------------------+ prompt + tokens so far, other workers preferred; first in the queue

However it ends (finish, stop string, error, the client gone), whatever a worker still has of it is cancelled. Who waits
for what, and for how long at most:

    room on decode  first_token_timeout, in the router's queue               DEADLINE_EXCEEDED
    first token     first_token_timeout, from receipt                        DEADLINE_EXCEEDED
    next token      idle_timeout, from the last one                          another attempt
    a worker        idle_timeout, where an attempt had failed before         UNAVAILABLE
    anything        the client's own deadline                                DEADLINE_EXCEEDED
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvrelay.internal.v1.worker_pb2 import Failure
from kvrelay.router.alarm import Alarm
from kvrelay.router.attempt import Attempt, AttemptFailure
from kvrelay.router.budget import RetryBudget
from kvrelay.router.completion import Completion, Finish, Piece
from kvrelay.router.config import RouterConfig
from kvrelay.router.detokenizer import TokenBytes
from kvrelay.router.errors import (
    DeadlineExceeded,
    Exhausted,
    InternalError,
    RefusedByWorker,
    RequestError,
    Unavailable,
)
from kvrelay.router.placement import Demand, NoPlace, Placement, WorkerKey
from kvrelay.router.queue import PlacementQueue, QueueFull
from kvrelay.router.records import RequestTrace
from kvrelay.router.registry import WorkerRegistry
from kvrelay.router.validation import CheckedRequest
from kvrelay.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FinishReason,
    GenerateResponse,
    Usage,
)

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.25
"""How long the last message, which has no tokens, may wait for prefill's figures of the hand-off."""

BACKOFF_SECONDS = 0.05
"""Before an attempt that follows a refusal; doubles each time."""

MIN_SUBMIT_SECONDS = 0.001
"""Of a request whose time is up as it is placed: for a worker, 0 would mean its own limit."""

RETRY_DELAY_SECONDS = 1.0
"""When a client that was refused for want of room should come again."""

FINISH_REASONS: dict[Finish, FinishReason] = {
    Finish.STOP: FINISH_REASON_STOP,
    Finish.LENGTH: FINISH_REASON_LENGTH,
}

Write = Callable[[GenerateResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What all sessions of a router share."""

    config: RouterConfig
    pool: WorkerRegistry
    queue: PlacementQueue
    budget: RetryBudget
    token_bytes: TokenBytes


class Session:
    """One request, from checked to ended."""

    def __init__(self, request: CheckedRequest, dispatch: Dispatch, journal: RequestTrace, deadline: float) -> None:
        """
        Args:
            journal: written as the request goes on.
            deadline: the client's, on the monotonic clock; infinite for none.
        """
        self._request = request
        self._dispatch = dispatch
        self._journal = journal
        self._deadline = deadline
        self._completion = Completion(request, dispatch.token_bytes)
        self._attempts = 0
        self._avoid: frozenset[WorkerKey] = frozenset()
        self._tried: frozenset[WorkerKey] = frozenset()
        self._alarm = Alarm(self._time_is_up)
        self._following: Attempt | None = None
        self._progress = journal.received
        """When the client last got a token, or an attempt began."""

    @property
    def completion_tokens(self) -> int:
        return len(self._completion.tokens)

    async def run(self, write: Write) -> Finish:
        """Writes the whole stream, the last message included.

        Raises:
            RequestError: it ended without a completion; nothing of it is left on any worker.
        """
        self._dispatch.budget.request()
        attempt = await self._first()
        try:
            while True:
                finish = await self._follow(attempt, write)
                if finish is not None:
                    return finish
                attempt = await self._again(attempt)
        finally:
            self._alarm.close()
            attempt.close()

    def _time_is_up(self) -> None:
        """A limit may have passed; who waits looks at it."""
        if self._following is not None:
            self._following.wake()

    # One attempt.

    async def _first(self) -> Attempt:
        """Places the request, once there is room for it.

        Raises:
            RequestError: there are no workers, too many wait already, or its time is up.
        """
        queue = self._dispatch.queue
        asked = time.monotonic()
        try:
            attempt = await queue.place(self._demand(), min(self._token_limit(), self._deadline), self._start)
        except QueueFull:
            full = f"{len(queue)} requests wait for room on a decode worker, the router's max_queue"
            raise Exhausted(full, RETRY_DELAY_SECONDS) from None
        finally:
            self._journal.router_queue_seconds = time.monotonic() - asked
        if attempt is NoPlace.NO_ROOM:
            self._check_deadline()
            raise self._no_first_token("; it waited for room on a decode worker")
        if attempt is NoPlace.NO_WORKERS:
            raise Unavailable(
                "no worker can take the request now: it needs a prefill and a decode worker that are ready"
            )
        return attempt

    def _demand(self) -> Demand:
        left = self._request.sampling.max_tokens - self.completion_tokens
        work = len(self._request.tokens) + self.completion_tokens
        return Demand(work, left - 1, self._avoid)

    def _start(self, placement: Placement) -> Attempt:
        self._attempts += 1
        self._tried |= placement.workers
        pool = self._dispatch.pool
        attempt = Attempt(
            self._request,
            self._attempts,
            tuple(self._completion.tokens),
            pool.link(placement.prefill),
            None if placement.decode is None else pool.link(placement.decode),
        )
        self._journal.prefill_worker = attempt.prefill_worker
        self._journal.decode_worker = attempt.decode_worker
        now = time.monotonic()
        if self._journal.submitted is None:
            self._journal.submitted = now
        self._journal.retries = self._attempts - 1
        self._progress = now
        first_seconds = max(MIN_SUBMIT_SECONDS, min(self._token_limit(), self._deadline) - now)
        attempt.submit(first_seconds, self._dispatch.config.idle_timeout_seconds)
        return attempt

    async def _follow(self, attempt: Attempt, write: Write) -> Finish | None:
        """Writes the attempt's tokens as they come; None when it failed."""
        while True:
            token_ids, finish = attempt.take()
            if token_ids or finish is not None:
                piece = self._completion.add(token_ids, finish)
                self._take_reports(attempt)
                if piece.finish is not None:
                    await self._end(attempt, piece, piece.finish, write)
                    return piece.finish
                await self._send(write, self._message(piece))
            elif attempt.failure is not None:
                self._take_reports(attempt)
                return None
            else:
                await self._wait(attempt)

    async def _wait(self, attempt: Attempt) -> None:
        """Waits for the attempt's next event, or until the first of the limits; acts on one that has passed."""
        token_limit = self._token_limit()
        decide_by = math.inf if attempt.decide_by is None else attempt.decide_by
        first = min(token_limit, decide_by, self._deadline)
        if time.monotonic() < first:
            self._following = attempt
            self._alarm.set(first)
            await attempt.wait()
            return
        self._check_deadline()
        if first == token_limit and not self._completion.tokens:
            raise self._no_first_token()
        if first == decide_by:
            attempt.decide()
        else:
            attempt.give_up(f"no token for {self._dispatch.config.idle_timeout_seconds:g} s")

    def _token_limit(self) -> float:
        """When the next token must be here, on the monotonic clock."""
        config = self._dispatch.config
        if not self._completion.tokens:
            return self._journal.received + config.first_token_timeout_seconds
        return self._progress + config.idle_timeout_seconds

    # The end.

    async def _end(self, attempt: Attempt, piece: Piece, finish: Finish, write: Write) -> None:
        """Ends the request on its workers, and writes the last tokens and the last message: one, where possible."""
        attempt.stop()
        if attempt.transferring:
            await self._send(write, self._message(piece))
            piece = Piece("", (), finish)
            try:
                async with asyncio.timeout(REPORT_SECONDS):
                    while attempt.transferring:
                        await attempt.wait()
            except TimeoutError:
                logger.warning("no transfer report", extra=self._fields())
        self._take_reports(attempt)
        attempt.close()
        last = self._message(piece)
        last.finish_reason = FINISH_REASONS[finish]
        prefill = self._journal.prefill
        last.usage.CopyFrom(
            Usage(
                prompt_tokens=len(self._request.tokens),
                completion_tokens=self.completion_tokens,
                cached_tokens=0 if prefill is None else min(prefill.cached_tokens, len(self._request.tokens)),
            )
        )
        now = time.monotonic()
        if piece.token_ids:
            self._note_sent(now)
        last.timeline.CopyFrom(self._journal.timeline(now))
        await write(last)

    def _take_reports(self, attempt: Attempt) -> None:
        journal = self._journal
        if journal.prefill is None:
            journal.prefill = attempt.prefill_report
        if attempt.transfer_report is not None:
            journal.transfers[attempt.number] = attempt.transfer_report
        if attempt.decode_report is not None:
            journal.decode = attempt.decode_report

    def _message(self, piece: Piece) -> GenerateResponse:
        return GenerateResponse(request_id=self._request.request_id, text=piece.text, token_ids=piece.token_ids)

    async def _send(self, write: Write, message: GenerateResponse) -> None:
        await write(message)
        self._note_sent(time.monotonic())

    def _note_sent(self, now: float) -> None:
        if self._journal.first_sent is None:
            self._journal.first_sent = now
        self._journal.last_sent = self._progress = now

    # Another attempt.

    async def _again(self, failed: Attempt) -> Attempt:
        """Places the request anew after a failed attempt.

        Raises:
            RequestError: it must not, or can't, be tried again.
        """
        failure = failed.failure
        if failure is None:
            raise InternalError(f"attempt {failed.number} was given up without a failure")
        failed.close()
        logger.warning("attempt failed", extra=self._fields() | {"reason": failure.message})
        if failure.code == Failure.CODE_INVALID:
            raise RefusedByWorker(failure.message)
        if failure.code not in (Failure.CODE_RETRY, Failure.CODE_FULL):
            raise InternalError(failure.message)
        if failed.number >= self._dispatch.config.max_attempts:
            raise self._given_up(failure, f"after {failed.number} attempts")
        self._avoid |= failure.blamed
        if not failure.lost:
            # Who is told of a broken hand-off by the survivor is told of the loss itself a moment later.
            await asyncio.sleep(BACKOFF_SECONDS * 2 ** (failed.number - 1))
            self._check_deadline()
            if not failed.lost_worker and not self._dispatch.budget.take():
                raise self._given_up(failure, "the router's retry budget is spent")
        return await self._place_again(failure)

    async def _place_again(self, failure: AttemptFailure) -> Attempt:
        """Waits for workers where there are none: the lost one's replacement may be on its way."""
        limit = min(self._token_limit(), time.monotonic() + self._dispatch.config.idle_timeout_seconds, self._deadline)

        def start(placement: Placement) -> Attempt:
            if failure.code == Failure.CODE_FULL and placement.workers <= self._tried:
                raise self._given_up(failure, "no other worker to try")
            return self._start(placement)

        while True:
            attempt = await self._dispatch.queue.place(self._demand(), limit, start, first=True)
            if attempt is NoPlace.NO_ROOM:
                self._check_deadline()
                raise self._given_up(failure, "no room on a decode worker")
            if attempt is not NoPlace.NO_WORKERS:
                return attempt
            try:
                async with asyncio.timeout(limit - time.monotonic()):
                    await self._dispatch.pool.changed()
            except TimeoutError:
                self._check_deadline()
                raise self._given_up(failure, "no worker has come in its place") from None

    def _check_deadline(self) -> None:
        if time.monotonic() >= self._deadline:
            raise DeadlineExceeded("the client's deadline has passed")

    def _no_first_token(self, why: str = "") -> RequestError:
        limit = self._dispatch.config.first_token_timeout_seconds
        return DeadlineExceeded(f"no token within the router's first_token_timeout_seconds, {limit:g}{why}")

    def _given_up(self, failure: AttemptFailure, why: str) -> RequestError:
        if failure.code == Failure.CODE_FULL:
            return Exhausted(f"the cluster is full ({why}): {failure.message}", RETRY_DELAY_SECONDS)
        return Unavailable(f"given up ({why}): {failure.message}")

    def _fields(self) -> dict[str, object]:
        """What every log line of this request carries."""
        return {
            "request": self._request.wire_id,
            "attempt": self._attempts,
            "prefill": self._journal.prefill_worker,
            "decode": self._journal.decode_worker,
        }
