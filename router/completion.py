"""The completion of one request: its tokens, their text, and where a stop string ends it."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.router.detokenizer import Detokenizer, TokenBytes
from kvrelay.router.stops import StopStrings
from kvrelay.router.validation import CheckedRequest


class Finish(enum.Enum):
    """Why a completion ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new for the client."""

    text: str
    token_ids: Sequence[int]
    finish: Finish | None


class Completion:
    """Grows by tokens, in order, from whichever workers they come."""

    def __init__(self, request: CheckedRequest, token_bytes: TokenBytes) -> None:
        self.tokens: list[int] = []
        """What the client has."""
        self._min_tokens = request.sampling.min_tokens
        self._text = Detokenizer(token_bytes)
        self._stops = StopStrings(request.stop)

    def add(self, token_ids: Sequence[int], finish: Finish | None) -> Piece:
        """Adds tokens; `finish` is the worker's, which ended the sequence with the last of them.

        A stop string found ends the completion with the token that completed it: the rest is dropped. The text of a
        token that is itself the end (a stop id, the end of the sequence) is not shown.
        """
        shown: list[str] = []
        for at, token in enumerate(token_ids):
            self.tokens.append(token)
            if finish is Finish.STOP and at == len(token_ids) - 1:
                break
            armed = len(self.tokens) >= self._min_tokens
            text, stopped = self._stops.push(self._text.push(token), armed=armed)
            shown.append(text)
            if stopped:
                return Piece("".join(shown), token_ids[: at + 1], Finish.STOP)
        if finish is not None:
            text, stopped = self._stops.push(self._text.flush())
            shown.append(text)
            if stopped:
                finish = Finish.STOP
            else:
                shown.append(self._stops.flush())
        return Piece("".join(shown), token_ids, finish)
