"""What a session gets from an attempt: its tokens, and why it failed."""

from dataclasses import dataclass
from typing import NamedTuple

from kvrelay.internal.v1.worker_pb2 import Failure
from kvrelay.rpc.identity import WorkerId
from kvrelay.v1.inference_pb2 import FinishReason, TokenLogprobs

_CAUSES = {
    Failure.CAUSE_PEER_LOST: "peer_lost",
    Failure.CAUSE_DRAINING: "draining",
    Failure.CAUSE_LINK: "link",
    Failure.CAUSE_REFUSED: "refused",
    Failure.CAUSE_TRIAL: "trial",
}
_CODES = {Failure.CODE_FULL: "full", Failure.CODE_INTERNAL: "internal"}


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Why an attempt failed."""

    code: Failure.Code
    message: str
    blamed: frozenset[WorkerId]
    """Workers that the next attempt should avoid."""
    lost: bool = False
    """Whether a worker was lost; False where a worker returned the request."""
    silent: bool = False
    """Whether workers sent nothing for too long."""
    cause: Failure.Cause = Failure.CAUSE_UNSPECIFIED
    reporters: frozenset[WorkerId] = frozenset()
    """The worker that returned the request; those that were silent; none for a lost worker."""

    @property
    def reason(self) -> str:
        """Why it failed, in one word, for metrics and spans (`ATTEMPT_REASON` in rpc/metrics/labels.py)."""
        if self.lost or self.silent:
            return "lost" if self.lost else "silent"
        return _CAUSES.get(self.cause) or _CODES.get(self.code, "other")

    @property
    def handoff(self) -> bool:
        """Whether the hand-off between the two workers failed."""
        return self.cause in (Failure.CAUSE_PEER_LOST, Failure.CAUSE_LINK, Failure.CAUSE_REFUSED)


class Taken(NamedTuple):
    """What an attempt has that was not taken before."""

    token_ids: list[int]
    finish_reason: FinishReason
    """Unspecified unless the tokens are the last."""
    logprobs: list[TokenLogprobs]
    """One for each token if they were asked for, else none."""
    prompt_logprobs: list[TokenLogprobs]
    """All of them, with the first tokens, if they were asked for."""
