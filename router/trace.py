"""The figures of one request, for the client's last message, the metrics and the log."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeVar

from kvrelay.costs.predict import Decision, Predicted
from kvrelay.internal.v1.worker_pb2 import DecodeReport, PrefillReport, RequestEvent, TransferReport
from kvrelay.rpc.tracing import TraceContext
from kvrelay.v1.inference_pb2 import Timeline, Usage

Outcome = Literal["stop", "length", "cancelled", "invalid", "exhausted", "unavailable", "deadline", "internal"]


ReportT = TypeVar("ReportT", PrefillReport, TransferReport, DecodeReport)

IncidentKind = Literal["wait", "failed", "moved", "ended"]
"""Kind of an incident: the request had to wait for workers; an attempt failed; it left workers that were stopped on
purpose; it ended by an error."""


class Incident(NamedTuple):
    """Something that delayed a request, or ended it."""

    kind: IncidentKind
    at: float
    """Time on the router's monotonic clock."""
    why: str
    """Reason in words, without anything of a prompt."""


class Handoff(NamedTuple):
    """KV that one worker has sent to another."""

    prefill: str
    decode: str
    nbytes: int


@dataclass(slots=True)
class AttemptTrace:
    """Times and reports of one placement of a request. Times are on the router's monotonic clock."""

    asked: float
    """Time at which the request began to wait for workers."""
    placed: float
    prefill_worker: str
    decode_worker: str
    """Name of the decode worker; empty if the first token is the last."""
    expected_tokens: int
    """Tokens of the prompt that the prefill worker was expected to have in its cache."""
    why: Decision | None = None
    """Reason for the choice of its workers."""
    submitted: float | None = None
    """Time at which its workers were told."""
    ended: float | None = None
    failure: str = ""
    """Reason why it failed (`AttemptFailure.reason`); empty if it didn't."""
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """Times at which the router heard that prompt tokens have KV, and their numbers; up to the prefill report."""
    prefill: PrefillReport | None = None
    prefill_at: float | None = None
    """Time at which `prefill` came; `transfer_at` is the same for `transfer`, `decode_at` for the first `decode`."""
    transfer: TransferReport | None = None
    transfer_at: float | None = None
    decode: DecodeReport | None = None
    decode_at: float | None = None
    first_sent: float | None = None
    """Time at which tokens of this attempt were sent to the client first; `last_sent` is the last such time."""
    last_sent: float | None = None

    @property
    def handoff(self) -> Handoff | None:
        """The hand-off of the attempt's KV; None before its end."""
        if self.transfer is None:
            return None
        return Handoff(self.prefill_worker, self.decode_worker, self.transfer.transfer_bytes)


_NO_ATTEMPT = AttemptTrace(0.0, 0.0, "", "", 0)


