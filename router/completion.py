"""The completion of one request: its tokens, their text, and the stop string that may end it."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.router.detokenizer import Detokenizer, TokenBytes
from kvrelay.router.stops import StopStrings
from kvrelay.router.validation import CheckedRequest
from kvrelay.v1.inference_pb2 import FINISH_REASON_STOP, FINISH_REASON_UNSPECIFIED, FinishReason


@dataclass(frozen=True, slots=True)
class Piece:
    """New output for the client."""

    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason
    """Unspecified unless this is the last piece."""


class Completion:
    """Collects the tokens of all attempts, in order."""

    def __init__(self, request: CheckedRequest, token_bytes: TokenBytes) -> None:
        self.tokens: list[int] = []
        """The tokens that the client has."""
        self._min_tokens = request.sampling.min_tokens
        self._text = Detokenizer(token_bytes)
        self._stops = StopStrings(request.stop)

    def add(self, token_ids: Sequence[int], finish_reason: FinishReason) -> Piece:
        """Adds tokens; `finish_reason` is the worker's if the last of them ended the sequence, else unspecified.

        A stop string ends the completion with the token that completed it; later tokens are dropped. A token that ends
        the sequence by itself (a stop id, an end-of-sequence token) has no text.
        """
        shown: list[str] = []
        for at, token in enumerate(token_ids):
            self.tokens.append(token)
            if finish_reason == FINISH_REASON_STOP and at == len(token_ids) - 1:
                break
            armed = len(self.tokens) >= self._min_tokens
            text, stopped = self._stops.push(self._text.push(token), armed=armed)
            shown.append(text)
            if stopped:
                return Piece("".join(shown), token_ids[: at + 1], FINISH_REASON_STOP)
        if finish_reason != FINISH_REASON_UNSPECIFIED:
            text, stopped = self._stops.push(self._text.flush())
            shown.append(text)
            if stopped:
                finish_reason = FINISH_REASON_STOP
            else:
                shown.append(self._stops.flush())
        return Piece("".join(shown), token_ids, finish_reason)
