"""The needs that a request has of the workers, and the part of its holder's share that it has used."""

import math

from kvrelay.internal.v1.worker_pb2 import Urgency
from kvrelay.router.config import INTERACTIVE
from kvrelay.router.placing.placement import Degree, Demand
from kvrelay.router.request.validation import CheckedRequest
from kvrelay.router.session.dispatch import Dispatch
from kvrelay.router.trace import RequestTrace
from kvrelay.rpc.identity import WorkerId, WorkerRole

LEAST_SECONDS = 1e-6
"""Time in seconds that stands for a target that passes just now: 0 would be no target."""


class Needs:
    """Needs of one session."""

    def __init__(self, request: CheckedRequest, trace: RequestTrace, dispatch: Dispatch) -> None:
        self._request, self._trace, self._dispatch = request, trace, dispatch
        self._charged = 0
        self._degrees: dict[WorkerRole, Degree] = {}

    @property
    def begun(self) -> bool:
        """Whether the client has tokens, of this call or an earlier one."""
        return self._trace.first_sent is not None or self._trace.resumed_tokens > 0

    @property
    def _yields(self) -> bool:
        """Whether the class is less urgent than `interactive`."""
        return self._request.claim.service.rank > self._dispatch.services[INTERACTIVE].rank

    def demand(self, avoid: frozenset[WorkerId], *, on_trial: bool = False) -> Demand:
        """The demand of the next attempt; with `on_trial`, for workers without another suspect."""
        request, have = self._request, self._trace.completion_tokens
        return Demand(
            self._trace.prompt_tokens + have,
            request.sampling.max_tokens - have - 1,
            avoid,
            on_trial=on_trial,
            chain=request.chain,
            key=request.key,
            expected_tokens=max(1, self.expected_tokens() - have),
            holder=request.claim.holder,
            begun=self.begun,
            yields=self._yields,
            degrees=self._degrees if self.begun else {},
        )

    def placed(self, degrees: dict[WorkerRole, Degree]) -> None:
        """Workers of these degrees compute from here on. The first token fixes the degrees for the whole stream."""
        if not self.begun:
            self._degrees = degrees

    def expected_tokens(self) -> int:
        """Tokens that the whole completion is expected to have; `max_tokens` once it has passed the expectation."""
        most = self._request.sampling.max_tokens
        expected = self._dispatch.placing.lengths.expected(self._request.claim.holder, most)
        return expected if expected > self._trace.completion_tokens else most

    def urgency(self, now: float) -> Urgency:
        """The urgency of the attempt that begins at a monotonic time.

        A stream that has begun is late from the time on at which its next token was due.
        """
        claim, trace = self._request.claim, self._trace
        service, due = claim.service, claim.due
        if self.begun:
            due = (trace.last_sent or trace.received) + service.tpot_seconds
        return Urgency(
            rank=service.rank,
            priority=claim.priority,
            first_token_seconds=0.0 if due == math.inf else due - now or -LEAST_SECONDS,
            yields=self._yields,
        )

    def queued(self, demand: Demand) -> None:
        """Notes that the request waits for its first place, for which the queue charges the expected tokens."""
        self._charged = 0 if demand.begun else demand.expected_tokens

    def ended(self) -> None:
        """Notes the request's end: corrects its charge to the tokens that it had, and learns its length."""
        claim, trace, dispatch = self._request.claim, self._trace, self._dispatch
        dispatch.placing.queue.used(claim, trace.generated_tokens - self._charged)
        dispatch.placing.rate.ended()
        if trace.generated_tokens:
            dispatch.placing.lengths.learn(claim.holder, self._request.sampling.max_tokens, trace.completion_tokens)
