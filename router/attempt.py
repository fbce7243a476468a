"""One placement of a request: its parts on one or two workers, merged into one sequence of tokens.

A worker's own events come in order; those of two workers don't. The prefill worker sends the token at index `base`, the
decode worker those from `base + 1` on, often before the first has come by the other road:

    prefill   [base]
    decode            [base+1] [base+2] ...
    taken     [base .............. next)        what is contiguous; the rest waits in a stash

When the decode worker has sent a token it needs the prefill worker no more, so from then on the loss of that one is
none of this attempt.
"""

import asyncio
import time
from dataclasses import dataclass

from kvrelay.internal.v1.worker_pb2 import (
    FINISH_LENGTH,
    FINISH_STOP,
    PHASE_COLOCATED,
    PHASE_DECODE,
    PHASE_PREFILL,
    DecodeReport,
    Failure,
    PeerRef,
    Phase,
    PrefillReport,
    RequestEvent,
    Submit,
    TransferReport,
)
from kvrelay.internal.v1.worker_pb2 import Finish as WireFinish
from kvrelay.router.completion import Finish
from kvrelay.router.placement import WorkerKey
from kvrelay.router.validation import CheckedRequest
from kvrelay.router.worker_stream import WorkerStream

PEER_LOST_SECONDS = 1.0
"""How long after the loss of prefill the decode worker has to show that it had received the KV."""

FINISHES: dict[WireFinish, Finish] = {FINISH_STOP: Finish.STOP, FINISH_LENGTH: Finish.LENGTH}


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Why an attempt goes no further."""

    code: Failure.Code
    message: str
    blamed: frozenset[WorkerKey]
    """Workers that the next attempt should rather not use."""
    lost: bool = False
    """By the loss of a worker, not by its answer."""


@dataclass(slots=True)
class _Part:
    """What one worker does for the attempt."""

    link: WorkerStream
    phase: Phase
    expected: int
    """Index of the next token that it is to send."""
    claim: int
    """Tokens counted in the link's outstanding_tokens."""
    open: bool = True
    """Has not said its last yet."""
    delivered: bool = False
    """Has sent a token."""

    def release(self) -> None:
        self.link.outstanding_tokens -= self.claim
        self.claim = 0


