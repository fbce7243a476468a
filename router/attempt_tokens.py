"""The tokens of one attempt: merged from its one or two workers, and gathered for fewer messages to the client.

    seen      [base .............. next)        the tokens without a gap; later ones wait in the stash

Between `pause` and the moment that it names, tokens gather: the session sleeps. The pacer lets them go some time after
the first token that comes after that moment, or when the first gathered one has waited for long enough
(`router/pacer.py`). The last token and `flush` let them go at once. Then the session takes all of them: its `relay` at
once if it can, without waking its task, which costs as much as the rest of a token's way.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from kvrelay.router.attempt_outcome import Taken
from kvrelay.router.pacer import Pace
from kvrelay.v1.inference_pb2 import FINISH_REASON_UNSPECIFIED, FinishReason, TokenLogprobs


class AttemptTokens:
    """For one producer, the attempt, and one consumer, the session; both on one event loop."""

    def __init__(self, base: int, left: int, *, scored: bool) -> None:
        """
        Args:
            base: index of the first token.
            left: most tokens to come.
            scored: whether each has its log-probabilities.
        """
        self.finish_reason: FinishReason = FINISH_REASON_UNSPECIFIED
        self.end: int | None = None
        """Index after the last token, once it is known."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._base, self._left, self._scored = base, left, scored
        self._seen: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        """Of the tokens in `_seen`, if they were asked for."""
        self._taken = 0
        self._stash: dict[int, tuple[int, TokenLogprobs | None]] = {}
        self._woken = False
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._until = 0.0
        """Monotonic time at which the pause ends for a token that comes then."""
        self._pauses = 0
        """How many have begun; a timer of an earlier one says nothing."""
        self._pace: Pace | None = None
        """Where the present pause waits for its turn to end; None once it does."""
        self._held = False
        """Whether the pacer was told of the first token of the present pause."""
        self.relay: Callable[[], bool] = lambda: False
        """Takes tokens that are due, and returns whether it did; else the session is woken. It must not raise."""

    def __len__(self) -> int:
        """Tokens that are here in order."""
        return len(self._seen)

    @property
    def complete(self) -> bool:
        """Whether every token up to the end is here."""
        return self._base + len(self._seen) == self.end

    @property
    def plain(self) -> bool:
        """Whether there is nothing to take but tokens, and their end isn't known."""
        return self.end is None and not self._scored and self._taken > 0

    # From the workers.

    def append(self, index: int, token: int, now: float) -> bool:
        """Takes a token if it is simply the next one; returns whether it was. The last one possible never is."""
        seen = self._seen
        at = len(seen)
        if index != self._base + at or at + 1 >= self._left or self._stash or self._scored or self.end is not None:
            return False
        seen.append(token)
        if self._paused:
            self._gather(now)
        else:
            self._offer()
        return True

    def merge(self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> str:
        """Takes tokens by their indices.

        Returns:
            Which of them differs from one that was here before; empty if none does.
        """
        before = len(self._seen)
        for offset, token in enumerate(token_ids):
            at = first_index - self._base + offset
            if at < 0:
                continue
            new = token, logprobs[offset] if self._scored else None
            known = self._seen[at] if at < len(self._seen) else self._stash.setdefault(at, new)[0]
            if known != token:
                return f"sent token {token} at index {self._base + at}, where {known} was sent before"
        while (found := self._stash.pop(len(self._seen), None)) is not None:
            self._seen.append(found[0])
            if found[1] is not None:
                self._logprobs.append(found[1])
        if len(self._seen) > before:
            if self._paused:
                self._gather(time.monotonic())
            else:
                self.wake()  # no relay: the attempt may have more to note about these tokens
        return ""

    def finish(self, end: int, reason: FinishReason) -> None:
        """The tokens end before index `end`, because of `reason`."""
        self.end, self.finish_reason = end, reason

    def _gather(self, now: float) -> None:
        """A token has come in a pause."""
        if now >= self._until:
            self._let_go(self._pauses)
        elif not self._held and self._pace is not None:
            self._held = True
            self._pace.hold(self._let_go, self._pauses)

    def _let_go(self, pause: int) -> None:
        """Ends a pause when it is this stream's turn."""
        if pause == self._pauses and self._pace is not None:
            self._pace.due(self._resume, pause)
            self._pace = None

    def _resume(self, pause: int) -> None:
        if pause == self._pauses:
            self._paused = False
            self._offer()

    def _offer(self) -> None:
        if not self.relay():
            self.wake()

    # Towards the session.

    def pause(self, until: float, pace: Pace) -> None:
        """Tokens that come before the monotonic time `until` gather, unless no more will come."""
        if not self.complete:
            self._paused, self._until, self._pace, self._held = True, until, pace, False
            self._pauses += 1

    def flush(self) -> None:
        """Ends the pause, and wakes the session."""
        self._paused = False
        self.wake()

    def wake(self) -> None:
        """Wakes the session; tokens gather on."""
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Returns when there may be something to take. For one waiter only."""
        # An `asyncio.Event` has a queue of waiters, which costs as much as all else here.
        if not self._woken:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._woken = False

    def take(self) -> Taken:
        """The new tokens in order, and what was asked for beside them; nothing while tokens gather."""
        if self._paused:
            return NOTHING
        first, self._taken = self._taken, len(self._seen)
        prompt_logprobs = [] if first or not self._taken else self.prompt_logprobs
        reason = self.finish_reason if self.complete else FINISH_REASON_UNSPECIFIED
        return Taken(self._seen[first:], reason, self._logprobs[first:], prompt_logprobs)


NOTHING = Taken([], FINISH_REASON_UNSPECIFIED, [], [])
