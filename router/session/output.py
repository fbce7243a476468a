"""The output of one request: the tokens of its attempts become text, and text and tokens become messages.

    attempt's tokens -> Completion (text, stop strings) -> a message -> Sink (gRPC, HTTP)

Most tokens change nothing but the completion. While the session's task waits, the callback that finds such tokens due
sends them (`Output.relay`), if the sink can take a message without waiting: to wake the task would cost as much as all
else. The task itself sends the first tokens, the last ones, and those of an attempt that has yet to prove itself.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvrelay.router.errors import InvalidRequest
from kvrelay.router.request.validation import CheckedRequest, Resumed
from kvrelay.router.session.attempt import Attempt, Taken
from kvrelay.router.session.dispatch import Dispatch
from kvrelay.router.session.pacer import UNPACED_TOKENS
from kvrelay.router.text.detokenizer import Detokenizer, TokenBytes
from kvrelay.router.text.stops import StopStrings
from kvrelay.router.trace import RequestTrace
from kvrelay.v1.inference_pb2 import (
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    FinishReason,
    GenerateResponse,
    TokenLogprobs,
)

PART_TOKENS = 512
"""Tokens that are added at a time, resumed ones or log-probabilities of a prompt, in a millisecond; then others have
their turn on the event loop."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New output for the client."""

    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason
    """Unspecified unless this is the last piece."""
    logprobs: Sequence[TokenLogprobs] = ()
    """One for each token if they were asked for, else none."""
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]] = ()
    """All of them, in parts, in the first piece with a token, if they were asked for."""


class Completion:
    """Collects the tokens of all attempts, in order."""

    def __init__(self, request: CheckedRequest, token_bytes: TokenBytes) -> None:
        self.tokens: list[int] = []
        """The tokens that the client has."""
        self._min_tokens = request.sampling.min_tokens
        self._text = Detokenizer(token_bytes, request.shown)
        self._stops = StopStrings(request.stop) if request.stop else None

    @property
    def plain(self) -> bool:
        """Whether tokens can't end the completion: there are no stop strings."""
        return self._stops is None

    async def restore(self, resumed: Resumed) -> FinishReason:
        """Takes what the client has from earlier calls: these tokens, and their text, which is a function of them.

        Returns:
            How that ends the completion; unspecified if it doesn't.

        Raises:
            InvalidRequest: a stop string ended the completion before the last of the tokens.
        """
        for start in range(0, len(resumed.tokens), PART_TOKENS):
            part = resumed.tokens[start : start + PART_TOKENS]
            last = start + len(part) == len(resumed.tokens)
            piece = self.add(part, resumed.finish_reason if last else FINISH_REASON_UNSPECIFIED)
            if piece.finish_reason:
                if len(self.tokens) < len(resumed.tokens):
                    limit = f"{len(self.tokens)}, with which a stop string ends the completion"
                    raise InvalidRequest(f"{resumed.field}: number of ids", len(resumed.tokens), limit)
                return piece.finish_reason
            await asyncio.sleep(0)
        return FINISH_REASON_UNSPECIFIED

    def add(
        self, token_ids: Sequence[int], finish_reason: FinishReason, logprobs: Sequence[TokenLogprobs] = ()
    ) -> Piece:
        """Adds tokens, with their log-probabilities if they were asked for.

        A stop string ends the completion with the token that completed it; later tokens are dropped. A token that ends
        the sequence by itself (a stop id, an end-of-sequence token) has no text.

        Args:
            finish_reason: the worker's if the last of the tokens ended the sequence, else unspecified.
        """
        shown = token_ids[:-1] if finish_reason == FINISH_REASON_STOP else token_ids
        if self._stops is None:
            self.tokens += token_ids
            text = self._text.push(shown)
            if finish_reason != FINISH_REASON_UNSPECIFIED:
                text += self._text.flush()
            return Piece(text, token_ids, finish_reason, logprobs)
        return self._add_armed(self._stops, Piece("", token_ids, finish_reason, logprobs), len(shown))

    def _add_armed(self, stops: StopStrings, given: Piece, shown: int) -> Piece:
        """Does the same as `add` token by token: a stop string ends the completion with the token that completed it.

        Args:
            shown: how many of the given tokens have text.
        """
        texts: list[str] = []
        for at, token in enumerate(given.token_ids):
            self.tokens.append(token)
            if at == shown:
                break
            armed = len(self.tokens) >= self._min_tokens
            text, stopped = stops.push(self._text.push((token,)), armed=armed)
            texts.append(text)
            if stopped:
                end = at + 1
                return Piece("".join(texts), given.token_ids[:end], FINISH_REASON_STOP, given.logprobs[:end])
        finish_reason = given.finish_reason
        if finish_reason != FINISH_REASON_UNSPECIFIED:
            text, stopped = stops.push(self._text.flush())
            texts.append(text)
            if stopped:
                finish_reason = FINISH_REASON_STOP
            else:
                texts.append(stops.flush())
        return Piece("".join(texts), given.token_ids, finish_reason, given.logprobs)


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
    """Sink of a face whose every write must be awaited: gRPC."""

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


