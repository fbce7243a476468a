"""Requests that may end the workers that compute them.

A request that a worker may have been computing when it was lost is a suspect, as are all others that it had, until it
has sent a few tokens more. It is tried again alone:

    lost, with others --> trial --TRIAL_TOKENS more--> runs as any other --CLEAN_TOKENS more--> no suspect any more
                            |                              |
                            v lost again                   v lost again
                         convicted                      another trial; convicted at the third loss

So a request that ends its worker each time ends two. Each of the others loses at most both to it, and the second one
only if it has stood its own trial by then; so none of them is convicted. This takes that a worker which is lost in a
trial had no other suspect, whichever router sent it, and that the router knows of the trial by then:

    router  Submit, as a suspect -->  worker   takes it, unless it has another suspect and one of both is on trial
    router  <-- taken                 worker   keeps all others out from now on; computes nothing of it
    router  Begin -->                 worker   computes it
            when each worker of the attempt has taken it; from then on, a loss counts
    router  judges before it cancels the attempt: until then, the worker keeps the others out

No suspect waits without limit. One that gets no trial within TRIAL_SECONDS of its failed attempt is a suspect still,
but not on trial: it runs beside others like it, wherever no trial is under way. It waits for trials that have begun,
and for those that begin within the TRIAL_SECONDS of others; a trial ends with a few tokens, or by the time limits of
any request. So it waits for long only while more workers are lost, and is given up `router.idle_timeout_seconds` after
its failed attempt. If it loses a second worker in this way, only a trial can tell it from those beside it: it waits for
one until it is given up.

A decode worker may be computing once prefill has sent the first token. That comes on another stream, which may be
behind: a lost decode worker is judged when the token is here, or a moment later.

Only a worker that has ended counts against a suspect: one that still listens at its address, whose stream broke since
it was frozen or got no CPU, proves nothing. A worker that another cause ends, in the few tokens of a trial, convicts
the request: the two losses look alike.
"""

from dataclasses import dataclass

from kvrelay.internal.v1.worker_pb2 import Sampling
from kvrelay.router.trace import RequestTrace

TRIAL_TOKENS = 4
"""Number of tokens for which a trial lasts: more than an engine can have computed and not yet sent when its worker is
lost."""
TRIAL_SECONDS = 5.0
"""Longest time in seconds that a suspect that has lost one worker waits for workers without another suspect."""
CLEAN_TOKENS = 64
MAX_LOSSES = 3


@dataclass(slots=True)
class Suspicion:
    """The losses of one request, which has none at first. Counts are of tokens that its client has."""

    losses: int = 0
    """Workers that were lost while they computed the request, since it was last beyond suspicion."""
    failed: float = 0.0
    """Monotonic time at which the request's latest attempt failed, those aside that found other suspects."""
    _tokens: int = 0

    def lost(self, tokens: int, *, tried: bool) -> bool:
        """Notes that a worker was lost while it computed the request; returns whether the request is convicted.

        Args:
            tried: whether the request was on trial there.
        """
        if tokens - self._tokens >= CLEAN_TOKENS:
            self.losses = 0
        self.losses += 1
        self._tokens = tokens
        return self.losses >= (2 if tried else MAX_LOSSES)

    @property
    def verdict(self) -> str:
        """The error text for the client of a convicted request."""
        return (
            f"suspected of ending workers: {self.losses} were lost while they computed this request. It is not tried "
            "again"
        )

    def tried_by(self, longest: float) -> float:
        """Monotonic time until which the request waits for a trial; `longest` is the most it may wait: seconds."""
        return self.failed + (TRIAL_SECONDS if self.losses < MAX_LOSSES - 1 else longest)

    def tokens_left(self, tokens: int) -> int:
        """The number of further tokens for which the request is a suspect; 0: it is none."""
        return max(0, self._tokens + TRIAL_TOKENS - tokens) if self.losses else 0


def shape_of(sampling: Sampling, trace: RequestTrace) -> dict[str, object]:
    """The fields of a request that a log may show. Lists, biases and constraints could tell what the text is about."""
    given = sampling.ListFields()
    plain = {field.name: value for field, value in given if field.message_type is None and not field.is_repeated}
    return {
        "prompt_tokens": trace.prompt_tokens,
        "completion_tokens": trace.completion_tokens,
        "sampling": plain,
    }
