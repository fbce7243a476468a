"""From an engine's progress to what a router is told."""

from kvrelay.engine.progress import Progress
from kvrelay.engine.request import FinishReason
from kvrelay.engine.sequence import Sequence
from kvrelay.internal.v1.worker_pb2 import (
    FINISH_LENGTH,
    FINISH_STOP,
    FINISH_UNSPECIFIED,
    DecodeReport,
    Failure,
    Finish,
    PrefillReport,
    RequestEvent,
)

FINISHES: dict[FinishReason | None, Finish] = {
    FinishReason.STOP: FINISH_STOP,
    FinishReason.LENGTH: FINISH_LENGTH,
    None: FINISH_UNSPECIFIED,
}


def event_of(progress: Progress) -> RequestEvent:
    """What the router is told of one sequence's step: its token, its end, and where its time went."""
    sequence = progress.sequence
    request = sequence.request
    event = RequestEvent(request_id=request.request_id, attempt=request.attempt, finish=FINISHES[progress.finish])
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
    elif event.first_index == first_here + 1 or event.finish != FINISH_UNSPECIFIED:
        event.decode.CopyFrom(
            DecodeReport(queue_seconds=lifetime.queue_seconds, recomputed_tokens=sequence.recomputed_tokens)
        )