class Output:
    """Output of one session: messages with new tokens, then a last one with the figures. On one event loop only."""

    def __init__(self, request: CheckedRequest, trace: RequestTrace, sink: Sink, dispatch: Dispatch) -> None:
        """
        Args:
            trace: read for the last message, and written with each.
        """
        self.progress = trace.received
        """Monotonic time at which the latest token was sent or the latest attempt began."""
        self._request, self._trace, self._sink, self._dispatch = request, trace, sink, dispatch
        self._completion = Completion(request, dispatch.token_bytes)
        self._first = True
        self.plain = self._completion.plain
        """Whether `relay` may send tokens."""
        self.defect: Exception | None = None
        """Exception that was raised in `relay`, which has lost tokens."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that the client has, those of earlier calls included."""
        return self._completion.tokens

    @property
    def begun(self) -> bool:
        """Whether this call has sent tokens."""
        return self._trace.first_sent is not None

    async def restore(self) -> FinishReason:
        """Takes up what the client has from earlier calls; returns how that ends the completion, or unspecified.

        Raises:
            InvalidRequest: as `Completion.restore`.
        """
        finish_reason = await self._completion.restore(self._request.resumed)
        self._trace.completion_tokens = self._trace.resumed_tokens = len(self._completion.tokens)
        return finish_reason

    def add(self, taken: Taken) -> Piece:
        """Adds an attempt's new tokens to the completion; returns what is to be sent."""
        piece = self._completion.add(taken.token_ids, taken.finish_reason, taken.logprobs)
        self._trace.completion_tokens = len(self._completion.tokens)
        return replace(piece, prompt_logprobs=taken.prompt_logprobs) if taken.prompt_logprobs else piece

    async def write(self, piece: Piece, attempt: Attempt | None = None) -> None:
        """Sends a piece that isn't the last, as soon as the client takes it.

        Args:
            attempt: its next tokens gather meanwhile, by the router's pace.
        """
        if attempt is not None:
            self._gather_behind(attempt)
        message = self._message(piece)
        await _add_prompt(message, piece.prompt_logprobs)
        await self._sink.write(message)
        self._sent(self._dispatch.clock())

    async def finish(self, piece: Piece) -> None:
        """Sends the last piece, which may have no tokens, with usage and timeline."""
        trace, now = self._trace, self._dispatch.clock()
        if piece.token_ids:
            self._sent(now)
        last = self._message(piece)
        await _add_prompt(last, piece.prompt_logprobs)
        last.finish_reason = piece.finish_reason
        last.usage.CopyFrom(trace.usage())
        last.timeline.CopyFrom(trace.timeline(now))
        await self._sink.write(last)

    def relay(self, attempt: Attempt) -> bool:
        """Sends the plain tokens that the attempt has, without waiting; False if the session must look itself."""
        if attempt.failure is not None or not attempt.tokens.plain or not self._sink.ready:
            return False
        try:
            piece = self.add(attempt.tokens.take())
            self._gather_behind(attempt)
            self._sink.write_now(self._message(piece))
            self._sent(self._dispatch.clock())
        except Exception as error:  # noqa: BLE001  # the session raises it
            # Not to the worker's stream, which has called this: it carries other requests too.
            self.defect = error
            return False
        return True

    def _gather_behind(self, attempt: Attempt) -> None:
        """Lets the tokens behind the message that is about to be sent gather."""
        if self._trace.completion_tokens >= UNPACED_TOKENS:
            pacer, tenant = self._dispatch.pacer, self._request.claim.tenant
            if seconds := pacer.seconds(tenant):
                attempt.pause(self._dispatch.clock() + seconds, pacer, tenant)

    def _sent(self, now: float) -> None:
        self.progress = now
        gap = self._trace.sent(now)
        if gap is not None:
            self._dispatch.metrics.gap(gap)

    def _message(self, piece: Piece) -> GenerateResponse:
        # Fields without a value cost time too, and there is a message for every few tokens.
        message = GenerateResponse(request_id=self._request.request_id, text=piece.text, token_ids=piece.token_ids)
        if self._request.index:
            message.index = self._request.index
        if piece.logprobs:
            message.logprobs.extend(piece.logprobs)
        if self._first:
            self._first = False
            message.seed = self._request.sampling.seed
        return message


async def _add_prompt(message: GenerateResponse, parts: Sequence[Sequence[TokenLogprobs]]) -> None:
    """Adds the log-probabilities of a prompt to a message, a few at a time; others have their turn in between."""
    for part in parts:
        for start in range(0, len(part), PART_TOKENS):
            message.prompt_logprobs.extend(part[start : start + PART_TOKENS])
            await asyncio.sleep(0)