@dataclass(slots=True)
class RequestTrace:
    """Times of a running request on the router's monotonic clock, and the reports of its workers: of each attempt, from
    which those of the request follow."""

    received: float
    wire_id: str = ""
    """The request's name in logs and towards the workers; the client's name until the request is checked."""
    index: int = 0
    """Number of the completion among those of the request, from 0."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    resumed_tokens: int = 0
    """Number of completion tokens that the client has from earlier calls of the request."""
    resumes: int = 0
    """Number of earlier calls of the request."""
    router_queue_seconds: float = 0.0
    attempts: int = 0
    migrations: int = 0
    """Attempts that ended because a worker drains."""
    turned_away: int = 0
    """Attempts that a worker refused because of another suspect there (`router/session/suspects.py`)."""
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    """Tokens that a worker guessed and checked, and those of them that it kept."""
    tenant: str = ""
    service: str = ""
    """Class of service."""
    context: TraceContext = field(default_factory=TraceContext.new)
    """Trace context of the call, for logs and spans."""
    asked: float | None = None
    """Time at which the request began to wait for workers: at first, or after the latest failed attempt."""
    tries: list[AttemptTrace] = field(default_factory=list)
    """Attempts, the latest last."""
    incidents: list[Incident] = field(default_factory=list)
    """Incidents that delayed or ended it, the latest last."""
    longest_gap: tuple[float, float] = (0.0, 0.0)
    """The longest time between two messages with tokens: seconds, and when it ended."""
    outcome: Outcome | None = None
    """Outcome of the request; None while it runs."""
    ended: float | None = None
    """Time of the request's end."""
    failure: str = ""
    """Reason why it has no end of its own, as the client was told; empty if it has one."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)
    """The router's clock."""

    @property
    def latest(self) -> AttemptTrace:
        """The latest attempt, or one without any figures."""
        return self.tries[-1] if self.tries else _NO_ATTEMPT

    @property
    def prefilled(self) -> AttemptTrace:
        """The attempt that gave the request's first token, or one without any figures."""
        return next((each for each in self.tries if each.prefill is not None), _NO_ATTEMPT)

    @property
    def whole(self) -> AttemptTrace:
        """All attempts as one: the prefill is that of the first token, the rest that of the latest."""
        first, latest = self.prefilled, self.latest
        return replace(
            latest,
            chunks=latest.chunks if first is latest or first is _NO_ATTEMPT else [],
            prefill=first.prefill,
            prefill_at=first.prefill_at,
            transfer=self.transfer,
            decode=self.decode,
            first_sent=self.first_sent,
            last_sent=self.last_sent,
        )

    @property
    def prefill(self) -> PrefillReport | None:
        """The report of the attempt that gave the request's first token."""
        return self.prefilled.prefill

    @property
    def transfer(self) -> TransferReport | None:
        """The latest report of a transfer."""
        return next((each.transfer for each in reversed(self.tries) if each.transfer is not None), None)

    @property
    def decode(self) -> DecodeReport | None:
        """The latest report of a decode worker."""
        return next((each.decode for each in reversed(self.tries) if each.decode is not None), None)

    @property
    def handoffs(self) -> list[Handoff]:
        """The hand-offs of all attempts."""
        return [each.handoff for each in self.tries if each.handoff is not None]

    @property
    def submitted(self) -> float | None:
        """The time at which workers were told of the request first."""
        return next((each.submitted for each in self.tries if each.submitted is not None), None)

    @property
    def first_sent(self) -> float | None:
        """The time at which tokens were sent to the client first."""
        return next((each.first_sent for each in self.tries if each.first_sent is not None), None)

    @property
    def last_sent(self) -> float | None:
        """The time at which tokens were sent to the client last."""
        return next((each.last_sent for each in reversed(self.tries) if each.last_sent is not None), None)

    @property
    def generated_tokens(self) -> int:
        """The tokens that this call has generated."""
        return self.completion_tokens - self.resumed_tokens

    @property
    def transfer_bytes(self) -> int:
        """Bytes of KV that all attempts have handed over."""
        return sum(each.nbytes for each in self.handoffs)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were in a prefix cache."""
        return self.usage().cached_tokens

    @property
    def ttft_seconds(self) -> float | None:
        """Request received to first token sent; None too if the client had a token from an earlier call."""
        return None if self.first_sent is None or self.resumed_tokens else self.first_sent - self.received

    @property
    def tpot_seconds(self) -> float | None:
        """Average time between two tokens of this call, the first one excluded."""
        first, last, count = self.first_sent, self.last_sent, self.generated_tokens
        return None if first is None or last is None or count < 2 else (last - first) / (count - 1)

    @property
    def total_seconds(self) -> float:
        """From its receipt to its end, or to now."""
        return (self.ended or self.clock()) - self.received

    @property
    def retries(self) -> int:
        """Attempts after a failed one."""
        return max(0, self.attempts - 1 - self.migrations - self.turned_away)

    @property
    def log_fields(self) -> dict[str, object]:
        """The fields of every log line about the request."""
        return {
            "trace_id": self.context.trace_id,
            "request": self.wire_id,
            "attempt": self.attempts,
            "prefill": self.latest.prefill_worker,
            "decode": self.latest.decode_worker,
        }

    @property
    def placed(self) -> list[float]:
        """The times at which the attempts began."""
        return [each.placed for each in self.tries]

    def placed_on(self, prefill: str, decode: str, expected_tokens: int = 0) -> None:
        """Notes that an attempt begins on these workers; `decode` is empty if the first token is the last."""
        now = self.clock()
        self.tries.append(AttemptTrace(self.asked or now, now, prefill, decode, expected_tokens))

    def note(self, event: RequestEvent) -> None:
        """Takes what an event of the latest attempt reports. Most report nothing, and cost no look at the clock.

        Reports are copied: a part of a message keeps the whole message in memory.
        """
        latest = self.tries[-1]
        if event.computed_tokens and latest.prefill is None:
            latest.chunks.append((self.clock(), event.computed_tokens))
        if event.HasField("prefill"):
            latest.prefill, latest.prefill_at = _copy(event.prefill), self.clock()
        if event.HasField("transfer"):
            latest.transfer, latest.transfer_at = _copy(event.transfer), self.clock()
        if event.HasField("decode"):
            latest.decode, latest.decode_at = _copy(event.decode), latest.decode_at or self.clock()
        self.proposed_tokens += event.proposed_tokens
        self.accepted_tokens += event.accepted_tokens

    def usage(self) -> Usage:
        """The usage of the completion. The prompt of several completions counts once, with the first."""
        prompt_tokens = 0 if self.index else self.prompt_tokens
        cached_tokens = 0 if self.prefill is None else min(self.prefill.cached_tokens, prompt_tokens)
        return Usage(prompt_tokens=prompt_tokens, completion_tokens=self.completion_tokens, cached_tokens=cached_tokens)

    def delayed(self, kind: IncidentKind, why: str) -> None:
        """Notes an incident."""
        self.incidents.append(Incident(kind, self.clock(), why))

    def waited(self, why: str) -> None:
        """Notes that the request waits on a worker, unless it did so before."""
        if not any(incident.why == why for incident in self.incidents):
            self.delayed("wait", why)

    def failed(self, reason: str) -> None:
        """Notes that the latest attempt has failed, and that the request waits for workers again."""
        latest = self.tries[-1]
        latest.failure, latest.ended = reason, self.clock()
        self.asked = latest.ended

    def end(self, outcome: Outcome, failure: str = "") -> None:
        """Notes the request's end; `failure` as the attribute."""
        self.outcome, self.failure, self.ended = outcome, failure, self.clock()
        if failure:
            self.delayed("ended", failure)

    def sent(self, now: float) -> float | None:
        """Notes that tokens were sent to the client; returns the seconds since the tokens before them, if any."""
        latest, before = self.tries[-1], self.last_sent
        latest.first_sent, latest.last_sent = latest.first_sent or now, now
        if before is not None:
            self.longest_gap = max(self.longest_gap, (now - before, now))
        return None if before is None else now - before

    def timeline(self, now: float) -> Timeline:
        """The figures for the client; 0 for a stage that the request did not reach."""
        first, last, submitted = self.first_sent, self.last_sent, self.submitted
        why = self.latest.why or Decision("pair")
        predicted = why.predicted or Predicted(0.0, 0.0)
        first = now if first is None else first
        prefill, decode = self.prefill or PrefillReport(), self.decode or DecodeReport()
        transfer = self.transfer or TransferReport()
        return Timeline(
            route_seconds=(now if submitted is None else submitted) - self.received,
            queue_seconds=prefill.queue_seconds,
            prefill_seconds=prefill.prefill_seconds,
            transfer_seconds=transfer.transfer_seconds,
            handoff_seconds=transfer.handoff_seconds,
            first_token_seconds=first - self.received,
            decode_queue_seconds=decode.queue_seconds,
            decode_seconds=(first if last is None else last) - first,
            total_seconds=now - self.received,
            transfer_bytes=self.transfer_bytes,
            retries=self.retries,
            migrations=self.migrations,
            resumes=self.resumes,
            proposed_tokens=self.proposed_tokens,
            accepted_tokens=self.accepted_tokens,
            prefill_worker=self.latest.prefill_worker,
            decode_worker=self.latest.decode_worker,
            way=why.way if self.latest.why is not None else "",
            predicted_first_token_seconds=predicted.ttft,
            predicted_token_seconds=predicted.tpot,
            predicted_handoff_seconds=why.exposed,
            runner_up=why.runner_up,
        )

    def prediction_errors(self) -> dict[str, float]:
        """Errors of what was predicted of the time to the first token (`ttft`) and between two (`tpot`), each relative
        to what came; without what wasn't predicted or has not come. A request that was placed again has none."""
        latest, errors = self.latest, {}
        if latest.why is None or latest.why.predicted is None or len(self.tries) != 1 or latest.first_sent is None:
            return {}
        predicted, came = latest.why.predicted, {"ttft": latest.first_sent - latest.placed, "tpot": self.tpot_seconds}
        for name, seconds in came.items():
            if seconds:
                errors[name] = abs(getattr(predicted, name) - seconds) / seconds
        return errors


def _copy(report: ReportT) -> ReportT:
    copy = type(report)()
    copy.CopyFrom(report)
    return copy
