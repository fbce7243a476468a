"""The part of an attempt that one worker does."""

import math
import time
from dataclasses import dataclass
from typing import Protocol

from kvrelay.internal.v1.worker_pb2 import WAIT_UNSPECIFIED, Phase, RequestEvent, Wait
from kvrelay.router.placing.worker_stream import WorkerStream
from kvrelay.router.session.attempt_tokens import AttemptTokens


class Whole(Protocol):
    """The attempt, as its parts see it."""

    tokens: AttemptTokens

    def on_event(self, part: "Part", event: RequestEvent) -> None: ...

    def on_lost(self, part: "Part") -> None: ...

    def wake(self) -> None: ...


@dataclass(slots=True)
class Part:
    """Listens to the worker's stream, and counts as one of its requests and suspects while it is one there."""

    attempt: Whole
    stream: WorkerStream
    phase: Phase
    next_index: int
    """Index of the next token that the worker has to send."""
    suspect_tokens: int
    """Tokens that the worker has yet to send until the request is no suspect there (`router/session/suspects.py`)."""
    on_trial: bool
    """Whether no other suspect may be there until then."""
    open: bool = True
    """Whether the worker may send more events."""
    delivered: bool = False
    """Whether the worker has sent a token."""
    taken: bool = False
    """Whether the worker has said that it has taken a suspect."""
    waits: Wait = WAIT_UNSPECIFIED
    """Why the worker computes nothing of the request, by its own word."""
    computed_at: float = -math.inf
    """Monotonic time at which the worker has told how much of the prompt is computed."""
    returned: bool = False
    """Whether the worker has given the request back."""
    _plain: bool = False
    """Whether nothing is to be noted of the worker's next token but the token."""
    _counted: bool = True
    """Whether the part is one of `stream.requests`."""
    _suspect: bool = False
    """Whether the part is one of `stream.suspects`."""

    def __post_init__(self) -> None:
        self.stream.requests += 1
        self._suspect = self.suspect_tokens > 0
        self.stream.suspects += self._suspect

    @property
    def tried(self) -> bool:
        """Whether the request is on trial on the worker, or was when that was lost."""
        return self.on_trial and self.suspect_tokens > 0

    @property
    def sign(self) -> float:
        """Monotonic time of the latest sign that the worker, which sends no token, has the request in hand: it has told
        that it computes the prompt; or it lives, and the request waits there."""
        return self.stream.heard if self.waits else self.computed_at

    def waiting(self, why: Wait) -> None:
        """The worker says that the request waits there."""
        self.waits, self._plain = why, False

    def computing(self) -> None:
        """The worker says that it computes the prompt."""
        self.waits, self.computed_at = WAIT_UNSPECIFIED, time.monotonic()

    def sent(self, end: int) -> None:
        """The worker has sent all of its tokens before index `end`."""
        if self.suspect_tokens:
            self.suspect_tokens = max(0, self.suspect_tokens - max(0, end - self.next_index))
            if not self.suspect_tokens:
                self.clear()
        self.waits = WAIT_UNSPECIFIED
        self.next_index = max(self.next_index, end)
        self.delivered = True
        self._plain = not self.suspect_tokens

    def computed(self) -> None:
        """The worker computes nothing more for this part. Safe to call again."""
        self.stream.requests -= self._counted
        self._counted = False

    def clear(self) -> None:
        """The worker has no suspect in this part any more. Safe to call again."""
        if self._suspect:
            self._suspect = False
            self.stream.suspect_gone()

    # From the stream.

    def on_token(self, index: int, token: int, now: float) -> None:
        # Nearly all tokens take the short way: what else is to be done was done for the first ones.
        if self._plain and index == self.next_index and self.attempt.tokens.append(index, token, now):
            self.next_index = index + 1
        else:
            self.attempt.on_event(self, RequestEvent(first_index=index, token_ids=[token]))

    def on_event(self, event: RequestEvent) -> None:
        self.attempt.on_event(self, event)

    def on_lost(self) -> None:
        self.attempt.on_lost(self)

    def on_doubt(self) -> None:
        self.attempt.wake()