class Attempt:
    """Made, submitted, and closed, which ends it on every worker that still has a part of it."""

    def __init__(
        self,
        request: CheckedRequest,
        number: int,
        generated: tuple[int, ...],
        prefill: WorkerStream,
        decode: WorkerStream | None,
    ) -> None:
        """
        Args:
            number: 1 for the first attempt of the request.
            generated: tokens that the client has.
            prefill: computes prompt and first token.
            decode: generates from the second token on: the same link for a co-located worker, None where the first
                token is the last.
        """
        self.number = number
        self.failure: AttemptFailure | None = None
        self.prefill_report: PrefillReport | None = None
        self.transfer_report: TransferReport | None = None
        self.decode_report: DecodeReport | None = None
        self.decide_by: float | None = None
        """Monotonic time by which the decode worker must have sent a token; set when prefill is lost after its own."""
        self._request = request
        self._key = (request.wire_id, number)
        self._tokens = request.tokens + generated
        self._base = len(generated)
        self._left = request.sampling.max_tokens - len(generated)
        self._seen: list[int] = []
        self._taken = 0
        self._stash: dict[int, int] = {}
        self._finish: Finish | None = None
        self._end: int | None = None
        self._wake = asyncio.Event()
        work = len(self._tokens)
        if decode is prefill:
            self._prefill = _Part(prefill, PHASE_COLOCATED, self._base, work + self._left)
            self._decode: _Part | None = None
        else:
            self._prefill = _Part(prefill, PHASE_PREFILL, self._base, work)
            self._decode = None if decode is None else _Part(decode, PHASE_DECODE, self._base + 1, self._left)
        for part in self._parts:
            part.link.outstanding_tokens += part.claim

    # Towards the workers.

    @property
    def prefill_worker(self) -> str:
        return self._prefill.link.key.name

    @property
    def decode_worker(self) -> str:
        """Empty where the first token was to be the last."""
        if self._prefill.phase == PHASE_COLOCATED:
            return self.prefill_worker
        return "" if self._decode is None else self._decode.link.key.name

    @property
    def workers(self) -> frozenset[WorkerKey]:
        return frozenset(part.link.key for part in self._parts)

    @property
    def lost_worker(self) -> bool:
        """Whether a worker of this attempt is lost by now."""
        return any(part.link.lost is not None for part in self._parts)

    def submit(self, first_seconds: float, idle_seconds: float) -> None:
        """Sends the parts, decode's first: it should know of the request before prefill's offer comes.

        Args:
            first_seconds: how long the first token may take.
            idle_seconds: how much longer the next.
        """
        for part in reversed(self._parts):
            peer = next((other.link.key for other in self._parts if other is not part), None)
            submit = Submit(
                request_id=self._request.wire_id,
                attempt=self.number,
                phase=part.phase,
                token_ids=self._tokens,
                prompt_tokens=len(self._request.tokens),
                sampling=self._request.sampling,
                tenant=self._request.tenant,
                timeout_seconds=first_seconds + (idle_seconds if part.phase == PHASE_DECODE else 0.0),
            )
            if peer is not None:
                submit.peer.CopyFrom(PeerRef(name=peer.name, incarnation=peer.incarnation))
            part.link.submit(submit, self)

    def stop(self) -> None:
        """No more tokens are wanted. A hand-off that is over on decode's side is left to be reported."""
        if self._decode is None or not self._decode.delivered:
            self.close()
        else:
            self._end_part(self._decode)

    def close(self) -> None:
        """Cancels what is still under way, on every worker of it; safe to call again."""
        for part in self._parts:
            self._end_part(part)

    def _end_part(self, part: _Part) -> None:
        part.release()
        if part.open:
            part.open = False
            part.link.cancel(self._key)
        else:
            part.link.forget(self._key)

    @property
    def _parts(self) -> tuple[_Part, ...]:
        return (self._prefill,) if self._decode is None else (self._prefill, self._decode)

    # Towards the session.

    @property
    def transferring(self) -> bool:
        """Decode has the KV, and prefill is yet to report the hand-off."""
        return self._decode is not None and self._decode.delivered and self._prefill.open

    async def wait(self) -> None:
        """Returns when there is something new, or when woken; one waiter only."""
        await self._wake.wait()
        self._wake.clear()

    def wake(self) -> None:
        """Ends a wait."""
        self._wake.set()

    def take(self) -> tuple[list[int], Finish | None]:
        """New tokens in order, and the end if they are the last. The finish is given once its tokens are complete."""
        token_ids = self._seen[self._taken :]
        self._taken = len(self._seen)
        return token_ids, self._finish if self._complete else None

    def give_up(self, why: str) -> None:
        """Ends the attempt for its workers' silence."""
        self._fail(Failure.CODE_RETRY, f"{why} ({', '.join(sorted(key.name for key in self.workers))})")

    def decide(self) -> None:
        """`decide_by` has passed: the hand-off did not survive the loss of prefill."""
        lost = self._prefill.link
        self._fail(Failure.CODE_RETRY, f"worker {lost.key.name} lost before the hand-off", lost)

    def _fail(self, code: Failure.Code, message: str, lost: WorkerStream | None = None) -> None:
        """Sets the failure, unless the attempt has failed or is complete already."""
        if self.failure is None and not self._complete:
            blamed = self.workers if lost is None else frozenset((lost.key,))
            self.failure = AttemptFailure(code, message, blamed, lost=lost is not None)
        self._wake.set()

    # Listener.

    def on_event(self, link: WorkerStream, event: RequestEvent) -> None:
        part = next(part for part in self._parts if part.link is link)
        self._note_reports(event)
        if event.token_ids:
            self._merge(part, event)
        if event.finish in FINISHES and self._end is None:
            part.open = False
            self._finish = FINISHES[event.finish]
            self._end = part.expected
        elif self._end is None and len(self._seen) == self._left:
            # There is nothing more to wait for, whether the worker says so or not.
            self._finish = Finish.LENGTH
            self._end = self._base + self._left
        if event.HasField("transfer"):
            part.open = False
        if event.HasField("failure"):
            part.open = False
            if not self._outlived(part):
                self._fail(event.failure.code, f"{link.key.name}: {event.failure.message}")
        self._wake.set()

    def on_lost(self, link: WorkerStream) -> None:
        part = next(part for part in self._parts if part.link is link)
        was_open, part.open = part.open, False
        if was_open and not self._outlived(part):
            if part is self._prefill and self._decode is not None and part.delivered:
                self.decide_by = time.monotonic() + PEER_LOST_SECONDS
            else:
                self._fail(Failure.CODE_RETRY, f"worker {link.key.name} lost ({link.lost})", link)
        self._wake.set()

    @property
    def _complete(self) -> bool:
        """Whether every token up to the end is here."""
        return self._base + len(self._seen) == self._end

    def _outlived(self, part: _Part) -> bool:
        """Whether the attempt goes on without this part."""
        return part is self._prefill and self._decode is not None and self._decode.delivered and part.delivered

    def _note_reports(self, event: RequestEvent) -> None:
        if event.HasField("prefill"):
            self.prefill_report = event.prefill
        if event.HasField("transfer"):
            self.transfer_report = event.transfer
        if event.HasField("decode"):
            self.decode_report = event.decode

    def _merge(self, part: _Part, event: RequestEvent) -> None:
        """Adds tokens by index. A hole in one worker's own sequence, or two tokens for one index, is a defect."""
        end = event.first_index + len(event.token_ids)
        if event.first_index > part.expected:
            self._defect(part, f"sent index {event.first_index} where {part.expected} was due")
            return
        if end > self._base + self._left:
            self._defect(part, f"sent index {end - 1}; max_tokens is {self._base + self._left}")
            return
        for at, token in enumerate(event.token_ids, event.first_index - self._base):
            if at < 0:
                continue
            known = self._seen[at] if at < len(self._seen) else self._stash.setdefault(at, token)
            if known != token:
                self._defect(part, f"sent token {token} at index {self._base + at}, which is {known}")
                return
        while (next_token := self._stash.pop(len(self._seen), None)) is not None:
            self._seen.append(next_token)
        part.expected = max(part.expected, end)
        part.delivered = True
        if part.phase == PHASE_PREFILL:
            part.release()
        if part is self._decode:
            self.decide_by = None

    def _defect(self, part: _Part, what: str) -> None:
        message = f"worker {part.link.key.name} {what} (request {self._key[0]}, attempt {self._key[1]})"
        self._fail(Failure.CODE_INTERNAL, message)
