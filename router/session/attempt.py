"""One placement of a request: its parts on one or two workers, merged into one sequence of tokens.

Each worker sends its own events in order; the events of two workers arrive in any order between them. The prefill
worker sends the token at index `base`, the decode worker those from `base + 1` on, often before the first one is here:

    prefill   [base]
    decode            [base+1] [base+2] ...

A decode worker that has sent a token has all of the KV. From then on, the attempt survives the loss of its prefill
worker.

    seen      [base .............. next)        the tokens without a gap; later ones wait in the stash

Between `pause` and the moment that it names, tokens gather: the session sleeps. The pacer lets them go some time after
the first token that comes after that moment, or when the first gathered one has waited for long enough
(`router/session/pacer.py`). The last token and `flush` let them go at once. Then the session takes all of them: its
`relay` at once if it can, without waking its task, which costs as much as the rest of a token's way.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from kvrelay.internal.v1.worker_pb2 import (
    PHASE_COLOCATED,
    PHASE_DECODE,
    PHASE_PREFILL,
    WAIT_BLOCKS,
    WAIT_PREEMPTED,
    WAIT_ROW,
    WAIT_TURN,
    WAIT_UNSPECIFIED,
    Failure,
    PeerRef,
    Phase,
    RequestEvent,
    Urgency,
    Wait,
)
from kvrelay.router.placing.prefixes import Expectation
from kvrelay.router.placing.worker_stream import WorkerStream
from kvrelay.router.request.validation import CheckedRequest
from kvrelay.router.session.pacer import Pacer
from kvrelay.router.trace import RequestTrace
from kvrelay.rpc.identity import WorkerId
from kvrelay.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_UNSPECIFIED, FinishReason, TokenLogprobs

_CAUSES = {
    Failure.CAUSE_PEER_LOST: "peer_lost",
    Failure.CAUSE_DRAINING: "draining",
    Failure.CAUSE_LINK: "link",
    Failure.CAUSE_REFUSED: "refused",
    Failure.CAUSE_TRIAL: "trial",
}
_CODES = {Failure.CODE_FULL: "full", Failure.CODE_INTERNAL: "internal"}


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Failure of an attempt."""

    code: Failure.Code
    message: str
    blamed: frozenset[WorkerId]
    """Workers that the next attempt should avoid."""
    lost: bool = False
    """Whether a worker was lost; False where a worker returned the request."""
    silent: bool = False
    """Whether workers sent nothing for too long."""
    cause: Failure.Cause = Failure.CAUSE_UNSPECIFIED
    reporters: frozenset[WorkerId] = frozenset()
    """The worker that returned the request; those that were silent; none for a lost worker."""

    @property
    def reason(self) -> str:
        """The reason in one word, for metrics and spans (`ATTEMPT_REASON` in rpc/metrics/families.py)."""
        if self.lost or self.silent:
            return "lost" if self.lost else "silent"
        return _CAUSES.get(self.cause) or _CODES.get(self.code, "other")

    @property
    def handoff(self) -> bool:
        """Whether the hand-off between the two workers failed."""
        return self.cause in (Failure.CAUSE_PEER_LOST, Failure.CAUSE_LINK, Failure.CAUSE_REFUSED)


class Taken(NamedTuple):
    """New tokens of an attempt, which were not taken before."""

    token_ids: list[int]
    finish_reason: FinishReason
    """Unspecified unless the tokens are the last."""
    logprobs: list[TokenLogprobs]
    """One for each token if they were asked for, else none."""
    prompt_logprobs: list[Sequence[TokenLogprobs]]
    """All of them, with the first tokens, if they were asked for; in the parts that the worker sent."""


