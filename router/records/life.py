"""The stages of a request on one time axis, which is the router's monotonic clock.

A worker tells how long each of its stages took, and the router notes when it heard of the stage's end. So a stage ends
where the router heard of it, a network's delay late, and began that long before; no two clocks are compared.

    router    |-- checked, waits for capacity --|
    queue                                       |-- prefill worker --|
    prefill                                                          |-- chunk --|-- chunk --|
    transfer                                                                     |-- KV on the wire --|
    decode                                                                                            |-- tokens --|
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from kvrelay.router.trace import AttemptTrace, Incident, Outcome, RequestTrace

Stage = Literal["router", "queue", "prefill", "transfer", "decode_queue", "decode"]


@dataclass(frozen=True, slots=True)
class Span:
    """One stage. Times are in seconds since the request was received."""

    stage: Stage
    worker: str
    """Name of the worker; in a transfer, of the one that sends. Empty for the router."""
    start: float
    end: float | None
    """End of the stage; None while it goes on."""


@dataclass(frozen=True, slots=True)
class Life:
    """One request, as it was at one moment. It has nothing of the prompt or the completion."""

    id: str
    index: int
    """Number of the completion among those of the request, from 0."""
    received: float
    """Unix time of receipt, in seconds."""
    outcome: Outcome | None
    """None while it runs."""
    age: float
    """Seconds since it was received, up to its end."""
    spans: tuple[Span, ...]
    chunks: tuple[tuple[float, int], ...]
    """(seconds since receipt, tokens of the prompt that had their KV by then), while the prompt is computed."""
    placed: tuple[float, ...]
    """Seconds from receipt to the beginning of each attempt."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    transfer_bytes: int
    retries: int
    migrations: int
    prefill_worker: str
    decode_worker: str
    ttft: float | None
    tpot: float | None
    handoff: float | None
    """Seconds of the transfer after the end of prefill."""
    grant: float | None
    """Seconds from the offer of the KV to the decode worker's grant."""
    incidents: tuple[Incident, ...]
    """Incidents that delayed it; `at` is in seconds since receipt."""
    longest_gap: tuple[float, float]
    """The longest time between two messages with tokens, and when it ended, since receipt."""


def life(trace: RequestTrace, now: float = inf) -> Life:
    """The life of a request up to its end or, if it runs, up to `now` on the monotonic clock."""
    now = now if trace.ended is None else trace.ended
    whole, since = trace.whole, trace.received

    def at(moment: float, earliest: float = 0.0) -> float:
        return max(earliest, min(moment, now) - since)

    def shown(span: Span) -> Span:
        # Reports of two workers come in any order, and a worker's clock may run faster than the router's.
        start = at(span.start)
        return replace(span, start=start, end=None if span.end is None else at(span.end, start))

    return Life(
        id=trace.wire_id,
        index=trace.index,
        received=time.time() - (trace.clock() - since),
        outcome=trace.outcome,
        age=at(now),
        spans=tuple(map(shown, _spans(trace, trace.ended))),
        chunks=tuple((at(moment), tokens) for moment, tokens in whole.chunks),
        placed=tuple(map(at, trace.placed)),
        prompt_tokens=trace.prompt_tokens,
        cached_tokens=trace.cached_tokens,
        completion_tokens=trace.completion_tokens,
        transfer_bytes=trace.transfer_bytes,
        retries=trace.retries,
        migrations=trace.migrations,
        prefill_worker=whole.prefill_worker,
        decode_worker=whole.decode_worker,
        ttft=trace.ttft_seconds,
        tpot=trace.tpot_seconds,
        handoff=None if trace.transfer is None else trace.transfer.handoff_seconds,
        grant=None if whole.transfer is None else whole.transfer.grant_seconds,
        incidents=tuple(incident._replace(at=at(incident.at)) for incident in trace.incidents),
        longest_gap=(trace.longest_gap[0], at(trace.longest_gap[1])),
    )


def _spans(trace: RequestTrace, ended: float | None) -> Sequence[Span]:
    """The stages that the request has reached, on the monotonic clock; those that go on end at `ended`."""
    placed = trace.placed
    spans = [Span("router", "", trace.received, placed[0] if placed else ended)]
    return [*spans, *stages(trace.whole, placed[0], ended)] if placed else spans


def stages(trace: AttemptTrace, began: float, ended: float | None) -> Sequence[Span]:
    """The stages that workers have reached, on the monotonic clock, of one attempt.

    Args:
        began: when the workers were told.
        ended: when it ended; None while it runs.
    """
    spans = []
    prefill, decode = trace.prefill_worker, trace.decode_worker
    if trace.prefill is None or trace.prefill_at is None:
        # Queue and prefill are told apart by the worker's report only.
        spans.append(Span("prefill" if trace.chunks else "queue", prefill, began, ended))
    else:
        computed = trace.prefill_at - trace.prefill.prefill_seconds
        if trace.chunks:  # the report may have come late, and the prefill had begun before its first chunk was done
            computed = min(computed, trace.chunks[0][0])
        computed = max(began, computed)
        waited = max(began, computed - trace.prefill.queue_seconds)
        spans += [Span("queue", prefill, waited, computed), Span("prefill", prefill, computed, trace.prefill_at)]
    handed = _transfer(trace, ended)
    if handed is not None:
        spans.append(handed)
    if decode and trace.decode_at is not None:
        spans += _decode(trace, trace.decode_at, handed, ended)
    elif decode == prefill and trace.first_sent is not None:
        spans.append(Span("decode", decode, trace.first_sent, trace.last_sent if ended else None))
    return spans


def _transfer(trace: AttemptTrace, ended: float | None) -> Span | None:
    prefill, decode = trace.prefill_worker, trace.decode_worker
    if not decode or decode == prefill:
        return None
    if trace.transfer is not None and trace.transfer_at is not None:
        return Span("transfer", prefill, trace.transfer_at - trace.transfer.transfer_seconds, trace.transfer_at)
    first = trace.chunks[0][0] if trace.chunks else trace.prefill_at
    return None if first is None else Span("transfer", prefill, first, trace.decode_at or ended)


def _decode(trace: AttemptTrace, first: float, handed: Span | None, ended: float | None) -> Sequence[Span]:
    """`first`: when the decode worker's first token came."""
    decode = trace.decode_worker
    waited = trace.decode.queue_seconds if trace.decode is not None else 0.0
    # The decode worker has committed the KV before its first token comes; the sender's report of it may come later.
    committed = first - waited if handed is None or handed.end is None else min(first - waited, handed.end)
    scheduled = min(first, committed + waited)
    last = trace.last_sent if ended and trace.last_sent is not None else ended
    end = None if last is None else max(scheduled, last)
    return [Span("decode_queue", decode, committed, scheduled), Span("decode", decode, scheduled, end)]
