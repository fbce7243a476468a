"""The messages of one completion to its client, whose times go into the request's trace."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from kvrelay.router.request.validation import CheckedRequest
from kvrelay.router.session.completion import Piece
from kvrelay.router.trace import RequestTrace
from kvrelay.v1.inference_pb2 import GenerateResponse


class Sink(Protocol):
    """Takes the messages of one call, as its face does it."""

    @property
    def ready(self) -> bool:
        """Whether `write_now` can take a message: the first one was written, and the client keeps up."""

    def write_now(self, message: GenerateResponse) -> None:
        """Takes a message that only adds tokens and text, without waiting; while `ready`."""

    def write(self, message: GenerateResponse) -> Awaitable[None]:
        """Takes a message as soon as the client does."""


@dataclass(frozen=True, slots=True)
class AwaitedSink:
    """That of a face whose every write has to be awaited."""

    write: Callable[[GenerateResponse], Awaitable[None]]

    @property
    def ready(self) -> bool:
        return False

    def write_now(self, message: GenerateResponse) -> None:
        raise RuntimeError("a message for a sink that is never ready")


@dataclass(frozen=True, slots=True)
class FirstSink:
    """Sink of the first of several completions: notes when others can have its prompt from the prefix caches."""

    _sink: Sink
    _trace: RequestTrace
    _cached: asyncio.Event

    @property
    def ready(self) -> bool:
        return self._cached.is_set() and self._sink.ready

    def write_now(self, message: GenerateResponse) -> None:
        self._sink.write_now(message)

    async def write(self, message: GenerateResponse) -> None:
        if self._trace.generated_tokens > 1:
            self._cached.set()
        await self._sink.write(message)


class Answer:
    """Pieces with tokens, then a last one with the figures."""

    def __init__(self, request: CheckedRequest, trace: RequestTrace, sink: Sink, gap: Callable[[float], None]) -> None:
        """
        Args:
            trace: read for the last message, and written with each.
            gap: takes the seconds between two messages with tokens.
        """
        self._request = request
        self._trace = trace
        self._sink = sink
        self._gap = gap
        self._first = True
        self.progress = trace.received
        """Monotonic time at which the latest token was sent or the latest attempt began."""

    @property
    def begun(self) -> bool:
        """Whether this call has sent tokens."""
        return self._trace.first_sent is not None

    @property
    def ready(self) -> bool:
        """Whether `send_now` can take a piece."""
        return self._sink.ready

    def send_now(self, piece: Piece) -> None:
        """Sends a piece of tokens and text, without waiting; while `ready`."""
        self._sink.write_now(self._message(piece))
        self.progress = time.monotonic()
        self._sent(self.progress)

    async def send(self, piece: Piece) -> None:
        """Sends a piece, as soon as the client takes it."""
        await self._sink.write(self._message(piece))
        self.progress = time.monotonic()
        self._sent(self.progress)

    async def finish(self, piece: Piece) -> None:
        """Sends the last piece, which may have no tokens, with usage and timeline."""
        trace, now = self._trace, time.monotonic()
        if piece.token_ids:
            self._sent(now)
        last = self._message(piece)
        last.finish_reason = piece.finish_reason
        last.usage.CopyFrom(trace.usage())
        last.timeline.CopyFrom(trace.timeline(now))
        await self._sink.write(last)

    def _sent(self, now: float) -> None:
        gap = self._trace.sent(now)
        if gap is not None:
            self._gap(gap)

    def _message(self, piece: Piece) -> GenerateResponse:
        # Fields without a value cost time too, and there is a message for every few tokens.
        message = GenerateResponse(request_id=self._request.request_id, text=piece.text, token_ids=piece.token_ids)
        if self._request.index:
            message.index = self._request.index
        if piece.logprobs:
            message.logprobs.extend(piece.logprobs)
        if piece.prompt_logprobs:
            message.prompt_logprobs.extend(piece.prompt_logprobs)
        if self._first:
            self._first = False
            message.seed = self._request.sampling.seed
        return message
