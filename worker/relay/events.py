"""Converts an engine's progress to the events that a router gets."""

from typing import Any, NamedTuple

from kvrelay.engine.plan import TokenLogprobs
from kvrelay.engine.scheduling.progress import Progress
from kvrelay.engine.sequence import Sequence
from kvrelay.internal.v1.worker_pb2 import DecodeReport, Failure, PrefillReport, RequestEvent


class PlainToken(NamedTuple):
    """A token that comes with nothing else."""

    key: tuple[str, int]
    """Key of the request, (request_id, attempt)."""
    token_index: int
    """Index in the completion, as `RequestEvent.first_index`."""
    token: int


def event_of(progress: Progress) -> RequestEvent | PlainToken:
    """The event of one sequence's step: its token, its finish reason or failure, its times, and log-probabilities."""
    sequence = progress.sequence
    request = sequence.request
    if progress.token is not None and not (
        progress.finish or progress.error is not None or progress.logprobs or progress.prompt_logprobs
    ):
        # The first token here, behind the prompt or behind KV from elsewhere, comes with a report.
        index = progress.token_index
        if index > len(request.tokens) - request.prompt_tokens + 1:
            return PlainToken(request.key, index, progress.token)
    finish_reason = None if progress.finish is None else f"FINISH_REASON_{progress.finish.name}"
    event = RequestEvent(request_id=request.request_id, attempt=request.attempt, finish_reason=finish_reason)
    if progress.error is not None:
        code = Failure.CODE_INVALID if progress.refused else Failure.CODE_INTERNAL
        code = Failure.CODE_RETRY if progress.again else code
        event.failure.CopyFrom(Failure(code=code, message=progress.error))
        return event
    if progress.prompt_logprobs:
        event.prompt_logprobs_first = progress.prompt_first
        for scores in progress.prompt_logprobs:
            _add_logprobs(event.prompt_logprobs, scores)
    if progress.token is None:
        event.computed_tokens = progress.computed
    else:
        event.first_index = progress.token_index
        event.token_ids.append(progress.token)
        if progress.logprobs is not None:
            _add_logprobs(event.logprobs, progress.logprobs)
        _report(event, sequence)
        if progress.finish is not None:
            event.proposed_tokens, event.accepted_tokens = sequence.proposed, sequence.accepted
    return event


def _add_logprobs(target: Any, scores: TokenLogprobs) -> None:
    target.add(logprob=scores.logprob, rank=scores.rank, top_ids=scores.top_ids, top_logprobs=scores.top_logprobs)


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
