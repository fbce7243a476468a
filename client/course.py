"""The course of one request over several calls: which router gets the next one, when, and when to give up. No I/O.

             UNAVAILABLE, or the connection is lost      each router has failed, and START_SECONDS have passed;
    call 1 ----------------------------------------> call 2 --> ... --------------------------------------------> error
      |                                                  with one router: two calls have failed
      v first message
             UNAVAILABLE, or the connection is lost      `resume_seconds` without a message
    call n ----------------------------------------> call n+1, with the tokens so far --> ... ------------------> error

RESOURCE_EXHAUSTED makes a request try each other router once; a stream that has begun then waits as long as the routers
ask. No other error is tried again, nor one that the router has marked as given up.
"""

import math
import random
import secrets
import threading
import time
import uuid
from collections.abc import Callable, MutableSequence, Sequence

from kvrelay.client.errors import Cancelled, Exhausted, InvalidRequest, KvrelayError, Unavailable
from kvrelay.v1 import inference_pb2 as pb

KEY_BYTES = 16
RESUME_SECONDS = 30.0
START_SECONDS = 5.0
"""Seconds for which a request without a message looks for a router; one that is replaced takes some to start."""
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
"""The pause before a call is a random part of a time that doubles each time that all routers have failed."""
SHUNNED_SECONDS = 3.0
"""Seconds for which requests prefer other routers to one that failed."""


class Routers:
    """The routers that a client knows by address. Requests begin at them in turn. Threads may share it."""

    def __init__(self, target: str | Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            target: host:port of each, in one string separated by commas, or as a sequence.

        Raises:
            InvalidRequest: an address is empty.
        """
        parts = target.split(",") if isinstance(target, str) else target
        self.addresses = tuple(dict.fromkeys(part.strip() for part in parts))
        if not all(self.addresses) or not self.addresses:
            raise InvalidRequest(
                f"target is {target!r}; allowed: host:port of a router, or several with commas between"
            )
        self._clock = clock
        self._lock = threading.Lock()
        self._turn = random.randrange(len(self.addresses))
        self._shunned = [-math.inf] * len(self.addresses)

    def first(self) -> int:
        """Index of the router for a new request."""
        with self._lock:
            self._turn += 1
            count = len(self.addresses)
            order = [(self._turn + step) % count for step in range(count)]
            return next((router for router in order if not self._is_shunned(router)), order[0])

    def after(self, router: int) -> int:
        """Index of the router for the next call of a request that `router` failed: another one, if there is one."""
        with self._lock:
            self._shunned[router] = self._clock() + SHUNNED_SECONDS
            others = [other for other in range(len(self.addresses)) if other != router] or [router]
            return random.choice([other for other in others if not self._is_shunned(other)] or others)

    def _is_shunned(self, router: int) -> bool:
        return self._clock() < self._shunned[router]


class Course:
    """One request, from its first call to its last."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        routers: Routers,
        timeout: float | None,
        resume_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            request: what was asked. Its id and its seed are drawn here, since all calls must have the same.
            timeout: seconds until the request fails; None for no limit.
            resume_seconds: how long a stream that has begun may be without a router; 0 never continues it.
        """
        self._request = pb.GenerateRequest()
        self._request.CopyFrom(request)
        self._request.request_id = request.request_id or uuid.uuid4().hex
        if not request.sampling.HasField("seed"):
            self._request.sampling.seed = secrets.randbits(64)
        self._request.resume.key = secrets.token_bytes(KEY_BYTES)
        self._ended: set[int] = set()
        """The completions whose last message has come."""
        self._routers = routers
        self._clock = clock
        self._deadline = None if timeout is None else clock() + timeout
        self._resume_seconds = resume_seconds
        self.router = routers.first()
        """Index of the router for the present call."""
        self._begun = False
        """Whether any call has received a message."""
        self._failures = 0
        """Failed calls in a row since the latest message."""
        self._lost_at = 0.0
        """Time of the first of these failures."""

    def call(self) -> pb.GenerateRequest:
        """The message of the next call."""
        self._request.resume.call += 1
        return self._request

    @property
    def timeout(self) -> float | None:
        """Seconds until the request fails; None for no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def received(self, response: pb.GenerateResponse) -> bool:
        """Takes a message of the present call; returns whether it is news. It isn't if its completion has ended in an
        earlier call."""
        self._begun = True
        self._failures = 0
        if response.index in self._ended:
            return False
        if response.finish_reason:
            self._ended.add(response.index)
        self._tokens(response.index).extend(response.token_ids)
        return True

    def _tokens(self, index: int) -> MutableSequence[int]:
        """Tokens of one completion that were received."""
        resume = self._request.resume
        if index == 0:
            return resume.token_ids
        while len(resume.others) < index:
            resume.others.add()
        return resume.others[index - 1].ids

    def failed(self, error: KvrelayError) -> float:
        """Takes the error of the present call, and chooses the router of the next one.

        Returns:
            Seconds to wait before the next call.

        Raises:
            KvrelayError: `error`, if there is no next call.
        """
        if not isinstance(error, Unavailable | Cancelled | Exhausted) or (
            isinstance(error, Unavailable) and error.given_up
        ):
            raise error
        now = self._clock()
        if not self._failures:
            self._lost_at = now
        self._failures += 1
        left = self._left(error, now)
        if left <= 0:
            raise error
        self.router = self._routers.after(self.router)
        return min(self._pause(error), left, math.inf if self.timeout is None else self.timeout)

    def _pause(self, error: KvrelayError) -> float:
        rounds = self._failures // len(self._routers.addresses)
        longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(rounds, 10))
        asked = error.retry_after or 0.0 if isinstance(error, Exhausted) and rounds else 0.0
        return asked + random.uniform(0.0, longest)

    def _left(self, error: KvrelayError, now: float) -> float:
        """Seconds left in which another call may begin; none may if this isn't positive."""
        if self._begun:
            return self._lost_at + self._resume_seconds - now
        known = len(self._routers.addresses)
        tries = 2 if known == 1 and not isinstance(error, Exhausted) else known
        if self._failures < tries:
            return math.inf
        return 0.0 if known == 1 or isinstance(error, Exhausted) else self._lost_at + START_SECONDS - now