class AttemptTokens:
    """Tokens on their way from one producer, the attempt, to one consumer, the session; both on one event loop."""

    def __init__(self, base: int, left: int, *, scored: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            base: index of the first token.
            left: most tokens to come.
            scored: whether each has its log-probabilities.
        """
        self.finish_reason: FinishReason = FINISH_REASON_UNSPECIFIED
        self.end: int | None = None
        """Index after the last token, once it is known."""
        self.prompt_logprobs: list[Sequence[TokenLogprobs]] = []
        """Parts of the worker's messages: to make one list of them would hold the event loop for some milliseconds."""
        self._base, self._left, self._scored, self._clock = base, left, scored, clock
        self._seen: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        """Log-probabilities of the tokens in `_seen`, if they were asked for."""
        self._taken = 0
        self._stash: dict[int, tuple[int, TokenLogprobs | None]] = {}
        self._woken = False
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._until = 0.0
        """Monotonic time from which on a new token ends the pause."""
        self._pauses = 0
        """Number of pauses that have begun; a timer of an earlier pause is ignored."""
        self._turn: tuple[Pacer, str] | None = None
        """Pacer, and holder, by which the present pause waits for its turn to end; None once it does."""
        self._held = False
        """Whether the pacer was told of the first token of the present pause."""
        self._relay: Callable[[], bool] | None = None
        """See `wait`; None while nobody waits with one."""

    def __len__(self) -> int:
        """Tokens that are here in order."""
        return len(self._seen)

    @property
    def prompt_scored(self) -> int:
        """Tokens of the prompt whose log-probabilities are here."""
        return sum(map(len, self.prompt_logprobs))

    @property
    def complete(self) -> bool:
        """Whether every token up to the end is here."""
        return self._base + len(self._seen) == self.end

    @property
    def plain(self) -> bool:
        """Whether there is nothing to take but tokens, and their end isn't known."""
        return self.end is None and not self._scored and self._taken > 0

    # From the workers.

    def append(self, index: int, token: int, now: float) -> bool:
        """Takes a token if it is simply the next one; returns whether it was. The last one possible never is."""
        seen = self._seen
        at = len(seen)
        if index != self._base + at or at + 1 >= self._left or self._stash or self._scored or self.end is not None:
            return False
        seen.append(token)
        if self._paused:
            self._gather(now)
        else:
            self._offer()
        return True

    def merge(self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> str:
        """Takes tokens by their indices.

        Returns:
            Description of a token that differs from an earlier one at its index; empty if none does.
        """
        before = len(self._seen)
        for offset, token in enumerate(token_ids):
            at = first_index - self._base + offset
            if at < 0:
                continue
            new = token, logprobs[offset] if self._scored else None
            known = self._seen[at] if at < len(self._seen) else self._stash.setdefault(at, new)[0]
            if known != token:
                return f"sent token {token} at index {self._base + at}, where {known} was sent before"
        while (found := self._stash.pop(len(self._seen), None)) is not None:
            self._seen.append(found[0])
            if found[1] is not None:
                self._logprobs.append(found[1])
        if len(self._seen) > before:
            if self._paused:
                self._gather(self._clock())
            else:
                self.wake()  # no relay: the attempt may have more to note about these tokens
        return ""

    def finish(self, end: int, reason: FinishReason) -> None:
        """The tokens end before index `end`, because of `reason`."""
        self.end, self.finish_reason = end, reason

    def _gather(self, now: float) -> None:
        """Starts the wait of a pause's first token."""
        if now >= self._until:
            self._let_go(self._pauses)
        elif not self._held and self._turn is not None:
            self._held = True
            self._turn[0].hold(self._let_go, self._pauses)

    def _let_go(self, pause: int) -> None:
        """Ends a pause when it is this stream's turn."""
        if pause == self._pauses and self._turn is not None:
            pacer, holder = self._turn
            pacer.due(holder, self._resume, pause)
            self._turn = None

    def _resume(self, pause: int) -> None:
        if pause == self._pauses:
            self._paused = False
            self._offer()

    def _offer(self) -> None:
        if self._relay is None or not self._relay():
            self.wake()

    # Towards the session.

    def pause(self, until: float, pacer: Pacer, holder: str) -> None:
        """Tokens that come before the monotonic time `until` gather, unless no more will come."""
        if not self.complete:
            self._paused, self._until, self._turn, self._held = True, until, (pacer, holder), False
            self._pauses += 1

    def flush(self) -> None:
        """Ends the pause, and wakes the session."""
        self._paused = False
        self.wake()

    def wake(self) -> None:
        """Wakes the session; tokens gather on."""
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, relay: Callable[[], bool] | None = None) -> None:
        """Returns at the next token that doesn't gather, at the end, or at `wake`. For one waiter only.

        Args:
            relay: takes tokens that are due meanwhile, and returns whether it did; else the wait ends. It must not
                raise.
        """
        # An `asyncio.Event` has a queue of waiters, which costs as much as all else here.
        if not self._woken:
            self._waiter, self._relay = asyncio.get_running_loop().create_future(), relay
            try:
                await self._waiter
            finally:
                self._waiter = self._relay = None
        self._woken = False

    def take(self) -> Taken:
        """The new tokens in order, and what was asked for beside them; nothing while tokens gather."""
        if self._paused:
            return NOTHING
        first, self._taken = self._taken, len(self._seen)
        prompt_logprobs = [] if first or not self._taken else self.prompt_logprobs
        reason = self.finish_reason if self.complete else FINISH_REASON_UNSPECIFIED
        return Taken(self._seen[first:], reason, self._logprobs[first:], prompt_logprobs)


NOTHING = Taken([], FINISH_REASON_UNSPECIFIED, [], [])


@dataclass(slots=True)
class Part:
    """An attempt's share of one worker. It counts as one of the stream's requests and suspects while it is one there.

    It has no reference to its attempt: only the garbage collector would free both, and all that a session is, which
    takes it a tenth of a second where many have ended.
    """

    stream: WorkerStream
    phase: Phase
    next_index: int
    """Index of the next token that the worker has to send."""
    suspect_tokens: int
    """Tokens that the worker has yet to send until the request is no suspect there (`router/session/suspects.py`)."""
    on_trial: bool
    """Whether no other suspect may be there until then."""
    open: bool = True
    """Whether the worker may send more events."""
    delivered: bool = False
    """Whether the worker has sent a token."""
    taken: bool = False
    """Whether the worker has said that it has taken a suspect."""
    waits: Wait = WAIT_UNSPECIFIED
    """Reason why the worker computes nothing of the request, as the worker says."""
    computed_at: float = -math.inf
    """Monotonic time at which the worker has told how much of the prompt is computed."""
    returned: bool = False
    """Whether the worker has given the request back."""
    plain: bool = False
    """Whether nothing is to be noted of the worker's next token but the token."""
    _counted: bool = True
    """Whether the part is one of `stream.requests`."""
    _suspect: bool = False
    """Whether the part is one of `stream.suspects`."""

    def __post_init__(self) -> None:
        self.stream.requests += 1
        self._suspect = self.suspect_tokens > 0
        self.stream.suspects += self._suspect

    @property
    def tried(self) -> bool:
        """Whether the request is on trial on the worker, or was when that was lost."""
        return self.on_trial and self.suspect_tokens > 0

    @property
    def sign(self) -> float:
        """Monotonic time of the latest sign that the worker, which sends no token, has the request in hand: it has told
        that it computes the prompt; or it lives, and the request waits there."""
        return self.stream.heard if self.waits else self.computed_at

    def waiting(self, why: Wait) -> None:
        """Notes that the request waits on the worker."""
        self.waits, self.plain = why, False

    def computing(self, now: float) -> None:
        """Notes that the worker computes the prompt."""
        self.waits, self.computed_at = WAIT_UNSPECIFIED, now

    def sent(self, end: int) -> None:
        """Notes that the worker has sent all of its tokens before index `end`."""
        if self.suspect_tokens:
            self.suspect_tokens = max(0, self.suspect_tokens - max(0, end - self.next_index))
            if not self.suspect_tokens:
                self.clear()
        self.waits = WAIT_UNSPECIFIED
        self.next_index = max(self.next_index, end)
        self.delivered = True
        self.plain = not self.suspect_tokens

    def computed(self) -> None:
        """Notes that the worker computes nothing more for this part. Idempotent."""
        self.stream.requests -= self._counted
        self._counted = False

    def clear(self) -> None:
        """Notes that the part isn't a suspect on its worker any more. Idempotent."""
        if self._suspect:
            self._suspect = False
            self.stream.suspect_gone()


PREFILL_LOST_SECONDS = 1.0
"""Time after the loss of the prefill worker in which the decode worker must show that it has the KV."""
WAITS = {
    WAIT_TURN: "it waits for its turn",
    WAIT_BLOCKS: "it waits for KV blocks",
    WAIT_ROW: "it waits for a row of the batch",
    WAIT_PREEMPTED: "others needed its KV blocks",
}
"""Reasons why a request waits on a worker, in words for people."""


class Attempt:
    """Constructed, submitted once, and closed, which cancels it on every worker that still has a part of it."""

    def __init__(
        self,
        request: CheckedRequest,
        trace: RequestTrace,
        generated: Sequence[int],
        prefill: WorkerStream,
        decode: WorkerStream | None,
        expected: Sequence[Expectation] = (),
        *,
        suspect_tokens: int = 0,
        on_trial: bool = False,
    ) -> None:
        """
        Args:
            trace: gets the workers' names and reports; its `attempts` is this attempt's number.
            generated: tokens that the client already has.
            prefill: the worker that computes the prompt and the first token.
            decode: the worker that generates from the second token on: the same stream for a co-located worker, None
                if the first token is the last.
            expected: what each of these streams' workers should have in its cache; ended with the attempt.
            suspect_tokens: tokens that each worker has to send until the request is no suspect there; 0: it is none.
            on_trial: whether no other suspect may be there until then.
        """
        self.number = trace.attempts
        self.failure: AttemptFailure | None = None
        self.decide_by = math.inf
        """Monotonic time by which the decode worker must have sent a token; finite when the prefill worker is lost
        after its own token."""
        self._request = request
        self._trace = trace
        self._key = (request.wire_id, self.number)
        self._generated = tuple(generated)
        self._base = len(generated)
        self._left = request.sampling.max_tokens - len(generated)
        self._wants = request.sampling.HasField("logprobs")
        # A client that has tokens has these too.
        self._wants_prompt = request.sampling.HasField("prompt_logprobs") and not generated
        self.tokens = AttemptTokens(self._base, self._left, scored=self._wants, clock=trace.clock)
        expected_tokens = expected[0].tokens if expected else 0
        trace.placed_on(prefill.worker.name, "" if decode is None else decode.worker.name, expected_tokens)
        self._expected = tuple(expected)
        self._begun = not suspect_tokens
        """Whether the workers may compute the request: a suspect, once each of them has taken it."""

        def part(stream: WorkerStream, phase: Phase, first: int) -> Part:
            return Part(stream, phase, first, suspect_tokens, on_trial)

        self._prefill = part(prefill, PHASE_COLOCATED if decode is prefill else PHASE_PREFILL, self._base)
        self._decode = None if decode in (None, prefill) else part(decode, PHASE_DECODE, self._base + 1)

    # Towards the workers.

    @property
    def workers(self) -> frozenset[WorkerId]:
        return frozenset(part.stream.worker for part in self._parts)

    @property
    def lost_worker(self) -> bool:
        """Whether the router has lost a worker of this attempt."""
        return any(part.stream.lost is not None for part in self._parts)

    @property
    def delivered(self) -> bool:
        """Whether the worker that generates the last token has sent one."""
        return self._parts[-1].delivered

    @property
    def last_worker(self) -> WorkerId:
        """The worker that generates the last token."""
        return self._parts[-1].stream.worker

    def answered(self, chain: Sequence[int]) -> None:
        """Lets other routers know that the last worker has the KV of the prompt and the answer."""
        self._parts[-1].stream.answered(chain)

    def lost_while_computing(self) -> list[Part]:
        """The parts whose workers were lost and may have been computing the request.

        Prefill computes up to the first token, decode at some time after that. To be judged before `close`: until then,
        no other suspect can have been on a worker that has this one on trial.
        """
        return [
            part
            for part in self._parts
            if self._begun
            and part.stream.lost is not None
            and not part.returned
            and (part.phase == PHASE_COLOCATED or self._prefill.delivered == (part.phase == PHASE_DECODE))
        ]

    def submit(self, first_seconds: float, idle_seconds: float, urgency: Urgency, expected_tokens: int = 0) -> None:
        """Sends the parts; decode's first, since the decode worker should know the request before the prefill worker
        offers it the KV.

        Args:
            first_seconds: time limit of the first token.
            idle_seconds: how much later the second token may come.
            urgency: decides its turn on the workers.
            expected_tokens: of the whole completion.
        """
        for part in reversed(self._parts):
            submit = self._request.prompt.submit(self._generated)
            submit.request_id = self._request.wire_id
            submit.attempt = self.number
            submit.prompt_tokens = len(self._request.prompt)
            submit.sampling.CopyFrom(self._request.sampling)
            if not self._wants_prompt or part.phase == PHASE_DECODE:
                submit.sampling.ClearField("prompt_logprobs")
            submit.tenant = self._request.namespace
            submit.chain.extend(self._request.chain)
            if self._request.client_call is not None:
                submit.client_call.CopyFrom(self._request.client_call)
            submit.phase, submit.holder = part.phase, self._request.claim.holder
            submit.expected_tokens = expected_tokens
            submit.urgency.CopyFrom(urgency)
            submit.trace_id = self._trace.context.trace_id
            submit.suspect_tokens, submit.on_trial = part.suspect_tokens, part.on_trial
            submit.timeout_seconds = first_seconds + (idle_seconds if part.phase == PHASE_DECODE else 0.0)
            for peer in self.workers - {part.stream.worker}:
                submit.peer.CopyFrom(PeerRef(name=peer.name, incarnation=peer.incarnation))
            part.stream.submit(submit, self, cached_tokens=self._expected[0].tokens if self._expected else 0)
        self._trace.tries[-1].submitted = self._trace.clock()

    def stop(self) -> None:
        """Ends generation. A prefill part whose KV has arrived stays open for its report of the transfer."""
        if self._decode is None or not self._decode.delivered:
            self.close()
        else:
            self._end_part(self._decode)

    def close(self) -> None:
        """Cancels every part that is still open. Safe to call again."""
        for part in self._parts:
            self._end_part(part)
        for expectation in self._expected:
            expectation.end()

    def _end_part(self, part: Part) -> None:
        part.computed()
        part.clear()
        if part.open:
            part.open = False
            part.stream.cancel(self._key)
        else:
            part.stream.forget(self._key)

    @property
    def _parts(self) -> tuple[Part, ...]:
        return (self._prefill,) if self._decode is None else (self._prefill, self._decode)

    # Towards the session.

    @property
    def sign(self) -> float:
        """Monotonic time of the latest sign that the workers, which send no token, have the request in hand."""
        return max([part.sign for part in self._parts if part.open], default=-math.inf)

    @property
    def waits(self) -> bool:
        """Whether a worker has said that the request waits there."""
        return any(part.waits and part.open for part in self._parts)

    @property
    def transferring(self) -> bool:
        """Whether the decode worker has the KV and the prefill worker has yet to report the transfer."""
        return self._decode is not None and self._decode.delivered and self._prefill.open

    async def loss_shows(self, seconds: float) -> None:
        """Waits up to `seconds` until this router, too, sees the loss of a worker that another worker has reported."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.lost_worker:
                    await self.tokens.wait()

    async def first_token_shows(self, seconds: float) -> None:
        """Waits for so long for prefill's token if the decode worker was lost before it came: it says that decode may
        have been computing, and comes on another stream, which may be behind."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._lost_before_first_token:
                    await self.tokens.wait()

    @property
    def _lost_before_first_token(self) -> bool:
        lost = self._decode is not None and self._decode.stream.lost is not None
        return lost and self._prefill.open and not self._prefill.delivered

    def pause(self, until: float, pacer: Pacer, holder: str) -> None:
        """Tokens that come before the monotonic time `until` gather, unless no more will come."""
        if self.failure is None:
            self.tokens.pause(until, pacer, holder)

    def fail_silent(self, why: str) -> None:
        """Fails the attempt because its workers sent nothing for too long."""
        silent = frozenset(part.stream.worker for part in self._parts if part.open)
        names = ", ".join(sorted(worker.name for worker in self.workers))
        self._fail(AttemptFailure(Failure.CODE_RETRY, f"{why} ({names})", self.workers, silent=True, reporters=silent))

    @property
    def suspects(self) -> frozenset[WorkerId]:
        """The suspected workers of which the attempt still needs something."""
        if not (self._prefill.stream.suspected or (self._decode is not None and self._decode.stream.suspected)):
            return frozenset()
        return frozenset(
            part.stream.worker
            for part in self._parts
            if part.stream.suspected and part.open and not self._outlived(part)
        )

    def fail_suspected(self) -> None:
        """Fails the attempt because its suspected workers have sent nothing for a while."""
        suspects = self.suspects
        message = f"nothing comes from {', '.join(sorted(worker.name for worker in suspects))}, which is suspected"
        self._fail(AttemptFailure(Failure.CODE_RETRY, message, suspects, silent=True, reporters=suspects))

    def fail_handoff(self) -> None:
        """Fails the attempt because `decide_by` has passed: the KV was lost with the prefill worker."""
        worker = self._prefill.stream.worker
        self._fail_lost(worker, f"worker {worker.name} lost before the hand-off")

    def _fail_lost(self, worker: WorkerId, message: str) -> None:
        self._fail(AttemptFailure(Failure.CODE_RETRY, message, frozenset((worker,)), lost=True))

    def _fail(self, failure: AttemptFailure) -> None:
        """Sets the failure, unless the attempt has failed already or has all tokens."""
        if self.failure is None and not self.tokens.complete:
            self.failure = failure
        self.tokens.flush()

    # From the workers' streams.

    def on_token(self, stream: WorkerStream, index: int, token: int, now: float) -> None:
        part = self._decode
        if part is None or part.stream is not stream:
            part = self._prefill
        # Nearly all tokens take the short way: what else is to be done was done for the first ones.
        if part.plain and index == part.next_index and self.tokens.append(index, token, now):
            part.next_index = index + 1
        else:
            self.on_event(stream, RequestEvent(first_index=index, token_ids=[token]))

    def on_event(self, stream: WorkerStream, event: RequestEvent) -> None:
        part, tokens, trace = self._part(stream), self.tokens, self._trace
        trace.note(event)
        if event.taken:
            self._note_taken(part)
        if event.waits:
            part.waiting(event.waits)
            trace.waited(f"{part.stream.worker.name}: {WAITS.get(event.waits, 'it waits')}")
        elif event.computed_tokens:
            part.computing(trace.clock())
        if event.HasField("prefill"):
            self._note_cached(event.prefill.cached_tokens)
        if event.prompt_logprobs:
            self._merge_prompt(part, event)
        if event.token_ids:
            first, ids = event.first_index, event.token_ids
            if defect := self._misfit(part, event) or tokens.merge(first, ids, event.logprobs):
                self._fail_defect(part, defect)
            else:
                part.sent(first + len(ids))
                if part.phase == PHASE_PREFILL:
                    part.computed()
                if part is self._decode:
                    self.decide_by = math.inf
        if event.finish_reason and tokens.end is None:
            self._over(part)
            tokens.finish(part.next_index, event.finish_reason)
        elif tokens.end is None and len(tokens) == self._left:
            # All tokens are here; the worker's own word of it is not needed.
            tokens.finish(self._base + self._left, FINISH_REASON_LENGTH)
        if event.HasField("transfer"):
            self._over(part)
        if event.HasField("failure"):
            self._over(part)
            part.returned = True
            if not self._outlived(part):
                self._fail(self._reported(part, event.failure))
        if tokens.complete:
            tokens.flush()
        elif event.HasField("transfer"):
            tokens.wake()

    def _note_taken(self, part: Part) -> None:
        """Notes that a worker has accepted the suspect; lets all workers begin once each has."""
        part.taken = True
        if not self._begun and self.failure is None and all(each.taken for each in self._parts):
            self._begun = True
            for each in reversed(self._parts):
                each.stream.begin(self._key)

    def _over(self, part: Part) -> None:
        """Closes a part that its worker has finished."""
        part.open = False
        part.clear()

    def on_lost(self, stream: WorkerStream) -> None:
        part = self._part(stream)
        was_open, part.open = part.open, False
        if was_open and not self._outlived(part):
            if part is self._prefill and self._decode is not None and part.delivered:
                self.decide_by = self._trace.clock() + PREFILL_LOST_SECONDS
            else:
                self._fail_lost(part.stream.worker, f"worker {part.stream.worker.name} lost ({part.stream.lost})")
        self.tokens.wake()

    def on_doubt(self) -> None:
        self.tokens.wake()

    def _part(self, stream: WorkerStream) -> Part:
        """The part whose worker has this stream."""
        return self._decode if self._decode is not None and self._decode.stream is stream else self._prefill

    def _reported(self, part: Part, failure: Failure) -> AttemptFailure:
        """The failure that a worker reports, as `Failure` in worker.proto defines it."""
        sender = frozenset((part.stream.worker,))
        blamed = self.workers & {WorkerId(peer.name, peer.incarnation) for peer in failure.blamed}
        if failure.cause == Failure.CAUSE_DRAINING:
            blamed = blamed or sender
        elif failure.cause in (Failure.CAUSE_PEER_LOST, Failure.CAUSE_REFUSED):
            blamed = blamed or self.workers - sender or sender
        elif failure.cause == Failure.CAUSE_TRIAL:
            blamed = frozenset()
        else:
            # Either end of a link may report its failure first: the next attempt must avoid the link in both cases.
            blamed = self.workers
        message = f"{part.stream.worker.name}: {failure.message}"
        return AttemptFailure(failure.code, message, blamed, cause=failure.cause, reporters=sender)

    def _outlived(self, part: Part) -> bool:
        """Whether the attempt continues without this part."""
        return part is self._prefill and self._decode is not None and self._decode.delivered and part.delivered

    def _note_cached(self, cached: int) -> None:
        """Notes how many of the prompt's tokens the prefill worker had cached."""
        for expectation, part in zip(self._expected, self._parts, strict=False):
            # The KV is on its way to the decode worker, which will have as much of it.
            tokens = cached if part is self._prefill else expectation.tokens
            expectation.reported(tokens, part.stream.block_size)

    def _misfit(self, part: Part, event: RequestEvent) -> str:
        """Description of what is wrong with an event's tokens; empty if nothing is."""
        end, prompt_scored = event.first_index + len(event.token_ids), self.tokens.prompt_scored
        if event.first_index > part.next_index:
            return f"sent index {event.first_index} instead of {part.next_index}"
        if end > self._base + self._left:
            return f"sent index {end - 1}; max_tokens is {self._base + self._left}"
        if self._wants and len(event.logprobs) != len(event.token_ids):
            return f"sent {len(event.logprobs)} log-probabilities of {len(event.token_ids)} tokens"
        if self._wants_prompt and part is self._prefill and 1 + prompt_scored != len(self._request.prompt):
            return f"sent a token after {prompt_scored} of the prompt's log-probabilities"
        return ""

    def _merge_prompt(self, part: Part, event: RequestEvent) -> None:
        """Adds log-probabilities of the prompt's tokens, of which the first has none."""
        due = 1 + self.tokens.prompt_scored
        if event.prompt_logprobs_first != due:
            self._fail_defect(part, f"sent log-probabilities of prompt token {event.prompt_logprobs_first}, not {due}")
        else:
            self.tokens.prompt_logprobs.append(event.prompt_logprobs)

    def _fail_defect(self, part: Part, what: str) -> None:
        message = f"worker {part.stream.worker.name} {what} (request {self._key[0]}, attempt {self.number})"
        sender = frozenset((part.stream.worker,))
        self._fail(AttemptFailure(Failure.CODE_INTERNAL, message, self.workers, reporters=sender))
