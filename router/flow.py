"""The way of a running attempt's tokens to the client: into the completion, paced, out as a message.

The session's task does it for the tokens that tell it something: the first ones, the last, those of an attempt that has
yet to prove itself. All others, while the task waits, take the short way: the callback that finds them due sends them.
To wake a task for them would cost as much as all else.
"""

import time

from kvrelay.router.answer import Answer
from kvrelay.router.attempt import Attempt
from kvrelay.router.attempt_outcome import Taken
from kvrelay.router.completion import Completion, Piece
from kvrelay.router.pacer import UNPACED_TOKENS, Pace
from kvrelay.router.trace import RequestTrace


class Flow:
    """That of one session. Used on one event loop only."""

    def __init__(self, completion: Completion, answer: Answer, trace: RequestTrace, pace: Pace) -> None:
        self._completion = completion
        self._answer = answer
        self._trace = trace
        self._pace = pace
        self._open: Attempt | None = None
        """The attempt whose plain tokens need not wake the session; None while there is none."""
        self._defect: Exception | None = None
        """What went wrong on the short way."""

    async def wait(self, attempt: Attempt, *, proven: bool) -> None:
        """Waits until the attempt has something for the session.

        Args:
            proven: whether the session has nothing to note about plain tokens.

        Raises:
            Exception: a defect on the short way, which has lost tokens.
        """
        if proven and self._completion.plain:
            self._open = attempt
            attempt.tokens.relay = self._relay
        try:
            await attempt.wait()
        finally:
            self._open = None
        if self._defect is not None:
            raise self._defect

    def add(self, taken: Taken) -> Piece:
        """Adds tokens to the completion."""
        piece = self._completion.add(taken.token_ids, taken.finish_reason, taken.logprobs)
        self._trace.completion_tokens = len(self._completion.tokens)
        return piece

    def pace(self, attempt: Attempt) -> None:
        """A message is about to be sent: the tokens that follow it gather."""
        if self._trace.completion_tokens >= UNPACED_TOKENS and (seconds := self._pace.seconds):
            attempt.pause(time.monotonic() + seconds, self._pace)

    def _relay(self) -> bool:
        attempt = self._open
        if attempt is None or attempt.failure is not None or not attempt.tokens.plain or not self._answer.ready:
            return False
        try:
            piece = self.add(attempt.take())
            self.pace(attempt)
            self._answer.send_now(piece)
        except Exception as error:  # noqa: BLE001  # `wait` raises it
            # Not to the worker's stream, which has called this: it carries other requests too.
            self._defect = error
            return False
        return True
