"""Converts an engine's progress to the events that a router gets."""

from kvrelay.engine.progress import Progress
from kvrelay.engine.sequence import Sequence
from kvrelay.internal.v1.worker_pb2 import DecodeReport, Failure, PrefillReport, RequestEvent


def event_of(progress: Progress) -> RequestEvent:
    """The event of one sequence's step: its token, its finish reason or failure, and its times."""
    sequence = progress.sequence
    request = sequence.request
    finish_reason = None if progress.finish is None else f"FINISH_REASON_{progress.finish.name}"
    event = RequestEvent(request_id=request.request_id, attempt=request.attempt, finish_reason=finish_reason)
    if progress.error is not None:
        event.failure.CopyFrom(Failure(code=Failure.CODE_INTERNAL, message=progress.error))
        return event
    if progress.token is not None:
        event.first_index = sequence.generated - 1
        event.token_ids.append(progress.token)
    _report(event, sequence)
    return event


def _report(event: RequestEvent, sequence: Sequence) -> None:
    lifetime = sequence.lifetime
    first_here = len(sequence.request.tokens) - sequence.request.prompt_tokens
    if lifetime.committed is None:
        if event.first_index == first_here:
            event.prefill.CopyFrom(
                PrefillReport(
                    queue_seconds=lifetime.queue_seconds,
                    prefill_seconds=lifetime.prefill_seconds,
                    cached_tokens=sequence.cached_tokens,
                )
            )
    elif event.first_index == first_here + 1 or event.finish_reason:
        event.decode.CopyFrom(
            DecodeReport(queue_seconds=lifetime.queue_seconds, recomputed_tokens=sequence.recomputed_tokens)
        )
