"""Requests that may end the workers that compute them.

A request that was running on a worker when that worker was lost is a suspect, as are all others that ran there. It is
tried again on workers without another suspect on trial, and preferably without any request, until it has sent a few
tokens more:

    lost, with others --> trial --TRIAL_TOKENS more--> runs as any other --CLEAN_TOKENS more--> no suspect any more
                            |                              |
                            v lost again                   v lost again
                         convicted                      another trial; convicted at the third loss

So a request that ends its worker each time ends two. Each of the others loses at most one worker to it, since no two
suspects are on trial on one worker: a worker that has one refuses the next one, which may come from another router.
"""

from dataclasses import dataclass

from kvrelay.internal.v1.worker_pb2 import Sampling
from kvrelay.router.trace import RequestTrace

TRIAL_TOKENS = 4
"""More than an engine can have computed and not yet sent when its worker was lost."""
CLEAN_TOKENS = 64
MAX_LOSSES = 3


@dataclass(slots=True)
class Suspicion:
    """The losses of one request, which has none at first. Counts are of tokens that its client has."""

    losses: int = 0
    """Workers that were lost while they computed the request, since it was last beyond suspicion."""
    _tokens: int = 0

    def lost(self, tokens: int, *, tried: bool) -> bool:
        """A worker was lost while it computed the request; returns whether the request is convicted.

        Args:
            tried: whether the request was on trial on that worker, apart from other suspects.
        """
        if tokens - self._tokens >= CLEAN_TOKENS:
            self.losses = 0
        self.losses += 1
        self._tokens = tokens
        return self.losses >= (2 if tried else MAX_LOSSES)

    def needs_trial(self, tokens: int) -> bool:
        """Whether the request has to be kept apart from other suspects now."""
        return self.losses > 0 and tokens < self._tokens + TRIAL_TOKENS


def shape_of(sampling: Sampling, trace: RequestTrace) -> dict[str, object]:
    """What a log may tell of a request: lists, biases and constraints may tell what the text is about."""
    given = sampling.ListFields()
    plain = {field.name: value for field, value in given if field.message_type is None and not field.is_repeated}
    return {
        "prompt_tokens": trace.prompt_tokens,
        "completion_tokens": trace.completion_tokens,
        "sampling": plain,
    }
