"""The completion of one request: its tokens, their text, and the stop string that may end it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.router.errors import InvalidRequest
from kvrelay.router.request.validation import CheckedRequest, Resumed
from kvrelay.router.text.detokenizer import Detokenizer, TokenBytes
from kvrelay.router.text.stops import StopStrings
from kvrelay.v1.inference_pb2 import FINISH_REASON_STOP, FINISH_REASON_UNSPECIFIED, FinishReason, TokenLogprobs

PART_TOKENS = 512
"""Resumed tokens that are added at a time, in some milliseconds; then others have their turn on the event loop."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New output for the client."""

    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason
    """Unspecified unless this is the last piece."""
    logprobs: Sequence[TokenLogprobs] = ()
    """One for each token if they were asked for, else none."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """All of them in the first piece with a token, if they were asked for."""


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
        """As `add`, token by token: a stop string ends the completion with the token that completed it.

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
